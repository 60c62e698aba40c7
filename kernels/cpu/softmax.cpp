// Softmax and log-softmax on the CPU: each row by one thread, in float or double, whatever the
// storage types. A row that is all -inf is recognised by its maximum and written as constants.
#include "kernels/softmax.h"

#include "engine/thread_pool.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/row.h"
#include "kernels/cpu/scratch.h"

namespace mixtape::kernels::cpu {
namespace {

void check_rows(const char* op, const View& like, std::initializer_list<View> others) {
  for (const View& v : others) {
    MT_CHECK(v.sizes == like.sizes && v.dim() == 2, op,
             ": expected two-dimensional views of shape ", like.sizes, ", got ", v.sizes);
    MT_CHECK(v.size(1) <= 1 || v.stride(1) == 1, op, ": expected row-major views, got strides ",
             v.strides);
  }
}

template <class C>
void forward_row(bool log, C* y, const C* x, std::int64_t n) {
  using P = RowPacket<C>;
  constexpr C kLowest = -std::numeric_limits<C>::infinity();
  const C max = row_max(x, n);
  if (max == kLowest) {
    std::fill(y, y + n, log ? kLowest : C(0));
    return;
  }
  if (log) {
    const auto shift = P::splat(max);
    const auto log_sum = P::splat(static_cast<C>(std::log(row_exp_sum<C>(x, n, max, nullptr))));
    for_each_packet<C>(0, n, [&](auto i, int count, auto) {
      P::store(y + i, (P::load(x + i, count, C(0)) - shift) - log_sum, count);
    });
  } else {
    const auto scale = P::splat(static_cast<C>(1 / row_exp_sum(x, n, max, y)));
    for_each_packet<C>(0, n, [&](auto i, int count, auto) {
      P::store(y + i, P::load(y + i, count, C(0)) * scale, count);
    });
  }
}

template <class C>
void softmax_backward_row(C* dx, const C* dy, const C* y, std::int64_t n) {
  using P = RowPacket<C>;
  const auto [dot, total] = row_sums<C, 2>(n, [&](std::int64_t i, int count) {
    const auto p = P::load(y + i, count, C(0));
    return std::array{P::load(dy + i, count, C(0)) * p, p};
  });
  if (total == 0) {
    std::fill(dx, dx + n, C(0));
    return;
  }
  const auto mean = P::splat(static_cast<C>(dot));
  for_each_packet<C>(0, n, [&](auto i, int count, auto) {
    P::store(dx + i, P::load(y + i, count, C(0)) * (P::load(dy + i, count, C(0)) - mean), count);
  });
}

template <class C>
void log_softmax_backward_row(C* dx, const C* dy, const C* y, std::int64_t n) {
  using P = RowPacket<C>;
  if (row_max(y, n) == -std::numeric_limits<C>::infinity()) {
    std::fill(dx, dx + n, C(0));
    return;
  }
  const auto sum = P::splat(static_cast<C>(row_sums<C, 1>(
      n, [&](std::int64_t i, int count) { return std::array{P::load(dy + i, count, C(0))}; })[0]));
  for_each_packet<C>(0, n, [&](auto i, int count, auto) {
    P::store(dx + i, P::load(dy + i, count, C(0)) - math::exp(P::load(y + i, count, C(0))) * sum,
             count);
  });
}

template <class C>
void forward(bool log, const View& y, const View& x) {
  const std::int64_t columns = x.size(1);
  parallel_for(0, x.size(0), row_grain(columns), [&](std::int64_t begin, std::int64_t end) {
    ScratchFrame frame;
    C* in = frame.take<C>(columns);
    C* out = frame.take<C>(columns);
    for (std::int64_t row = begin; row < end; ++row) {
      C* const to = open_row(y, row, out);
      forward_row(log, to, load_row(x, row, in), columns);
      store_row(y, row, to);
    }
  });
}

template <class C>
void backward(bool log, const View& dx, const View& dy, const View& y) {
  const std::int64_t columns = y.size(1);
  parallel_for(0, y.size(0), row_grain(columns), [&](std::int64_t begin, std::int64_t end) {
    ScratchFrame frame;
    C* in = frame.take<C>(columns);
    C* saved = frame.take<C>(columns);
    C* out = frame.take<C>(columns);
    for (std::int64_t row = begin; row < end; ++row) {
      C* const to = open_row(dx, row, out);
      const C* const g = load_row(dy, row, in);
      const C* const p = load_row(y, row, saved);
      log ? log_softmax_backward_row(to, g, p, columns) : softmax_backward_row(to, g, p, columns);
      store_row(dx, row, to);
    }
  });
}

}  // namespace

void softmax_forward(const Stream&, bool log, View y, View x) {
  check_rows("softmax_forward", x, {x, y});
  if (x.numel() == 0) return;
  if (x.dtype == Dtype::f64)
    forward<double>(log, y, x);
  else
    forward<float>(log, y, x);
}

void softmax_backward(const Stream&, bool log, View dx, View dy, View y) {
  check_rows("softmax_backward", y, {y, dx, dy});
  if (y.numel() == 0) return;
  if (y.dtype == Dtype::f64 || dy.dtype == Dtype::f64)
    backward<double>(log, dx, dy, y);
  else
    backward<float>(log, dx, dy, y);
}

}  // namespace mixtape::kernels::cpu
