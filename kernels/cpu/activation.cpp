// The backward pass of matmul's epilogue: dz = dy * act'(saved), and the bias gradient from it.
#include "kernels/cpu/activation.h"

#include "kernels/cpu/column_sums.h"
#include "kernels/cpu/scratch.h"

namespace mixtape::kernels::cpu {
namespace {

/// dz = dy * act'(saved) for one row, and sums += dz; dz and sums may be null.
template <class C, class Act>
void backward_row(const C* dy, const C* saved, std::int64_t n, C* dz, C* sums) {
  using P = RowPacket<C>;
  for_each_packet<C>(0, n, [&](auto i, int count, auto) {
    auto g = P::load(dy + i, count, C(0));
    if (saved != nullptr) g = Act::derivative(g, P::load(saved + i, count, C(0)));
    if (dz != nullptr) P::store(dz + i, g, count);
    if (sums != nullptr) P::store(sums + i, P::load(sums + i, count, C(0)) + g, count);
  });
}

struct BackwardViews {
  View dz, dbias, dy, saved;
};

/// Rows [begin, end). The bias gradient sums dz before it is rounded to its storage type.
template <class C, class Act>
void backward_rows(const BackwardViews& v, std::int64_t begin, std::int64_t end, double* total) {
  const std::int64_t n = v.dy.size(1);
  ScratchFrame frame;
  C* const dy_buffer = frame.take<C>(n);
  C* const saved_buffer = frame.take<C>(n);
  C* const dz_buffer = frame.take<C>(n);
  C* const part = total != nullptr ? frame.take<C>(n) : nullptr;
  ColumnSums<C> sums(part, total, total != nullptr ? n : 0);
  for (std::int64_t row = begin; row < end; ++row) {
    C* const dz = v.dz ? open_row(v.dz, row, dz_buffer) : nullptr;
    backward_row<C, Act>(load_row(v.dy, row, dy_buffer),
                         v.saved ? load_row(v.saved, row, saved_buffer) : nullptr, n, dz, part);
    if (v.dz) store_row(v.dz, row, dz);
    if (total != nullptr) sums.row_done();
  }
  if (total != nullptr) sums.flush();
}

template <class C, class Act>
void backward(const BackwardViews& v, float beta) {
  const std::int64_t rows = v.dy.size(0), n = v.dy.size(1);
  if (!v.dbias) {
    parallel_for(0, rows, row_grain(n), [&](std::int64_t begin, std::int64_t end) {
      backward_rows<C, Act>(v, begin, end, nullptr);
    });
    return;
  }
  const std::int64_t chunks = row_chunks(rows), each = rows_per_chunk(rows);
  ScratchFrame frame;
  double* const partial = frame.take<double>(chunks * n);
  const std::int64_t grain =
      std::max<std::int64_t>(1, row_grain(n) / std::max<std::int64_t>(1, each));
  parallel_for(0, chunks, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t c = begin; c < end; ++c)
      backward_rows<C, Act>(v, std::min(rows, c * each), std::min(rows, (c + 1) * each),
                            partial + c * n);
  });
  store_column_sums(v.dbias, partial, chunks, n, beta);
}

}  // namespace

void activation_backward(const Stream&, Activation activation, View dz, View dbias, float beta,
                         View dy, View saved, Workspace) {
  const bool linear = activation == Activation::none;
  MT_CHECK(linear || (dz && saved), "activation_backward: expected dz and the saved values");
  for (const View& v : {dy, dz, saved})
    MT_CHECK(!v || (v.dim() == 2 && v.sizes == dy.sizes && (v.size(1) <= 1 || v.stride(1) == 1)),
             "activation_backward: expected row-major views of shape ", dy.sizes, ", got sizes ",
             v.sizes, " strides ", v.strides);
  MT_CHECK(!dbias || dbias.numel() == dy.size(1), "activation_backward: expected dbias of ",
           dy.size(1), " elements, got ", dbias.sizes);
  const BackwardViews views{dz, dbias, dy, linear ? View{} : saved};
  dispatch_activation(activation, [&](auto act) {
    using Act = decltype(act);
    dy.dtype == Dtype::f64 ? backward<double, Act>(views, beta) : backward<float, Act>(views, beta);
  });
}

}  // namespace mixtape::kernels::cpu
