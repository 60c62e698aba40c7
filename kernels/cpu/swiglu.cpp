// SwiGLU on the CPU: a row of 16-bit elements is converted once, worked on in SIMD registers, and
// rounded once.
#include "kernels/swiglu.h"

#include "engine/thread_pool.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/row.h"
#include "kernels/cpu/scratch.h"

namespace mixtape::kernels::cpu {
namespace {

using functors::Silu;

template <class C>
void forward(const View& y, const View& x) {
  using P = RowPacket<C>;
  const std::int64_t n = y.size(1);
  parallel_for(0, y.size(0), row_grain(2 * n), [&](std::int64_t begin, std::int64_t end) {
    ScratchFrame frame;
    C* const x_buffer = frame.take<C>(2 * n);
    C* const y_buffer = frame.take<C>(n);
    for (std::int64_t row = begin; row < end; ++row) {
      const C* const gate = load_row(x, row, x_buffer);
      const C* const up = gate + n;
      C* const out = open_row(y, row, y_buffer);
      for_each_packet<C>(0, n, [&](auto i, int count, auto) {
        P::store(out + i,
                 Silu::value(P::load(gate + i, count, C(0))) * P::load(up + i, count, C(0)), count);
      });
      store_row(y, row, out);
    }
  });
}

template <class C>
void backward(const View& dx, const View& dy, const View& x) {
  using P = RowPacket<C>;
  const std::int64_t n = dy.size(1);
  parallel_for(0, dy.size(0), row_grain(2 * n), [&](std::int64_t begin, std::int64_t end) {
    ScratchFrame frame;
    C* const x_buffer = frame.take<C>(2 * n);
    C* const dy_buffer = frame.take<C>(n);
    C* const dx_buffer = frame.take<C>(2 * n);
    for (std::int64_t row = begin; row < end; ++row) {
      const C* const gate = load_row(x, row, x_buffer);
      const C* const d = load_row(dy, row, dy_buffer);
      const C* const up = gate + n;
      C* const dgate = open_row(dx, row, dx_buffer);
      C* const dup = dgate + n;
      for_each_packet<C>(0, n, [&](auto i, int count, auto) {
        const auto g = P::load(gate + i, count, C(0)), dv = P::load(d + i, count, C(0));
        P::store(dgate + i, Silu::derivative(dv * P::load(up + i, count, C(0)), g), count);
        P::store(dup + i, dv * Silu::value(g), count);
      });
      store_row(dx, row, dgate);
    }
  });
}

}  // namespace

void swiglu_forward(const Stream&, View y, View x) {
  check_swiglu("swiglu_forward", y, x);
  y.dtype == Dtype::f64 ? forward<double>(y, x) : forward<float>(y, x);
}

void swiglu_backward(const Stream&, View dx, View dy, View x) {
  check_swiglu("swiglu_backward", dy, x);
  check_swiglu("swiglu_backward", dy, dx);
  dy.dtype == Dtype::f64 ? backward<double>(dx, dy, x) : backward<float>(dx, dy, x);
}

}  // namespace mixtape::kernels::cpu
