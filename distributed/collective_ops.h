// Collectives as differentiable ops, for models whose computation crosses ranks.
//
// A backward pass calls the collectives that belong to the forward ones, in reverse order: all
// ranks must run it, and over graphs that have the same collectives. The loss whose gradient these
// give is the sum of all ranks' losses; where every rank computes the same loss from the same
// values, use the forms that say `same loss` (Shoeybi et al. 2019, "Megatron-LM", section 3).
#pragma once

#include "distributed/communicator.h"

namespace mixtape::distributed {

/// What an all_reduce's backward pass does with dy.
enum class AllReduceBackward : std::uint8_t {
  all_reduce,  // each rank's loss is its own: dx = sum of all ranks' dy
  identity,    // same loss on all ranks (the output of a row-parallel layer): dx = dy
};

/// y = sum (or average) over the ranks' x. ReduceOp::min and max have no gradient here.
Tensor all_reduce(const Tensor& x, const Communicator& group, ReduceOp op = ReduceOp::sum,
                  AllReduceBackward backward = AllReduceBackward::all_reduce);
/// y = x; backward dx = sum of all ranks' dy: where a replicated x enters computation that is split
/// over ranks (the input of a column-parallel layer), same loss.
Tensor copy_to_ranks(const Tensor& x, const Communicator& group);
/// y = the ranks' x joined along dimension 0: (n, ..) each -> (size() n, ..). Backward is
/// reduce_scatter.
Tensor all_gather(const Tensor& x, const Communicator& group);
/// y = this rank's part, along dimension 0, of the sum (or average) of the ranks' x: (size() n, ..)
/// -> (n, ..). Backward is all_gather.
Tensor reduce_scatter(const Tensor& x, const Communicator& group, ReduceOp op = ReduceOp::sum);
/// Part r, along dimension 0, of y = part rank() of rank r's x. Backward is all_to_all.
Tensor all_to_all(const Tensor& x, const Communicator& group);
/// y = root's x on all ranks; backward: root gets the sum of all ranks' dy, others get zeros. All
/// ranks pass an x of the same shape and dtype.
Tensor broadcast(const Tensor& x, const Communicator& group, int root = 0);

}  // namespace mixtape::distributed
