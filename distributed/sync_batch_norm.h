// Batch normalisation whose statistics are those of all ranks' samples together, for batches that
// are small on each rank: what BatchNorm gives for the concatenated batch, forward and backward.
//
//   mt::distributed::convert_sync_batch_norm(net, world);     // every BatchNorm of a model
//   mt::distributed::SyncBatchNorm norm(64, world);           // or one layer
//
// Ranks may hold different numbers of samples, also none. Each sends its count, mean and squares
// about the mean (float64, merged as Chan et al. 1979 do, never E[x^2] - E[x]^2) in one all-gather
// forward, and two sums a channel in one all-reduce backward: all ranks run both passes, and those
// without samples call them with an empty batch.
#pragma once

#include "distributed/communicator.h"
#include "nn/layers.h"

namespace mixtape::distributed {

/// batch_norm() (ops/ops.h) over the x of all ranks of `group` in training; outside of training it
/// is batch_norm(). x (N, C, ..) with the same C on all ranks. The running statistics become the
/// same on all ranks; a batch that is empty everywhere moves nothing. dx is the gradient of the sum
/// of the ranks' losses; those of weight and bias are this rank's part, which DataParallel or an
/// all-reduce adds up. 16-bit dx are rounded twice. Throws on every rank when x has one value per
/// channel over all of them (CPU; on CUDA, where the host does not wait for the count, y is then
/// the bias and the running variance moves towards 0).
Tensor sync_batch_norm(const Tensor& x, const Tensor& weight, const Tensor& bias,
                       const Tensor& running_mean, const Tensor& running_var,
                       const BatchNormOptions& options, const Communicator& group);

class SyncBatchNorm : public nn::BatchNorm {
 public:
  SyncBatchNorm(std::int64_t channels, const Communicator& group, nn::BatchNormConfig config = {});
};

/// Makes every BatchNorm of the tree one over `group`; names, parameters, buffers and checkpoints
/// stay as they are. How many there were. Call it on all ranks, before or after DataParallel.
int convert_sync_batch_norm(nn::ModuleBase& module, const Communicator& group);

}  // namespace mixtape::distributed
