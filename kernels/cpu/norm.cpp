// Layer normalisation on the CPU.
//
// The mean is found in two steps: m1, a rounded mean, and c, the mean of x - m1, which is all that
// rounding took away. Centred values are (x - m1) - c, so that a row whose mean is a million times
// its deviation is normalised to full precision; the backward pass recovers the same c from the
// saved mean. Parameter gradients are ColumnSums: the same bits for any number of threads.
#include "kernels/norm.h"

#include "engine/thread_pool.h"
#include "kernels/cpu/column_sums.h"
#include "kernels/cpu/norm_rows.h"
#include "kernels/cpu/row.h"
#include "kernels/cpu/scratch.h"

namespace mixtape::kernels::cpu {
namespace {

template <class C>
struct RowStatistics {
  C mean, correction, rstd;  // of the row: mean + correction, 1 / sqrt(var + eps)
};

template <class C>
RowStatistics<C> statistics(const C* x, std::int64_t n, double eps) {
  using P = RowPacket<C>;
  const double count = static_cast<double>(n);
  const C mean = static_cast<C>(
      row_sums<C, 1>(n, [&](std::int64_t i,
                            int valid) { return std::array{P::load(x + i, valid, C(0))}; })[0] /
      count);
  const auto shift = P::splat(mean);
  const auto [sum, squares] = row_sums<C, 2>(n, [&](std::int64_t i, int valid) {
    const auto d = P::load(x + i, valid, mean) - shift;
    return std::array{d, d * d};
  });
  const double correction = sum / count;
  const double variance = squares / count - correction * correction;
  // NaN, from inf or NaN in the row, stays NaN.
  return {mean, static_cast<C>(correction),
          static_cast<C>(1 / std::sqrt((variance < 0 ? 0 : variance) + eps))};
}

template <class C>
void normalise_row(C* y, const C* x, std::int64_t n, const RowStatistics<C>& s, const C* weight,
                   const C* bias) {
  using P = RowPacket<C>;
  const auto mean = P::splat(s.mean), correction = P::splat(s.correction), rstd = P::splat(s.rstd);
  for_each_packet<C>(0, n, [&](auto i, int valid, auto) {
    auto v = ((P::load(x + i, valid, C(0)) - mean) - correction) * rstd;
    if (weight != nullptr) v = v * P::load(weight + i, valid, C(0));
    if (bias != nullptr) v = v + P::load(bias + i, valid, C(0));
    P::store(y + i, v, valid);
  });
}

template <class C>
void forward(const LayerNormForward& args) {
  const std::int64_t n = args.x.size(1);
  parallel_for(0, args.x.size(0), row_grain(n), [&](std::int64_t begin, std::int64_t end) {
    ScratchFrame frame;
    const C* const weight = load_vector("layer_norm", args.weight, frame.take<C>(n));
    const C* const bias = load_vector("layer_norm", args.bias, frame.take<C>(n));
    C* const x_buffer = frame.take<C>(n);
    C* const r_buffer = frame.take<C>(n);
    C* const s_buffer = frame.take<C>(n);
    for (std::int64_t row = begin; row < end; ++row) {
      const C* const x = args.residual ? add_residual(args, row, x_buffer, r_buffer, s_buffer)
                                       : load_row(args.x, row, x_buffer);
      const RowStatistics<C> s = statistics(x, n, args.eps);
      if (args.mean) args.mean.ptr<C>()[row * args.mean.stride(0)] = s.mean + s.correction;
      if (args.rstd) args.rstd.ptr<C>()[row * args.rstd.stride(0)] = s.rstd;
      C* const y = open_row(args.y, row, r_buffer);
      normalise_row(y, x, n, s, weight, bias);
      store_row(args.y, row, y);
    }
  });
}

template <class C>
struct BackwardRow {
  const C *x, *dy, *weight, *dsum;  // weight and dsum may be null
  C mean, rstd;
  std::int64_t n;
  C *dx, *dweight, *dbias;  // each may be null
};

/// With g = dy * weight and xh the normalised row: dx = rstd (g - mean(g) - xh mean(g xh)) + dsum.
template <class C>
void backward_row(const BackwardRow<C>& r) {
  using P = RowPacket<C>;
  const auto mean = P::splat(r.mean), rstd = P::splat(r.rstd);
  const auto normalised = [&](std::int64_t i, int valid) {
    return (P::load(r.x + i, valid, r.mean) - mean) * rstd;
  };
  const auto weighted = [&](std::int64_t i, int valid) {
    const auto g = P::load(r.dy + i, valid, C(0));
    return r.weight != nullptr ? g * P::load(r.weight + i, valid, C(0)) : g;
  };
  const auto [sum_g, sum_gx, sum_x] = row_sums<C, 3>(r.n, [&](std::int64_t i, int valid) {
    const auto g = weighted(i, valid), xh = normalised(i, valid);
    return std::array{g, g * xh, xh};
  });
  // The saved mean is rounded: the normalised row's own mean is what the rounding took away.
  const double count = static_cast<double>(r.n), shift = sum_x / count;
  const auto correction = P::splat(static_cast<C>(shift));
  const auto mean_g = P::splat(static_cast<C>(sum_g / count));
  const auto mean_gx = P::splat(static_cast<C>((sum_gx - shift * sum_g) / count));
  for_each_packet<C>(0, r.n, [&](auto i, int valid, auto) {
    const auto xh = normalised(i, valid) - correction;
    if (r.dx != nullptr) {
      auto d = (weighted(i, valid) - mean_g - xh * mean_gx) * rstd;
      if (r.dsum != nullptr) d = d + P::load(r.dsum + i, valid, C(0));
      P::store(r.dx + i, d, valid);
    }
    const auto dy = P::load(r.dy + i, valid, C(0));
    if (r.dweight != nullptr)
      P::store(r.dweight + i, P::load(r.dweight + i, valid, C(0)) + dy * xh, valid);
    if (r.dbias != nullptr) P::store(r.dbias + i, P::load(r.dbias + i, valid, C(0)) + dy, valid);
  });
}

/// Rows [begin, end); adds the sums for dweight and dbias to `total` (2, C) unless it is null.
template <class C>
void backward_rows(const LayerNormBackward& args, std::int64_t begin, std::int64_t end,
                   double* total) {
  const std::int64_t n = args.x.size(1);
  ScratchFrame frame;
  const C* const weight = load_vector("layer_norm", args.weight, frame.take<C>(n));
  C* const x_buffer = frame.take<C>(n);
  C* const dy_buffer = frame.take<C>(n);
  C* const dsum_buffer = frame.take<C>(n);
  C* const dx_buffer = frame.take<C>(n);
  C* const part = total != nullptr ? frame.take<C>(2 * n) : nullptr;
  ColumnSums<C> sums(part, total, total != nullptr ? 2 * n : 0);
  for (std::int64_t row = begin; row < end; ++row) {
    BackwardRow<C> r{};
    r.x = load_row(args.x, row, x_buffer);
    r.dy = load_row(args.dy, row, dy_buffer);
    r.weight = weight;
    if (args.dsum) r.dsum = load_row(args.dsum, row, dsum_buffer);
    r.mean = args.mean.ptr<C>()[row * args.mean.stride(0)];
    r.rstd = args.rstd.ptr<C>()[row * args.rstd.stride(0)];
    r.n = n;
    if (args.dx) r.dx = open_row(args.dx, row, dx_buffer);
    if (args.dweight) r.dweight = part;
    if (args.dbias) r.dbias = part + n;
    backward_row(r);
    if (args.dx) store_row(args.dx, row, r.dx);
    if (total != nullptr) sums.row_done();
  }
  if (total != nullptr) sums.flush();
}

template <class C>
void backward(const LayerNormBackward& args, Workspace workspace) {
  const std::int64_t rows = args.x.size(0), n = args.x.size(1);
  if (!args.dweight && !args.dbias) {
    parallel_for(0, rows, row_grain(n), [&](std::int64_t begin, std::int64_t end) {
      backward_rows<C>(args, begin, end, nullptr);
    });
    return;
  }
  const std::int64_t chunks = row_chunks(rows), each = rows_per_chunk(rows);
  MT_CHECK(workspace.bytes >= layer_norm_backward_workspace_bytes(rows, n),
           "layer_norm_backward: expected a workspace of ",
           layer_norm_backward_workspace_bytes(rows, n), " bytes, got ", workspace.bytes);
  double* const partial = static_cast<double*>(workspace.data);
  const std::int64_t grain =
      std::max<std::int64_t>(1, row_grain(n) / std::max<std::int64_t>(1, each));
  parallel_for(0, chunks, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t c = begin; c < end; ++c)
      backward_rows<C>(args, std::min(rows, c * each), std::min(rows, (c + 1) * each),
                       partial + c * 2 * n);
  });
  store_column_sums(args.dweight, partial, chunks, 2 * n, args.beta_weight);
  store_column_sums(args.dbias, partial + n, chunks, 2 * n, args.beta_bias);
}

}  // namespace

std::size_t layer_norm_backward_workspace_bytes(std::int64_t rows, std::int64_t columns) {
  return static_cast<std::size_t>(row_chunks(rows) * 2 * columns) * sizeof(double);
}

void layer_norm_forward(const Stream&, const LayerNormForward& args) {
  check_rows("layer_norm_forward", args.x, {args.x, args.y, args.residual, args.sum});
  MT_CHECK(static_cast<bool>(args.residual) == static_cast<bool>(args.sum),
           "layer_norm_forward: expected a sum with a residual and none without");
  if (args.x.numel() == 0) return;
  args.x.dtype == Dtype::f64 ? forward<double>(args) : forward<float>(args);
}

void layer_norm_backward(const Stream&, const LayerNormBackward& args, Workspace workspace) {
  check_rows("layer_norm_backward", args.x, {args.x, args.dx, args.dy, args.dsum});
  args.x.dtype == Dtype::f64 ? backward<double>(args, workspace) : backward<float>(args, workspace);
}

}  // namespace mixtape::kernels::cpu
