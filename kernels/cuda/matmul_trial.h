// Choosing among a problem's candidate algorithms by timing each on the caller's own operands.
#pragma once

#include <cublasLt.h>

#include "engine/thread_pool.h"  // FunctionRef
#include "kernels/cuda/matmul_plan.h"

namespace mixtape::kernels::cuda {

struct MatmulCandidate {
  cublasLtMatmulAlgo_t algo;
  std::size_t workspace_bytes;
};

/// False in deterministic mode, with trials switched off, under a stream capture, and for problems
/// so small that launching takes longer than any algorithm.
bool trial_allowed(const MatmulKey& key, cudaStream_t stream);

/// Whether a choice of an earlier process counts: not in deterministic mode, with trials switched
/// off, or for problems too small for a trial.
bool choice_remembered(const MatmulKey& key);

/// True in deterministic mode, where what a trial chose earlier does not count.
bool use_first_candidate();

/// Times `count` candidates with run(operands, index) and returns the fastest one's index, or 0 if
/// the trial cannot be made. Waits for the stream. With beta 0 the trial writes operands.d, which
/// the caller's own product then overwrites; with another beta it writes a temporary instead.
int fastest_candidate(const MatmulKey& key, const MatmulOperands& operands, int count,
                      FunctionRef<cublasStatus_t(const MatmulOperands&, int)> run,
                      const Stream& stream);

}  // namespace mixtape::kernels::cuda
