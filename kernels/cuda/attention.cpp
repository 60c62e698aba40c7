// Attention on CUDA: who computes a call, cuDNN or our own kernels.
#include "kernels/attention.h"

#include "kernels/cuda/attention_cudnn.h"
#include "kernels/cuda/attention_own.h"
#include "kernels/cuda/cuda_check.h"

namespace mixtape::kernels::cuda {
namespace {

#if !defined(MIXTAPE_WITH_CUDNN_FRONTEND)
constexpr const char* kMissing = "this build has no cuDNN frontend";
#endif

template <class Call>
std::string obstacle_of(const Call& call) {
#if defined(MIXTAPE_WITH_CUDNN_FRONTEND)
  return cudnn_attention_obstacle(call);
#else
  static_cast<void>(call);
  return kMissing;
#endif
}

/// Whether cuDNN computes the call; throws where it was demanded and cannot, or where nobody can.
template <class Call>
bool uses_cudnn(const Call& call, const AttentionArgs& args) {
  const AttentionBackend backend = attention_backend();
  std::string obstacle;
  if (backend != AttentionBackend::own) {
    obstacle = obstacle_of(call);
    if (obstacle.empty()) return true;
    MT_CHECK(backend != AttentionBackend::cudnn,
             "attention: expected operands that cuDNN takes (MIXTAPE_ATTENTION=cudnn), got q ",
             args.q.dtype, args.q.sizes, ": ", obstacle);
  }
  MT_CHECK(args.q.size(3) <= kOwnAttentionColumns, "attention: expected heads of at most ",
           kOwnAttentionColumns, " elements on CUDA, got q ", args.q.dtype, args.q.sizes);
  return false;
}

template <class Call>
std::string choice_of(const Call& call) {
  kernels::detail::check_attention(call);
  const CudaDeviceGuard guard(call.out.device);
  if (uses_cudnn(call, call.args)) return "cudnn";
  if (attention_backend() == AttentionBackend::own) return "own";
  return "own (cuDNN: " + obstacle_of(call) + ")";
}

}  // namespace

std::string attention_choice(const AttentionForward& args) { return choice_of(args); }
std::string attention_choice(const AttentionBackward& args) { return choice_of(args); }

std::size_t attention_forward_workspace_bytes(const Stream& stream, const AttentionForward& args) {
  kernels::detail::check_attention(args);
  const CudaDeviceGuard guard(stream.device());
#if defined(MIXTAPE_WITH_CUDNN_FRONTEND)
  if (uses_cudnn(args, args.args)) return cudnn_attention_workspace_bytes(args);
#endif
  return 0;
}

std::size_t attention_backward_workspace_bytes(const Stream& stream,
                                               const AttentionBackward& args) {
  kernels::detail::check_attention(args);
  const CudaDeviceGuard guard(stream.device());
#if defined(MIXTAPE_WITH_CUDNN_FRONTEND)
  if (uses_cudnn(args, args.args)) return cudnn_attention_workspace_bytes(args);
#endif
  return own_attention_backward_workspace_bytes(args);
}

void attention_forward(const Stream& stream, const AttentionForward& args, Workspace workspace) {
  kernels::detail::check_attention(args);
  const CudaDeviceGuard guard(stream.device());
  if (uses_cudnn(args, args.args)) {
#if defined(MIXTAPE_WITH_CUDNN_FRONTEND)
    cudnn_attention_forward(stream, args, workspace);
#endif
  } else {
    own_attention_forward(stream, args);
  }
  static_cast<void>(workspace);
}

void attention_backward(const Stream& stream, const AttentionBackward& args, Workspace workspace) {
  kernels::detail::check_attention(args);
  const CudaDeviceGuard guard(stream.device());
  if (uses_cudnn(args, args.args)) {
#if defined(MIXTAPE_WITH_CUDNN_FRONTEND)
    cudnn_attention_backward(stream, args, workspace);
#endif
  } else {
    own_attention_backward(stream, args, workspace);
  }
}

}  // namespace mixtape::kernels::cuda
