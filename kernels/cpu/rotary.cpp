// Rotary position embedding on the CPU: a token's sines and cosines are made once and serve all of
// its heads.
#include "kernels/rotary.h"

#include <algorithm>
#include <vector>

#include "engine/thread_pool.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/scratch.h"

namespace mixtape::kernels::cpu {
namespace {

std::int64_t position_of(const RotaryEmbedding& a, std::int64_t b, std::int64_t t) {
  if (!a.positions) return t + a.offset;
  const std::int64_t i = b * a.positions.stride(0) + t * a.positions.stride(1);
  return a.offset + (a.positions.dtype == Dtype::i64
                         ? a.positions.ptr<std::int64_t>()[i]
                         : std::int64_t{a.positions.ptr<std::int32_t>()[i]});
}

template <class C>
void rotate(const RotaryEmbedding& a) {
  const std::int64_t times = a.x.size(1), heads = a.x.size(2), dim = a.x.size(3), half = dim / 2;
  std::vector<C> frequency(static_cast<std::size_t>(half));
  for (std::int64_t i = 0; i < half; ++i)
    frequency[static_cast<std::size_t>(i)] = static_cast<C>(rotary_frequency(a.base, i, dim));
  const auto at = [](const View& v, std::int64_t b, std::int64_t t, std::int64_t h) {
    return element_address(v.data, v.dtype, b * v.stride(0) + t * v.stride(1) + h * v.stride(2));
  };
  const std::int64_t grain =
      std::max<std::int64_t>(1, 8192 / std::max<std::int64_t>(1, heads * dim));
  parallel_for(0, a.x.size(0) * times, grain, [&](std::int64_t begin, std::int64_t end) {
    ScratchFrame frame;
    C* const cosine = frame.take<C>(half);
    C* const sine = frame.take<C>(half);
    C* const in = frame.take<C>(dim);
    C* const out = frame.take<C>(dim);
    for (std::int64_t token = begin; token < end; ++token) {
      const std::int64_t b = token / times, t = token % times;
      const C position = static_cast<C>(position_of(a, b, t));
      for (std::int64_t i = 0; i < half; ++i) {
        const C angle = position * frequency[static_cast<std::size_t>(i)];
        cosine[i] = std::cos(angle);
        sine[i] = a.inverse ? -std::sin(angle) : std::sin(angle);
      }
      for (std::int64_t h = 0; h < heads; ++h) {
        load_elements(a.x.dtype, at(a.x, b, t, h), in, dim);
        if (h < a.rotated_heads) {
          for (std::int64_t i = 0; i < half; ++i) {
            out[i] = in[i] * cosine[i] - in[i + half] * sine[i];
            out[i + half] = in[i + half] * cosine[i] + in[i] * sine[i];
          }
        }
        store_elements(a.y.dtype, at(a.y, b, t, h), h < a.rotated_heads ? out : in, dim);
      }
    }
  });
}

}  // namespace

void rotary_embedding(const Stream&, const RotaryEmbedding& args) {
  check_rotary_embedding(args);
  if (args.x.numel() == 0) return;
  args.x.dtype == Dtype::f64 ? rotate<double>(args) : rotate<float>(args);
}

}  // namespace mixtape::kernels::cpu
