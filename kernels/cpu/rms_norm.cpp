// Root-mean-square normalisation on the CPU. Squares are summed in float within blocks and in
// double beyond (kernels/cpu/row.h); the weight's gradient is ColumnSums: the same bits for any
// number of threads.
#include "engine/thread_pool.h"
#include "kernels/cpu/column_sums.h"
#include "kernels/cpu/norm_rows.h"
#include "kernels/cpu/row.h"
#include "kernels/cpu/scratch.h"
#include "kernels/norm.h"

namespace mixtape::kernels::cpu {
namespace {

template <class C>
C reciprocal_rms(const C* x, std::int64_t n, double eps) {
  using P = RowPacket<C>;
  const double squares = row_sums<C, 1>(n, [&](std::int64_t i, int valid) {
    const auto v = P::load(x + i, valid, C(0));
    return std::array{v * v};
  })[0];
  return static_cast<C>(1 / std::sqrt(squares / static_cast<double>(n) + eps));
}

template <class C>
void normalise_row(C* y, const C* x, std::int64_t n, C rstd, const C* weight) {
  using P = RowPacket<C>;
  const auto scale = P::splat(rstd);
  for_each_packet<C>(0, n, [&](auto i, int valid, auto) {
    auto v = P::load(x + i, valid, C(0)) * scale;
    if (weight != nullptr) v = v * P::load(weight + i, valid, C(0));
    P::store(y + i, v, valid);
  });
}

template <class C>
void forward(const RmsNormForward& args) {
  const std::int64_t n = args.x.size(1);
  parallel_for(0, args.x.size(0), row_grain(n), [&](std::int64_t begin, std::int64_t end) {
    ScratchFrame frame;
    const C* const weight = load_vector("rms_norm", args.weight, frame.take<C>(n));
    C* const x_buffer = frame.take<C>(n);
    C* const r_buffer = frame.take<C>(n);
    C* const s_buffer = frame.take<C>(n);
    for (std::int64_t row = begin; row < end; ++row) {
      const C* const x = args.residual ? add_residual(args, row, x_buffer, r_buffer, s_buffer)
                                       : load_row(args.x, row, x_buffer);
      const C rstd = reciprocal_rms(x, n, args.eps);
      if (args.rstd) args.rstd.ptr<C>()[row * args.rstd.stride(0)] = rstd;
      C* const y = open_row(args.y, row, r_buffer);
      normalise_row(y, x, n, rstd, weight);
      store_row(args.y, row, y);
    }
  });
}

template <class C>
struct BackwardRow {
  const C *x, *dy, *weight, *dsum;  // weight and dsum may be null
  C rstd;
  std::int64_t n;
  C *dx, *dweight;  // each may be null
};

/// With g = dy * weight and xh = x * rstd: dx = rstd (g - xh mean(g xh)) + dsum.
template <class C>
void backward_row(const BackwardRow<C>& r) {
  using P = RowPacket<C>;
  const auto rstd = P::splat(r.rstd);
  const auto weighted = [&](std::int64_t i, int valid) {
    const auto g = P::load(r.dy + i, valid, C(0));
    return r.weight != nullptr ? g * P::load(r.weight + i, valid, C(0)) : g;
  };
  const double sum_gx = row_sums<C, 1>(r.n, [&](std::int64_t i, int valid) {
    return std::array{weighted(i, valid) * (P::load(r.x + i, valid, C(0)) * rstd)};
  })[0];
  const auto mean_gx = P::splat(static_cast<C>(sum_gx / static_cast<double>(r.n)));
  for_each_packet<C>(0, r.n, [&](auto i, int valid, auto) {
    const auto xh = P::load(r.x + i, valid, C(0)) * rstd;
    if (r.dx != nullptr) {
      auto d = (weighted(i, valid) - xh * mean_gx) * rstd;
      if (r.dsum != nullptr) d = d + P::load(r.dsum + i, valid, C(0));
      P::store(r.dx + i, d, valid);
    }
    if (r.dweight != nullptr)
      P::store(r.dweight + i,
               P::load(r.dweight + i, valid, C(0)) + P::load(r.dy + i, valid, C(0)) * xh, valid);
  });
}

/// Rows [begin, end); adds the sums for dweight to `total` (C) unless it is null.
template <class C>
void backward_rows(const RmsNormBackward& args, std::int64_t begin, std::int64_t end,
                   double* total) {
  const std::int64_t n = args.x.size(1);
  ScratchFrame frame;
  const C* const weight = load_vector("rms_norm", args.weight, frame.take<C>(n));
  C* const x_buffer = frame.take<C>(n);
  C* const dy_buffer = frame.take<C>(n);
  C* const dsum_buffer = frame.take<C>(n);
  C* const dx_buffer = frame.take<C>(n);
  C* const part = total != nullptr ? frame.take<C>(n) : nullptr;
  ColumnSums<C> sums(part, total, total != nullptr ? n : 0);
  for (std::int64_t row = begin; row < end; ++row) {
    BackwardRow<C> r{};
    r.x = load_row(args.x, row, x_buffer);
    r.dy = load_row(args.dy, row, dy_buffer);
    r.weight = weight;
    if (args.dsum) r.dsum = load_row(args.dsum, row, dsum_buffer);
    r.rstd = args.rstd.ptr<C>()[row * args.rstd.stride(0)];
    r.n = n;
    if (args.dx) r.dx = open_row(args.dx, row, dx_buffer);
    r.dweight = part;
    backward_row(r);
    if (args.dx) store_row(args.dx, row, r.dx);
    if (total != nullptr) sums.row_done();
  }
  if (total != nullptr) sums.flush();
}

template <class C>
void backward(const RmsNormBackward& args, Workspace workspace) {
  const std::int64_t rows = args.x.size(0), n = args.x.size(1);
  if (!args.dweight) {
    parallel_for(0, rows, row_grain(n), [&](std::int64_t begin, std::int64_t end) {
      backward_rows<C>(args, begin, end, nullptr);
    });
    return;
  }
  const std::int64_t chunks = row_chunks(rows), each = rows_per_chunk(rows);
  const std::size_t needed = rms_norm_backward_workspace_bytes(rows, n);
  MT_CHECK(workspace.bytes >= needed, "rms_norm_backward: expected a workspace of ", needed,
           " bytes, got ", workspace.bytes);
  double* const partial = static_cast<double*>(workspace.data);
  const std::int64_t grain =
      std::max<std::int64_t>(1, row_grain(n) / std::max<std::int64_t>(1, each));
  parallel_for(0, chunks, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t c = begin; c < end; ++c)
      backward_rows<C>(args, std::min(rows, c * each), std::min(rows, (c + 1) * each),
                       partial + c * n);
  });
  store_column_sums(args.dweight, partial, chunks, n, args.beta_weight);
}

}  // namespace

std::size_t rms_norm_backward_workspace_bytes(std::int64_t rows, std::int64_t columns) {
  return static_cast<std::size_t>(row_chunks(rows) * columns) * sizeof(double);
}

void rms_norm_forward(const Stream&, const RmsNormForward& args) {
  check_rows("rms_norm_forward", args.x, {args.x, args.y, args.residual, args.sum});
  MT_CHECK(static_cast<bool>(args.residual) == static_cast<bool>(args.sum),
           "rms_norm_forward: expected a sum with a residual and none without");
  if (args.x.numel() == 0) return;
  args.x.dtype == Dtype::f64 ? forward<double>(args) : forward<float>(args);
}

void rms_norm_backward(const Stream&, const RmsNormBackward& args, Workspace workspace) {
  check_rows("rms_norm_backward", args.x, {args.x, args.dx, args.dy, args.dsum});
  args.x.dtype == Dtype::f64 ? backward<double>(args, workspace) : backward<float>(args, workspace);
}

}  // namespace mixtape::kernels::cpu
