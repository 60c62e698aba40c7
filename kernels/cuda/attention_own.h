// Our own blocked attention kernels: everything the contract allows with D <= 256, in float (double
// for f64). Backward makes each (query tile, key tile) pair twice, once for dk and dv and once for
// dq, so that no two blocks add to one address and results are the same in every run.
#pragma once

#include "kernels/attention.h"

namespace mixtape::kernels::cuda {

inline constexpr std::int64_t kOwnAttentionColumns = 256;

void own_attention_forward(const Stream& stream, const AttentionForward& args);
std::size_t own_attention_backward_workspace_bytes(const AttentionBackward& args);
void own_attention_backward(const Stream& stream, const AttentionBackward& args,
                            Workspace workspace);

}  // namespace mixtape::kernels::cuda
