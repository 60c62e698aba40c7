// What ranks have to agree on besides gradients: means over what all of them hold, and overflow.
#pragma once

#include "distributed/communicator.h"
#include "optim/grad_scaler.h"

namespace mixtape::distributed {

/// The loss of a step whose ranks (or micro-batches) hold different numbers of tokens: the sum of
/// all ranks' losses over the count of all ranks' tokens, the same on every rank. A mean of the
/// ranks' means would weigh tokens of short batches more.
///
/// loss_sum (0-d, floating): this rank's sum. count: tokens (or samples) that this rank's step
/// holds, over all of its micro-batches if there are several; the sum of their global means is then
/// the step's. Where no rank has a token the result is 0.
///
/// Backward gives loss_sum the gradient size()/count of all, so that what DataParallel averages is
/// the gradient of the global mean. All ranks call it in the same order; the host waits only where
/// the communicator does.
///
///   Tensor sum = cross_entropy(logits, targets, {.reduction = Reduction::sum});
///   distributed::global_mean(sum, tokens, world).backward();
Tensor global_mean(const Tensor& loss_sum, double count, Communicator group);

/// Lets the scaler skip a step on every rank as soon as one rank's gradients overflowed. Not needed
/// with DataParallel alone, where inf and NaN are in the averages of all ranks: it is for gradients
/// that ranks do not share, or that were changed after backward. One all-reduce of 4 bytes for each
/// optimizer and step; every rank takes the same steps with the same optimizers.
void agree_on_overflow(GradScaler& scaler, Communicator group);

}  // namespace mixtape::distributed
