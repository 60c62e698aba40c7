// Scaled dot-product attention, over separate queries, keys and values and over one packed
// projection. Both read and write strided views of the tensors they are given.
//
// Legend: B batch, H query heads, G key-value heads, T queries, S keys, D elements of a head.
#include "kernels/attention.h"

#include <cmath>

#include "engine/generator.h"
#include "ops/op_support.h"

namespace mixtape {
namespace {

using kernels::AttentionArgs;
using kernels::AttentionBackward;
using kernels::AttentionForward;

/// What both ops carry.
struct AttentionSettings {
  bool causal;
  double scale;
  double dropout;
  PhiloxState random;

  AttentionArgs args(const View& q, const View& k, const View& v, const View& mask = {}) const {
    return {.q = q,
            .k = k,
            .v = v,
            .mask = mask,
            .causal = causal,
            .scale = scale,
            .dropout = dropout,
            .random = random};
  }
};

AttentionSettings make_settings(const char* op, bool causal, double scale, double dropout,
                                std::int64_t columns) {
  MT_CHECK(dropout >= 0 && dropout <= 1, op, ": expected a dropout in [0, 1], got ", dropout);
  if (scale == 0) scale = 1 / std::sqrt(static_cast<double>(std::max<std::int64_t>(1, columns)));
  return {causal, scale, dropout, {}};
}

/// Two products of (T, S) with D, and five in backward, which makes the scores again (Dao 2023,
/// FlashAttention-2). Under a causal mask as many (query, key) pairs as it leaves.
OpWork attention_work(const OpCall& call, bool causal, std::int64_t batch_heads, std::int64_t t,
                      std::int64_t s, std::int64_t d) {
  double pairs = static_cast<double>(t) * static_cast<double>(s);
  if (causal) {  // query i sees keys 0 to i
    const auto m = static_cast<double>(std::min(t, s));
    pairs = m * (m + 1) / 2 + static_cast<double>(t - std::min(t, s)) * static_cast<double>(s);
  }
  const double product = 2 * static_cast<double>(batch_heads) * pairs * static_cast<double>(d);
  return {.flops = product * (call.backward ? 5 : 2)};
}

void draw(AttentionSettings& s, Device device, const View& q, const View& k) {
  if (s.dropout == 0) return;
  s.random = draw_random(device, kernels::attention_draws({.q = q, .k = k}));
}

/// t itself, or a copy, with its last dimension contiguous.
Tensor with_unit_stride(const Tensor& t) {
  return t.size(-1) <= 1 || t.strides().back() == 1 ? t : t.contiguous();
}

Tensor make_lse(const Tensor& q, std::int64_t b, std::int64_t h, std::int64_t t) {
  return Tensor::empty({b, h, t}, compute_dtype(q.dtype()), q.device());
}

void run_forward(const Stream& stream, const AttentionForward& args) {
  const ScratchWorkspace scratch(kernels::attention_forward_workspace_bytes(stream, args),
                                 stream.device());
  kernels::attention_forward(stream, args, scratch);
}
void run_backward(const Stream& stream, const AttentionBackward& args) {
  const ScratchWorkspace scratch(kernels::attention_backward_workspace_bytes(stream, args),
                                 stream.device());
  kernels::attention_backward(stream, args, scratch);
}

/// (B, T, H, D) seen as (B, H, T, D).
View heads_first(const View& v) { return transposed(v, 1, 2); }

/// Memory for the gradient of `input` (B, H, T, D), in the input's own order of dimensions, so that
/// transposing it back is a view.
Tensor gradient_memory(GradDst& dst, const Tensor& input) {
  if (!dst) return {};
  const Shape &n = input.shape(), &s = input.strides();
  if (s[1] >= s[2] || n[1] == 1 || n[2] == 1) return dst.out();
  const Tensor memory =
      Tensor::empty({n[0], n[2], n[1], n[3]}, input.dtype(), input.device()).transpose(1, 2);
  dst.set(memory);
  return memory;
}

/// q (B, H, T, D), k and v (B, G, S, D), mask -> (B, T, H, D).
struct ScaledDotProductAttention {
  AttentionSettings settings;
  static constexpr OpInfo info{.name = "scaled_dot_product_attention", .cast = Cast::low};

  Metas infer(Inputs in) const {
    const Tensor &q = in[0], &k = in[1], &v = in[2], &mask = in[3];
    check_floating(info.name, "queries", q);
    MT_CHECK(k.dtype() == q.dtype() && v.dtype() == q.dtype(), info.name,
             ": expected queries, keys and values of one dtype, got ", q.describe(), ", ",
             k.describe(), " and ", v.describe());
    if (mask) {
      const Shape full = {q.size(0), q.size(1), q.size(2), k.size(2)};
      MT_CHECK(mask.dtype() == Dtype::b8 || is_floating(mask.dtype()), info.name,
               ": expected a bool or floating mask, got ", mask.describe());
      MT_CHECK(mask.dim() <= 4 && broadcast_shapes(info.name, mask.shape(), full) == full,
               info.name, ": expected a mask that broadcasts to ", full, ", got ", mask.describe());
    }
    return {{{q.size(0), q.size(2), q.size(1), q.size(3)}, q.dtype()}};
  }
  View mask_view(const Tensor& mask, const Tensor& q, const Tensor& k) const {
    if (!mask) return {};
    return mask.view().expand_to({q.size(0), q.size(1), q.size(2), k.size(2)});
  }
  void forward(Inputs in, Outputs out, Saved& saved) const {
    Tensor qkv[3], lse;
    for (std::size_t i = 0; i < 3; ++i) qkv[i] = with_unit_stride(in[i]);
    const auto& [q, k, v] = qkv;
    if (saved.recording()) lse = make_lse(q, q.size(0), q.size(1), q.size(2));
    run_forward(stream_of(q),
                {.out = heads_first(out[0].view()),
                 .lse = view_or_absent(lse),
                 .args = settings.args(q.view(), k.view(), v.view(), mask_view(in[3], q, k))});
    for (std::size_t i = 0; i < 3; ++i) saved.value(qkv[i].same(in[i]) ? in[i] : qkv[i]);
    saved.value(in[3]);
    saved.value(out[0]);
    saved.value(lse);
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    const Tensor q = saved[0], k = saved[1], v = saved[2], mask = saved[3], out = saved[4],
                 lse = saved[5], dout = with_unit_stride(dy[0]);
    const Tensor dq = gradient_memory(dx[0], q), dk = gradient_memory(dx[1], k),
                 dv = gradient_memory(dx[2], v);
    run_backward(stream_of(q),
                 {.dq = view_or_absent(dq),
                  .dk = view_or_absent(dk),
                  .dv = view_or_absent(dv),
                  .dout = heads_first(dout.view()),
                  .out = heads_first(out.view()),
                  .lse = lse.view(),
                  .args = settings.args(q.view(), k.view(), v.view(), mask_view(mask, q, k))});
  }
  OpWork work(const OpCall& call) const {
    const Shape &q = call.in[0].shape, &k = call.in[1].shape;
    return attention_work(call, settings.causal, q[0] * q[1], q[2], k[2], q[3]);
  }
};

/// The heads of a packed projection: `count` of them from head `first`.
View heads_view(const Tensor& packed, std::int64_t first, std::int64_t count,
                std::int64_t columns) {
  View v = packed.view();
  const std::int64_t b = v.stride(0), t = v.stride(1);
  v.data =
      static_cast<char*>(v.data) + first * columns * static_cast<std::int64_t>(size_of(v.dtype));
  v.sizes = {v.size(0), count, v.size(1), columns};
  v.strides = {b, columns, t, 1};
  return v;
}

/// qkv (B, T, (H + 2 G) D) -> (B, T, H D).
struct SelfAttention {
  AttentionSettings settings;
  std::int64_t heads, kv_heads, columns;
  static constexpr OpInfo info{.name = "self_attention", .cast = Cast::low};

  Metas infer(Inputs in) const {
    check_floating(info.name, "a projection", in[0]);
    return {{{in[0].size(0), in[0].size(1), heads * columns}, in[0].dtype()}};
  }
  View q(const Tensor& packed) const { return heads_view(packed, 0, heads, columns); }
  View k(const Tensor& packed) const { return heads_view(packed, heads, kv_heads, columns); }
  View v(const Tensor& packed) const {
    return heads_view(packed, heads + kv_heads, kv_heads, columns);
  }
  void forward(Inputs in, Outputs out, Saved& saved) const {
    const Tensor qkv = with_unit_stride(in[0]);
    Tensor lse;
    if (saved.recording()) lse = make_lse(qkv, qkv.size(0), heads, qkv.size(1));
    run_forward(stream_of(qkv), {.out = q(out[0]),
                                 .lse = view_or_absent(lse),
                                 .args = settings.args(q(qkv), k(qkv), v(qkv))});
    saved.value(qkv.same(in[0]) ? in[0] : qkv);
    saved.value(out[0]);
    saved.value(lse);
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    const Tensor qkv = saved[0], out = saved[1], lse = saved[2], dout = with_unit_stride(dy[0]);
    const Tensor d = dx[0].out();
    run_backward(stream_of(qkv), {.dq = q(d),
                                  .dk = k(d),
                                  .dv = v(d),
                                  .dout = q(dout),
                                  .out = q(out),
                                  .lse = lse.view(),
                                  .args = settings.args(q(qkv), k(qkv), v(qkv))});
  }
  OpWork work(const OpCall& call) const {
    const Shape& qkv = call.in[0].shape;
    return attention_work(call, settings.causal, qkv[0] * heads, qkv[1], qkv[1], columns);
  }
};

}  // namespace

Tensor scaled_dot_product_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                    const AttentionOptions& options) {
  constexpr const char* kName = "scaled_dot_product_attention";
  MT_CHECK(q.dim() == 4 && k.dim() == 4 && k.size(0) == q.size(0) && k.size(3) == q.size(3) &&
               k.size(1) > 0 && q.size(1) % k.size(1) == 0 && v.shape() == k.shape(),
           kName,
           ": expected queries (B, H, T, D), keys and values (B, G, S, D) with H a multiple ",
           "of G, got ", q.shape(), ", ", k.shape(), " and ", v.shape());
  MT_CHECK(!options.mask.requires_grad(), kName,
           ": expected a mask that requires no gradient (it has none), got ",
           options.mask.describe(), " that requires one");
  ScaledDotProductAttention op{
      make_settings(kName, options.causal, options.scale, options.dropout, q.size(3))};
  draw(op.settings, q.device(), q.view(), k.view());
  return apply(op, {q, k, v, options.mask}).transpose(1, 2);
}

Tensor self_attention(const Tensor& qkv, const SelfAttentionOptions& options) {
  const std::int64_t heads = options.heads,
                     kv_heads = options.kv_heads == 0 ? heads : options.kv_heads;
  MT_CHECK(heads > 0 && kv_heads > 0 && heads % kv_heads == 0,
           "self_attention: expected heads to be a multiple of kv_heads, got ", heads, " and ",
           kv_heads);
  const std::int64_t parts = heads + 2 * kv_heads;
  MT_CHECK(qkv.dim() == 3 && qkv.size(2) % parts == 0,
           "self_attention: expected a projection (B, T, (heads + 2 kv_heads) D) with ", parts,
           " parts, got ", qkv.describe());
  const std::int64_t columns = qkv.size(2) / parts;
  SelfAttention op{
      make_settings("self_attention", options.causal, options.scale, options.dropout, columns),
      heads, kv_heads, columns};
  draw(op.settings, qkv.device(), op.q(qkv), op.k(qkv));
  return apply(op, {qkv});
}

}  // namespace mixtape
