// Rotary position embedding. Turning back is the gradient, so that backward is the op itself with
// the other sign, and derivatives of any order come for free.
//
// Legend: B batch, T positions, H heads, D elements of a head.
#include "kernels/rotary.h"

#include "ops/op_support.h"

namespace mixtape {
namespace {

/// Inputs x (B, T, H, D) and positions (B, T), which may be absent.
struct RotaryEmbedding {
  std::int64_t offset, heads;
  double base;
  bool inverse = false;
  static constexpr OpInfo info{
      .name = "rotary_embedding", .cast = Cast::keep, .higher_order = true};

  Metas infer(Inputs in) const { return {meta_of(in[0])}; }
  void forward(Inputs in, Outputs out, Saved& saved) const {
    const bool in_place = in[0].strides()[3] == 1;
    const Tensor x = in_place ? in[0] : in[0].contiguous();
    kernels::rotary_embedding(stream_of(x), {.y = out[0].view(),
                                             .x = x.view(),
                                             .positions = view_or_absent(in[1]),
                                             .offset = offset,
                                             .rotated_heads = heads,
                                             .base = base,
                                             .inverse = inverse});
    saved.value(in[1]);
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    if (!dx[0]) return;
    RotaryEmbedding back = *this;
    back.inverse = !inverse;
    dx[0].set(apply(back, {dy[0], saved[0]}));
  }
};

/// (B, T) positions from what the user gave.
Tensor positions_of(const Tensor& x, const Tensor& given) {
  if (!given) return {};
  const Shape per_token = {x.size(0), x.size(1)}, per_time = {x.size(1)};
  MT_CHECK((given.dtype() == Dtype::i64 || given.dtype() == Dtype::i32) &&
               (given.shape() == per_token || given.shape() == per_time),
           "rotary_embedding: expected int64 or int32 positions of shape ", per_time, " or ",
           per_token, ", got ", given.describe());
  return given.dim() == 2 ? given : given.expand(per_token);
}

}  // namespace

Tensor rotary_embedding(const Tensor& x, const RotaryOptions& options) {
  check_floating("rotary_embedding", "a tensor", x);
  MT_CHECK(x.dim() == 4 && x.size(3) % 2 == 0 && x.size(3) <= kernels::kMaxRotaryDim,
           "rotary_embedding: expected x (B, T, H, D) with D even and at most ",
           kernels::kMaxRotaryDim, ", got ", x.describe());
  MT_CHECK(options.heads >= 0 && options.heads <= x.size(2),
           "rotary_embedding: expected 0 (all) to ", x.size(2), " heads to rotate, got ",
           options.heads);
  MT_CHECK(options.base > 0, "rotary_embedding: expected a positive base, got ", options.base);
  const std::int64_t heads = options.heads == 0 ? x.size(2) : options.heads;
  return apply(RotaryEmbedding{options.offset, heads, options.base},
               {x, positions_of(x, options.positions)});
}

}  // namespace mixtape
