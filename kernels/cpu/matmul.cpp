// Matrix products on the CPU: a grid of output tiles over the threads, each tile computed in blocks
// by gemm() (Eigen or oneDNN) and finished (bias, activation, rounding) while it is in the cache.
//
// 16-bit operands are converted to float block by block; their sums stay in float over all of K and
// are rounded once on store. Converting and multiplying in float is also the fastest way to
// multiply bfloat16 on CPUs without AMX: AVX-512's own bfloat16 product does half as many a cycle.
// A column-major output is the row-major output of the transposed problem.
#include "kernels/matmul.h"

#include <utility>

#include "engine/thread_pool.h"
#include "kernels/cpu/activation.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/scratch.h"

namespace mixtape::kernels::cpu {
namespace {

// Blocks of a product with converted operands: floats of A, B and the sums fill about 2 MiB.
constexpr std::int64_t kBlockM = 256, kBlockN = 512, kBlockK = 512;
// Tiles are cut at multiples of what the micro-kernels compute at once.
constexpr std::int64_t kAlignM = 8, kAlignN = 16;
constexpr double kFlopsPerTask = 1 << 20;  // least work worth a thread

/// One matrix of a (batched) operand: rows of `ld` elements apart, or columns if transposed.
struct Layout {
  std::int64_t rows, cols, ld, batch_stride;
  bool transposed;

  std::int64_t offset(std::int64_t batch, std::int64_t i, std::int64_t j) const {
    return batch * batch_stride + (transposed ? j * ld + i : i * ld + j);
  }
  Layout transpose() const { return {cols, rows, ld, batch_stride, !transposed}; }
};

Layout layout_of(const char* name, const View& v) {
  MT_CHECK(v.dim() == 2 || v.dim() == 3, "matmul: expected 2 or 3 dimensions for ", name, ", got ",
           v.sizes);
  const std::int64_t rows = v.size(-2), cols = v.size(-1), sr = v.stride(-2), sc = v.stride(-1);
  const std::int64_t batch = v.dim() == 3 && v.size(0) > 1 ? v.stride(0) : 0;
  const auto at_least_one = [](std::int64_t n) { return std::max<std::int64_t>(1, n); };
  if (rows == 0 || cols == 0) return {rows, cols, at_least_one(cols), batch, false};
  if ((cols <= 1 || sc == 1) && (rows <= 1 || sr >= at_least_one(cols)))
    return {rows, cols, rows <= 1 ? at_least_one(cols) : sr, batch, false};
  if ((rows <= 1 || sr == 1) && (cols <= 1 || sc >= at_least_one(rows)))
    return {rows, cols, cols <= 1 ? at_least_one(rows) : sc, batch, true};
  MT_THROW("matmul: expected one of the last two strides of ", name,
           " to be 1 and the other to cover it, got sizes ", v.sizes, " strides ", v.strides);
}

/// The product with row-major output.
struct Problem {
  const MatmulArgs* args;
  Layout a, b, out;
  View a_view, b_view;
  std::int64_t batch, m, n, k;
  bool swapped;  // out is the caller's transposed: its bias runs along rows
};

Problem make_problem(const MatmulArgs& args) {
  Problem p{};
  p.args = &args;
  p.a = layout_of("a", args.a);
  p.b = layout_of("b", args.b);
  p.out = layout_of("out", args.out);
  p.a_view = args.a;
  p.b_view = args.b;
  p.batch = args.out.dim() == 3 ? args.out.size(0) : 1;
  p.swapped = p.out.transposed;
  if (p.swapped) {
    p.out = p.out.transpose();
    std::swap(p.a, p.b);
    std::swap(p.a_view, p.b_view);
    p.a = p.a.transpose();
    p.b = p.b.transpose();
  }
  p.m = p.out.rows;
  p.n = p.out.cols;
  p.k = p.a.cols;
  return p;
}

void check_arguments(const MatmulArgs& args) {
  const View &out = args.out, &a = args.a, &b = args.b;
  const auto batch_of = [](const View& v) { return v.dim() == 3 ? v.size(0) : 1; };
  MT_CHECK(a.dtype == b.dtype && is_floating(a.dtype) &&
               (out.dtype == a.dtype || (out.dtype == Dtype::f32 && is_low_precision(a.dtype))),
           "matmul: expected operands of one floating dtype and an output of it or float32, got ",
           a.dtype, ", ", b.dtype, " and ", out.dtype);
  MT_CHECK(a.size(-1) == b.size(-2) && out.size(-2) == a.size(-2) && out.size(-1) == b.size(-1) &&
               (batch_of(a) == batch_of(out) || a.dim() == 2) &&
               (batch_of(b) == batch_of(out) || b.dim() == 2),
           "matmul: expected out (M, N), a (M, K), b (K, N), got ", out.sizes, ", ", a.sizes, ", ",
           b.sizes);
  MT_CHECK(!args.bias || args.bias.numel() == out.size(-1), "matmul: expected a bias of ",
           out.size(-1), " elements, got ", args.bias.sizes);
  MT_CHECK(args.beta == 0 || (args.activation == Activation::none && !args.pre_activation),
           "matmul: expected no activation with beta = ", args.beta);
  const View& pre = args.pre_activation;
  MT_CHECK(!pre || (pre.dtype == out.dtype && pre.sizes == out.sizes),
           "matmul: expected pre_activation like out, ", out.dtype, " ", out.sizes, ", got ",
           pre.dtype, " ", pre.sizes);
}

/// Part of one output matrix.
struct Tile {
  std::int64_t batch, row, rows, col, cols;
};

/// Bias of a tile in type C, along its columns (or rows for a swapped problem).
template <class C>
const C* load_bias(const Problem& p, const Tile& t, ScratchFrame& frame) {
  const View& bias = p.args->bias;
  if (!bias) return nullptr;
  const std::int64_t first = p.swapped ? t.row : t.col, count = p.swapped ? t.rows : t.cols;
  MT_CHECK(bias.numel() <= 1 || bias.stride(-1) == 1, "matmul: expected a contiguous bias");
  C* const values = frame.take<C>(count);
  load_elements(bias.dtype, element_address(bias.data, bias.dtype, first), values, count);
  return values;
}

/// Where the finished rows of a tile go, with their epilogue.
template <class C>
struct Finish {
  const C* column_bias = nullptr;  // added to each row, or
  const C* row_bias = nullptr;     // one value a row
  C beta = 0;                      // of the old output; 0 when the product added it already
};

/// out row = act(sums + bias) + beta * out row; also stores the value before the activation.
template <class C, class Act>
void finish_row(const C* sums, C bias, const Finish<C>& f, std::int64_t n, C* out, C* pre,
                const C* old) {
  using P = RowPacket<C>;
  const auto row_bias = P::splat(bias), beta = P::splat(f.beta);
  for_each_packet<C>(0, n, [&](auto i, int count, auto) {
    auto v = P::load(sums + i, count, C(0)) + row_bias;
    if (f.column_bias != nullptr) v = v + P::load(f.column_bias + i, count, C(0));
    if (pre != nullptr) P::store(pre + i, v, count);
    v = Act::value(v);
    if (old != nullptr) v = v + beta * P::load(old + i, count, C(0));
    P::store(out + i, v, count);
  });
}

/// Rounds and stores the sums of a tile, (rows, cols) with leading dimension ld in type C. The sums
/// may lie in the output itself.
template <class C>
void finish_tile(const Problem& p, const Tile& t, const C* sums, std::int64_t ld,
                 const Finish<C>& f) {
  const View &out = p.args->out, &pre = p.args->pre_activation;
  const bool in_place = out.dtype == dtype_of<C>;
  const bool nothing = f.column_bias == nullptr && f.row_bias == nullptr && !pre &&
                       p.args->activation == Activation::none && f.beta == 0;
  if (in_place && nothing) return;
  Layout pre_layout{};
  if (pre) {
    pre_layout = layout_of("pre_activation", pre);
    if (p.swapped) pre_layout = pre_layout.transpose();
    MT_CHECK(!pre_layout.transposed, "matmul: expected pre_activation to be laid out like out");
  }
  ScratchFrame frame;
  C* const out_buffer = frame.take<C>(t.cols);
  C* const pre_buffer = frame.take<C>(t.cols);
  C* const old_buffer = frame.take<C>(t.cols);
  dispatch_activation(p.args->activation, [&](auto act) {
    for (std::int64_t i = 0; i < t.rows; ++i) {
      const C* const row = sums + i * ld;
      void* const to =
          element_address(out.data, out.dtype, p.out.offset(t.batch, t.row + i, t.col));
      C* const result = in_place ? static_cast<C*>(to) : out_buffer;
      C* saved = nullptr;
      void* pre_to = nullptr;
      if (pre) {
        pre_to = element_address(pre.data, pre.dtype, pre_layout.offset(t.batch, t.row + i, t.col));
        saved = in_place ? static_cast<C*>(pre_to) : pre_buffer;
      }
      if (f.beta != 0) load_elements(out.dtype, to, old_buffer, t.cols);
      finish_row<C, decltype(act)>(row, f.row_bias != nullptr ? f.row_bias[i] : C(0), f, t.cols,
                                   result, saved, f.beta != 0 ? old_buffer : nullptr);
      if (in_place) continue;
      if (pre) store_elements(pre.dtype, pre_to, saved, t.cols);
      store_elements(out.dtype, to, result, t.cols);
    }
  });
}

/// Elements (row .. row + rows, col .. col + cols) of an operand as type C: in place, or converted
/// into `buffer` in the same order.
template <class C>
GemmOperand<C> load_block(const View& v, const Layout& l, std::int64_t batch, std::int64_t row,
                          std::int64_t rows, std::int64_t col, std::int64_t cols, C* buffer) {
  const void* const from = element_address(v.data, v.dtype, l.offset(batch, row, col));
  if (v.dtype == dtype_of<C>) return {static_cast<const C*>(from), l.ld, l.transposed};
  const std::int64_t outer = l.transposed ? cols : rows, inner = l.transposed ? rows : cols;
  for (std::int64_t i = 0; i < outer; ++i)
    load_elements(v.dtype, element_address(from, v.dtype, i * l.ld), buffer + i * inner, inner);
  return {buffer, inner, l.transposed};
}

template <class C>
void compute_tile(const Problem& p, const Tile& tile) {
  const View& out = p.args->out;
  const bool convert = p.a_view.dtype != dtype_of<C>, direct = out.dtype == dtype_of<C>;
  const std::int64_t step_m = convert ? kBlockM : tile.rows, step_n = convert ? kBlockN : tile.cols;
  const std::int64_t step_k = convert ? kBlockK : std::max<std::int64_t>(1, p.k);
  const C alpha = static_cast<C>(p.args->alpha), beta = static_cast<C>(p.args->beta);
  ScratchFrame frame;
  C* const a_buffer = convert ? frame.take<C>(kBlockM * kBlockK) : nullptr;
  C* const b_buffer = convert ? frame.take<C>(kBlockN * kBlockK) : nullptr;
  C* const sum_buffer = direct ? nullptr : frame.take<C>(kBlockM * kBlockN);
  const C* const bias = load_bias<C>(p, tile, frame);
  for (std::int64_t j = 0; j < tile.cols; j += step_n)
    for (std::int64_t i = 0; i < tile.rows; i += step_m) {
      const Tile t{tile.batch, tile.row + i, std::min(step_m, tile.rows - i), tile.col + j,
                   std::min(step_n, tile.cols - j)};
      C* const sums = direct ? out.ptr<C>() + p.out.offset(t.batch, t.row, t.col) : sum_buffer;
      const std::int64_t ld = direct ? p.out.ld : t.cols;
      C keep = direct ? beta : C(0);
      std::int64_t l = 0;
      do {  // once even for K = 0
        const std::int64_t depth = std::min(step_k, p.k - l);
        const auto a = load_block(p.a_view, p.a, t.batch, t.row, t.rows, l, depth, a_buffer);
        const auto b = load_block(p.b_view, p.b, t.batch, l, depth, t.col, t.cols, b_buffer);
        gemm(t.rows, t.cols, depth, alpha, a, b, keep, sums, ld);
        keep = 1;
        l += depth;
      } while (l < p.k);
      Finish<C> f;
      if (bias != nullptr) (p.swapped ? f.row_bias : f.column_bias) = bias + (p.swapped ? i : j);
      if (!direct) f.beta = beta;
      finish_tile(p, t, sums, ld, f);
    }
}

/// How an output matrix is cut: rows x cols tiles of (height, width).
struct Grid {
  std::int64_t rows, cols, height, width;
};

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// As many tiles as threads that the work is worth, shaped to read the fewest operand elements.
Grid make_grid(const Problem& p) {
  const double flops = 2.0 * static_cast<double>(p.m) * static_cast<double>(p.n) *
                       static_cast<double>(std::max<std::int64_t>(1, p.k));
  const double worth = flops * static_cast<double>(p.batch) / kFlopsPerTask;
  const std::int64_t tasks =
      std::clamp<std::int64_t>(static_cast<std::int64_t>(worth), 1, num_threads());
  const std::int64_t wanted = ceil_div(tasks, p.batch);
  Grid best{1, 1, p.m, p.n};
  std::int64_t best_cost = -1;
  for (std::int64_t rows = 1; rows <= wanted && wanted > 1; ++rows) {
    const std::int64_t cols = ceil_div(wanted, rows);
    const std::int64_t height = ceil_div(ceil_div(p.m, rows), kAlignM) * kAlignM;
    const std::int64_t width = ceil_div(ceil_div(p.n, cols), kAlignN) * kAlignN;
    // The longest tile decides the time; operand traffic breaks ties.
    const std::int64_t cost = std::min(height, p.m) * std::min(width, p.n) * 8 +
                              (std::min(height, p.m) + std::min(width, p.n)) * 64;
    if (best_cost >= 0 && cost >= best_cost) continue;
    best_cost = cost;
    best = {ceil_div(p.m, height), ceil_div(p.n, width), height, width};
  }
  return best;
}

template <class C>
void run(const Problem& p) {
  const Grid grid = make_grid(p);
  const std::int64_t per_matrix = grid.rows * grid.cols, tasks = p.batch * per_matrix;
  const double flops_each = 2.0 * static_cast<double>(grid.height) *
                            static_cast<double>(grid.width) *
                            static_cast<double>(std::max<std::int64_t>(1, p.k));
  const auto grain = static_cast<std::int64_t>(std::max(1.0, kFlopsPerTask / flops_each));
  parallel_for(0, tasks, per_matrix > 1 ? 1 : grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t task = begin; task < end; ++task) {
      const std::int64_t cell = task % per_matrix;
      const std::int64_t row = cell / grid.cols * grid.height, col = cell % grid.cols * grid.width;
      compute_tile<C>(p, {task / per_matrix, row, std::min(grid.height, p.m - row), col,
                          std::min(grid.width, p.n - col)});
    }
  });
}

}  // namespace

void matmul(const Stream& stream, const MatmulArgs& args, Workspace workspace) {
  check_arguments(args);
  check_backward_of(args);
  if (args.out.numel() == 0) return;
  const Problem p = make_problem(args);
  args.a.dtype == Dtype::f64 ? run<double>(p) : run<float>(p);
  if (args.backward_of != Activation::none)
    activation_backward(stream, args.backward_of, args.out, {}, 0, args.out, args.saved, workspace);
}

}  // namespace mixtape::kernels::cpu
