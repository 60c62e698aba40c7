// The plan cache of convolutions: one entry for each ConvKey, with a few execution plans of which a
// short timed trial keeps the fastest (kernels/matmul.h, set_algorithm_trials).
#pragma once

#include "engine/stream.h"
#include "kernels/cuda/conv_graph.h"
#include "kernels/kernel.h"

namespace mixtape::kernels::cuda {

/// Addresses of a pass's operands; the key's pass says which is written.
struct ConvPointers {
  void *x, *w, *y;
  void* bias;  // with key.bias
};

/// Whether cuDNN can compute the key at all.
bool conv_supported(const ConvKey& key);
/// Scratch for run_convolution: what the chosen plan needs, before a trial the most that one of its
/// candidates needs.
std::size_t conv_plan_workspace_bytes(const ConvKey& key);
/// Queues the pass. Throws if cuDNN has no plan or the workspace is too small for every candidate.
/// A trial waits for the stream and writes the result several times.
void run_convolution(const ConvKey& key, const ConvPointers& pointers, Workspace workspace,
                     const Stream& stream);
/// The cuDNN engine that the next call runs ("engine 41, 0 bytes"), for benchmarks and reports.
std::string conv_plan_name(const ConvKey& key);

}  // namespace mixtape::kernels::cuda
