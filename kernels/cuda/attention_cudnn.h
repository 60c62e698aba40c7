// cuDNN's fused attention, through the C++ frontend (attention_cudnn.cpp is the one file that
// includes it). A plan is built at the first workspace query for its shape, strides and options,
// and kept; after that a call neither allocates nor waits, so it may be captured.
#pragma once

#include <string>

#include "kernels/attention.h"

namespace mixtape::kernels::cuda {

/// Why cuDNN does not take a call: shapes, types, strides, or what building its plan said. Empty if
/// it does.
std::string cudnn_attention_obstacle(const AttentionForward& args);
std::string cudnn_attention_obstacle(const AttentionBackward& args);

// Only without an obstacle.
std::size_t cudnn_attention_workspace_bytes(const AttentionForward& args);
std::size_t cudnn_attention_workspace_bytes(const AttentionBackward& args);
void cudnn_attention_forward(const Stream& stream, const AttentionForward& args,
                             Workspace workspace);
void cudnn_attention_backward(const Stream& stream, const AttentionBackward& args,
                              Workspace workspace);

}  // namespace mixtape::kernels::cuda
