// Checks of batch normalisation's operands, and scratch sizes of batch and group normalisation by
// device.
#include "kernels/batch_norm.h"

#include "kernels/group_norm.h"

namespace mixtape::kernels {
namespace {

void check_statistics(const char* op, const View& statistics, const View& x) {
  const Dtype dtype = compute_dtype(x.dtype);
  const Shape sizes{3, x.size(1)};
  MT_CHECK(statistics.dtype == dtype && statistics.sizes == sizes && statistics.contiguous(), op,
           ": expected contiguous statistics ", dtype, sizes, ", got ", statistics.dtype,
           statistics.sizes);
}
void check_workspace(const char* op, const View& x, Workspace workspace) {
  const std::size_t bytes = batch_norm_workspace_bytes(x);
  MT_CHECK(workspace.bytes >= bytes, op, ": expected a workspace of ", bytes, " bytes, got ",
           workspace.bytes);
}

}  // namespace

ChannelLayout check_batch_norm(const BatchNormForward& args, Workspace workspace) {
  constexpr const char* kOp = "batch_norm_forward";
  const ChannelLayout l = channel_layout(kOp, args.x);
  MT_CHECK(is_floating(args.x.dtype), kOp, ": expected floating x, got ", args.x.dtype);
  check_like_x(kOp, args.x, {args.y, args.residual});
  check_channel_vectors(kOp, l.c, {args.running_mean, args.running_var, args.weight, args.bias});
  if (args.training)
    check_statistics(kOp, args.statistics, args.x);
  else
    MT_CHECK(args.running_mean && args.running_var, kOp,
             ": expected running statistics outside of training");
  MT_CHECK(!args.training || l.values() != 1, kOp,
           ": expected more than one value per channel in training, got x ", args.x.sizes);
  MT_CHECK(!args.training || args.momentum >= 0 || args.batches, kOp,
           ": expected a count of batches for a cumulative average");
  check_workspace(kOp, args.x, workspace);
  return l;
}

ChannelLayout check_batch_norm(const BatchNormBackward& args, Workspace workspace) {
  constexpr const char* kOp = "batch_norm_backward";
  const ChannelLayout l = channel_layout(kOp, args.x);
  check_like_x(kOp, args.x, {args.dy, args.y, args.dx, args.dresidual});
  check_channel_vectors(
      kOp, l.c, {args.running_mean, args.running_var, args.weight, args.dweight, args.dbias});
  MT_CHECK(static_cast<bool>(args.running_mean) == static_cast<bool>(args.running_var), kOp,
           ": expected both running statistics or none");
  if (!args.running_mean) check_statistics(kOp, args.statistics, args.x);
  MT_CHECK(!args.dresidual || args.y, kOp, ": expected y with a gradient of the residual");
  check_workspace(kOp, args.x, workspace);
  return l;
}

std::size_t batch_norm_workspace_bytes(const View& x) {
#if defined(MIXTAPE_WITH_CUDA)
  if (x.device.is_cuda()) return cuda::batch_norm_workspace_bytes(x);
#endif
  MT_CHECK(x.device.is_cpu(), "batch_norm: this build has no CUDA backend");
  return cpu::batch_norm_workspace_bytes(x);
}

std::size_t group_norm_backward_workspace_bytes(const View& x) {
#if defined(MIXTAPE_WITH_CUDA)
  if (x.device.is_cuda()) return cuda::group_norm_backward_workspace_bytes(x);
#endif
  MT_CHECK(x.device.is_cpu(), "group_norm: this build has no CUDA backend");
  return cpu::group_norm_backward_workspace_bytes(x);
}

}  // namespace mixtape::kernels
