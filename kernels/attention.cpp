// What both backends of attention share: argument checks, the choice of backend, scratch sizes by
// device.
#include "kernels/attention.h"

#include <atomic>
#include <cstdlib>
#include <string_view>

namespace mixtape::kernels {
namespace {

AttentionBackend backend_from_environment() {
  const char* const text = std::getenv("MIXTAPE_ATTENTION");
  const std::string_view name = text == nullptr ? "" : text;
  if (name.empty() || name == "auto") return AttentionBackend::automatic;
  if (name == "own") return AttentionBackend::own;
  MT_CHECK(name == "cudnn", "MIXTAPE_ATTENTION: expected auto, own or cudnn, got \"", name, '"');
  return AttentionBackend::cudnn;
}

std::atomic<AttentionBackend>& backend_setting() {
  static std::atomic<AttentionBackend> setting{backend_from_environment()};
  return setting;
}

void check_like(const char* op, const char* what, const View& v, const View& like) {
  MT_CHECK(v.sizes == like.sizes && v.dtype == like.dtype, op, ": expected ", what, " of ",
           like.dtype, like.sizes, ", got ", v.dtype, v.sizes);
  MT_CHECK(v.size(3) <= 1 || v.stride(3) == 1 || v.numel() == 0, op,
           ": expected a last stride of 1 for ", what, ", got strides ", v.strides);
}

void check_lse(const char* op, const View& lse, const View& q) {
  MT_CHECK(lse.sizes == (Shape{q.size(0), q.size(1), q.size(2)}) && lse.contiguous() &&
               lse.dtype == compute_dtype(q.dtype),
           op, ": expected a contiguous lse of ", compute_dtype(q.dtype), "(", q.size(0), ", ",
           q.size(1), ", ", q.size(2), "), got ", lse.dtype, lse.sizes, " with strides ",
           lse.strides);
}

}  // namespace

void set_attention_backend(AttentionBackend backend) { backend_setting() = backend; }
AttentionBackend attention_backend() { return backend_setting().load(std::memory_order_relaxed); }

std::string attention_choice(const AttentionForward& args) {
#if defined(MIXTAPE_WITH_CUDA)
  if (args.out.device.is_cuda()) return cuda::attention_choice(args);
#endif
  MT_CHECK(args.out.device.is_cpu(), "attention: this build has no CUDA backend");
  return "cpu";
}

std::string attention_choice(const AttentionBackward& args) {
#if defined(MIXTAPE_WITH_CUDA)
  if (args.out.device.is_cuda()) return cuda::attention_choice(args);
#endif
  MT_CHECK(args.out.device.is_cpu(), "attention: this build has no CUDA backend");
  return "cpu";
}

std::int64_t attention_draws(const AttentionArgs& args) {
  const std::int64_t row = (args.k.size(2) + 3) / 4 * 4;
  return args.q.size(0) * args.q.size(1) * args.q.size(2) * row;
}

std::size_t attention_forward_workspace_bytes(const Stream& stream, const AttentionForward& args) {
#if defined(MIXTAPE_WITH_CUDA)
  if (stream.device().is_cuda()) return cuda::attention_forward_workspace_bytes(stream, args);
#endif
  MT_CHECK(stream.device().is_cpu(), "attention: this build has no CUDA backend");
  return cpu::attention_forward_workspace_bytes(stream, args);
}

std::size_t attention_backward_workspace_bytes(const Stream& stream,
                                               const AttentionBackward& args) {
#if defined(MIXTAPE_WITH_CUDA)
  if (stream.device().is_cuda()) return cuda::attention_backward_workspace_bytes(stream, args);
#endif
  MT_CHECK(stream.device().is_cpu(), "attention: this build has no CUDA backend");
  return cpu::attention_backward_workspace_bytes(stream, args);
}

namespace detail {

void check_attention(const char* op, const AttentionArgs& args) {
  const View &q = args.q, &k = args.k, &mask = args.mask;
  MT_CHECK(q.dim() == 4 && is_floating(q.dtype), op,
           ": expected queries (B, H, T, D) of a floating dtype, got ", q.dtype, q.sizes);
  MT_CHECK(k.dim() == 4 && k.size(0) == q.size(0) && k.size(3) == q.size(3) && k.size(1) > 0 &&
               q.size(1) % k.size(1) == 0,
           op,
           ": expected keys (B, G, S, D) with B and D of the queries and H a multiple of G, got ",
           k.sizes, " for queries ", q.sizes);
  check_like(op, "queries", q, q);
  View keys = k;
  keys.dtype = q.dtype;
  check_like(op, "keys", k, keys);
  check_like(op, "values", args.v, keys);
  MT_CHECK(!mask || (mask.sizes == (Shape{q.size(0), q.size(1), q.size(2), k.size(2)}) &&
                     (mask.dtype == Dtype::b8 || is_floating(mask.dtype))),
           op, ": expected a bool or floating mask (", q.size(0), ", ", q.size(1), ", ", q.size(2),
           ", ", k.size(2), "), got ", mask.dtype, mask.sizes);
  MT_CHECK(args.dropout >= 0 && args.dropout <= 1, op, ": expected a dropout in [0, 1], got ",
           args.dropout);
}

void check_attention(const AttentionForward& a) {
  constexpr const char* kOp = "attention_forward";
  check_attention(kOp, a.args);
  check_like(kOp, "out", a.out, a.args.q);
  if (a.lse) check_lse(kOp, a.lse, a.args.q);
}

void check_attention(const AttentionBackward& a) {
  constexpr const char* kOp = "attention_backward";
  check_attention(kOp, a.args);
  check_like(kOp, "out", a.out, a.args.q);
  check_like(kOp, "dout", a.dout, a.args.q);
  check_lse(kOp, a.lse, a.args.q);
  if (a.dq) check_like(kOp, "dq", a.dq, a.args.q);
  if (a.dk) check_like(kOp, "dk", a.dk, a.args.k);
  if (a.dv) check_like(kOp, "dv", a.dv, a.args.k);
}

}  // namespace detail
}  // namespace mixtape::kernels
