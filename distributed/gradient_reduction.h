// How one gradient bucket becomes its average over the ranks. The default adds in the gradients'
// own dtype (float32, or float64 for float64 parameters); compression sends half of the bytes; a
// program's own function may do anything else.
//
//   mt::distributed::DataParallel dp(net, world, {.reduce = mt::distributed::Reduce::bf16});
//   mt::distributed::DataParallel dp(net, world, {.comm_hook = [](auto& bucket, auto& group) {
//     return mt::distributed::Reduction{group.all_reduce_async(bucket.gradients, ReduceOp::avg)};
//   }});
#pragma once

#include "distributed/communicator.h"
#include "distributed/gradient_buckets.h"
#include "engine/function.h"

namespace mixtape::distributed {

enum class Reduce : std::uint8_t {
  full,  // in the gradients' dtype
  bf16,  // sent as bfloat16: float32's range, 8 bits of precision
  fp16,  // sent as float16, scaled by a factor that the ranks agree on: 11 bits of precision
};

/// A reduction under way.
struct Reduction {
  Work work = {};
  /// Runs after work.wait(), on the stream that reads the gradients, with gradients not recorded;
  /// may be empty. Afterwards the bucket holds the average, the same bits on every rank.
  Function<void()> finish = {};
};

/// Starts the reduction of a bucket that is complete on this rank. Called with the same buckets in
/// the same order on every rank, on the stream that computed the gradients.
using CommHook = Function<Reduction(GradientBucket& bucket, Communicator& group)>;

/// The hook for a Reduce. Buckets of float64 are always reduced in full.
///
/// Compression rounds what is sent and what comes back: each by a relative 2^-9 (bf16) or 2^-12
/// (fp16). fp16 scales each bucket so that the sum over ranks of its largest magnitudes becomes
/// 2^14, at the price of one more all-reduce of one number, for which the CPU waits: no sum can
/// overflow, and elements down to 2^-38 of that sum do not become 0. Inf and NaN on any rank stay
/// inf or NaN on all.
CommHook make_comm_hook(Reduce reduce);

}  // namespace mixtape::distributed
