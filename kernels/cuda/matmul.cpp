// Matrix products through cuBLASLt. A row-major out = a b is the column-major out^T = b^T a^T, so
// the operands swap places; the activation and the bias ride along as an epilogue where the library
// has it, and otherwise follow in one kernel of ours (bias_activation.cu).
// Legend: M rows, N columns, K inner, B batch; lower case m, n are cuBLAS's own (column-major).
#include "kernels/matmul.h"

#include <algorithm>

#include "kernels/cuda/bias_activation.h"
#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/matmul_plan.h"

namespace mixtape::kernels::cuda {
namespace {

constexpr std::int64_t kMaxBatch = 65535;  // the library puts the batch into a grid dimension

/// How a matrix lies in memory.
struct Layout {
  bool row_major;
  std::int64_t ld;            // elements between rows (row-major) or columns
  std::int64_t batch_stride;  // elements; 0 for 2-D
};

/// Both orders fit a vector; then `prefer_row` or, without it, the better aligned one is taken.
Layout layout_of(const char* which, const View& v, bool prefer_row) {
  const std::int64_t rows = v.size(-2), columns = v.size(-1);
  const std::int64_t row_stride = v.stride(-2), column_stride = v.stride(-1);
  const bool row_major = (column_stride == 1 || columns <= 1) &&
                         (rows <= 1 || row_stride >= std::max<std::int64_t>(columns, 1));
  const bool column_major = (row_stride == 1 || rows <= 1) &&
                            (columns <= 1 || column_stride >= std::max<std::int64_t>(rows, 1));
  MT_CHECK(row_major || column_major, "matmul: ", which,
           ": expected stride 1 in one of the last two dimensions and no overlap, got sizes ",
           v.sizes, " with strides ", v.strides);
  // A single row may have any leading dimension: one that keeps vector loads possible.
  const auto padded = [](std::int64_t n) { return (std::max<std::int64_t>(n, 1) + 7) / 8 * 8; };
  const std::int64_t row_ld = rows <= 1 ? padded(columns) : row_stride;
  const std::int64_t column_ld = columns <= 1 ? padded(rows) : column_stride;
  const bool take_row =
      row_major && (!column_major || prefer_row || row_ld % 8 == 0 || column_ld % 8 != 0);
  const std::int64_t batch_stride = v.dim() == 3 && v.size(0) > 1 ? v.stride(0) : 0;
  return {take_row, take_row ? row_ld : column_ld, batch_stride};
}

void check_arguments(const MatmulArgs& x) {
  const auto dims = [](const View& v) { return v.dim() == 2 || v.dim() == 3; };
  MT_CHECK(dims(x.a) && dims(x.b) && dims(x.out),
           "matmul: expected operands of 2 or 3 dimensions, got a ", x.a.sizes, ", b ", x.b.sizes,
           ", out ", x.out.sizes);
  const std::int64_t batch = x.out.dim() == 3 ? x.out.size(0) : 1;
  for (const View* v : {&x.a, &x.b})
    MT_CHECK(v->dim() == 2 || v->size(0) == batch || v->size(0) == 1,
             "matmul: expected a batch of ", batch, ", got ", v->sizes);
  MT_CHECK(x.a.size(-2) == x.out.size(-2) && x.b.size(-1) == x.out.size(-1) &&
               x.a.size(-1) == x.b.size(-2),
           "matmul: shapes do not match: a ", x.a.sizes, ", b ", x.b.sizes, ", out ", x.out.sizes);
  MT_CHECK(is_floating(x.a.dtype) && x.a.dtype == x.b.dtype,
           "matmul: expected a and b of one floating dtype, got ", x.a.dtype, " and ", x.b.dtype);
  MT_CHECK(x.out.dtype == x.a.dtype || (x.out.dtype == Dtype::f32 && is_low_precision(x.a.dtype)),
           "matmul: expected out of dtype ", x.a.dtype, " or float32, got ", x.out.dtype);
  MT_CHECK(x.activation == Activation::none || x.beta == 0,
           "matmul: an activation needs beta 0, got ", x.beta);
  MT_CHECK(!x.bias || (x.bias.dim() == 1 && x.bias.size(0) == x.out.size(-1)),
           "matmul: expected a bias of ", x.out.size(-1), " elements, got ", x.bias.sizes);
  MT_CHECK(!x.pre_activation ||
               (x.pre_activation.sizes == x.out.sizes && x.pre_activation.dtype == x.out.dtype),
           "matmul: expected pre_activation of out's shape and dtype, got ", x.pre_activation.sizes,
           " ", x.pre_activation.dtype);
}

/// The problem as cuBLASLt sees it, with the plain epilogue.
struct Problem {
  MatmulKey key{};
  MatmulOperands operands{};
  Layout out{}, pre{};
  std::int64_t batch = 1;
};

/// A batch whose b is one matrix is a single product with B * M rows, if those rows are evenly
/// spaced in a, out and pre_activation: then this folds the batch into `rows`.
void fold_batch(Problem& p, const MatmulArgs& x, Layout& a, const Layout& b, std::int64_t& rows) {
  if (p.batch == 1 || b.batch_stride != 0) return;
  const auto foldable = [&](const Layout& l, std::int64_t columns) {
    return l.row_major && (rows == 1 ? l.batch_stride >= columns : l.batch_stride == rows * l.ld);
  };
  const std::int64_t columns = x.out.size(-1);
  if (!foldable(a, x.a.size(-1)) || !foldable(p.out, columns)) return;
  if (x.pre_activation && !foldable(p.pre, columns)) return;
  for (Layout* l : {&a, &p.out, &p.pre}) {
    if (rows == 1) l->ld = l->batch_stride;
    l->batch_stride = 0;
  }
  rows *= p.batch;
  p.batch = 1;
}

void place(Problem& p, const MatmulArgs& x, const Layout& a, const Layout& b, std::int64_t rows) {
  MatmulKey& key = p.key;
  key.k = x.a.size(-1);
  if (p.out.row_major) {  // out^T (N, M) = b^T a^T
    key.m = x.out.size(-1);
    key.n = rows;
    key.transpose_a = !b.row_major;
    key.transpose_b = !a.row_major;
    key.lda = b.ld;
    key.ldb = a.ld;
    key.stride_a = b.batch_stride;
    key.stride_b = a.batch_stride;
    p.operands.a = x.b.data;
    p.operands.b = x.a.data;
  } else {
    key.m = rows;
    key.n = x.out.size(-1);
    key.transpose_a = a.row_major;
    key.transpose_b = b.row_major;
    key.lda = a.ld;
    key.ldb = b.ld;
    key.stride_a = a.batch_stride;
    key.stride_b = b.batch_stride;
    p.operands.a = x.a.data;
    p.operands.b = x.b.data;
  }
  key.ldd = p.out.ld;
  key.stride_d = p.out.batch_stride;
  p.operands.d = x.out.data;
  if (p.batch == 1) key.stride_a = key.stride_b = key.stride_d = 0;
}

Problem problem_of(const MatmulArgs& x, const Workspace& workspace) {
  Problem p;
  const bool has_epilogue = x.bias || x.pre_activation || x.activation != Activation::none ||
                            x.backward_of != Activation::none;
  p.batch = x.out.dim() == 3 ? x.out.size(0) : 1;
  p.out = layout_of("out", x.out, has_epilogue);
  MT_CHECK(p.batch == 1 || p.out.batch_stride != 0, "matmul: out repeats a matrix: strides ",
           x.out.strides);
  Layout a = layout_of("a", x.a, false);
  const Layout b = layout_of("b", x.b, false);
  if (x.pre_activation) p.pre = layout_of("pre_activation", x.pre_activation, true);
  std::int64_t rows = x.out.size(-2);
  fold_batch(p, x, a, b, rows);
  place(p, x, a, b, rows);
  MatmulKey& key = p.key;
  key.dtype = x.a.dtype;
  key.out_dtype = x.out.dtype;
  key.tf32 = x.a.dtype == Dtype::f32 && tf32_allowed();
  key.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  key.align_a = alignment_log2(p.operands.a);
  key.align_b = alignment_log2(p.operands.b);
  key.align_d = alignment_log2(p.operands.d);
  const std::size_t scratch = workspace.data == nullptr ? 0 : workspace.bytes;
  key.workspace_kib =
      static_cast<std::uint32_t>(std::min(scratch, matmul_workspace_bytes(x.out.device)) >> 10);
  p.operands.alpha = x.alpha;
  p.operands.beta = x.beta;
  return p;
}

/// The epilogue that multiplies by the derivative of tanh-GELU at `saved`.
bool set_gelu_gradient(Problem& p, const MatmulArgs& x) {
  MatmulKey& key = p.key;
  key.align_aux = alignment_log2(x.saved.data);
  const bool fits = x.backward_of == Activation::gelu_tanh && is_low_precision(key.out_dtype) &&
                    x.saved.stride(1) == 1 && key.align_aux >= 4 && x.saved.stride(0) % 8 == 0;
  if (!fits) return false;
  key.epilogue = CUBLASLT_EPILOGUE_DGELU;
  key.aux_ld = x.saved.stride(0);
  p.operands.aux = x.saved.data;
  return true;
}

/// Sets the epilogue that does all that x asks for; false if cuBLASLt has none for it.
bool set_epilogue(Problem& p, const MatmulArgs& x) {
  MatmulKey& key = p.key;
  if (!p.out.row_major || key.out_dtype == Dtype::f64) return false;
  if (x.backward_of != Activation::none) return set_gelu_gradient(p, x);
  std::uint32_t epilogue = 0;
  switch (x.activation) {
    case Activation::none: break;
    case Activation::relu: epilogue = CUBLASLT_EPILOGUE_RELU; break;
    case Activation::gelu_tanh: epilogue = CUBLASLT_EPILOGUE_GELU; break;
    default: return false;  // exact GELU and SiLU
  }
  // The library's GELU approximates tanh to what a 16-bit result can hold.
  if (x.activation == Activation::gelu_tanh && !is_low_precision(key.out_dtype)) return false;
  if (x.bias) {
    const bool packed = x.bias.stride(0) == 1 || x.bias.size(0) <= 1;
    key.align_bias = alignment_log2(x.bias.data);
    if (x.bias.dtype != key.out_dtype || !packed || key.align_bias < 4) return false;
    epilogue |= CUBLASLT_EPILOGUE_BIAS;
    p.operands.bias = x.bias.data;
  }
  if (x.pre_activation) {  // auxiliary output: leading dimension and batch stride multiples of 8
    key.align_aux = alignment_log2(x.pre_activation.data);
    if (x.activation != Activation::gelu_tanh || !p.pre.row_major || key.align_aux < 4 ||
        p.pre.ld % 8 != 0 || p.pre.batch_stride % 8 != 0)
      return false;
    epilogue |= CUBLASLT_EPILOGUE_GELU_AUX;
    key.aux_ld = p.pre.ld;
    key.stride_aux = p.batch > 1 ? p.pre.batch_stride : 0;
    p.operands.aux = x.pre_activation.data;
  }
  if (epilogue != 0) key.epilogue = epilogue;
  return true;
}

void* advance(const void* p, std::int64_t elements, Dtype dtype) {
  return p == nullptr ? nullptr
                      : const_cast<char*>(static_cast<const char*>(p)) +
                            elements * static_cast<std::int64_t>(size_of(dtype));
}

/// Runs the problem in pieces of at most kMaxBatch matrices.
bool run_batches(const Problem& p, Workspace workspace, const Stream& stream) {
  MatmulKey key = p.key;
  MatmulOperands x = p.operands;
  for (std::int64_t first = 0; first < p.batch; first += kMaxBatch) {
    const std::int64_t count = std::min(kMaxBatch, p.batch - first);
    key.batch = static_cast<std::int32_t>(count);
    x.a = advance(p.operands.a, first * key.stride_a, key.dtype);
    x.b = advance(p.operands.b, first * key.stride_b, key.dtype);
    x.d = advance(p.operands.d, first * key.stride_d, key.out_dtype);
    x.aux = advance(p.operands.aux, first * key.stride_aux, key.out_dtype);
    if (first > 0) {  // later pieces may start at a less aligned address
      key.align_a = alignment_log2(x.a);
      key.align_b = alignment_log2(x.b);
      key.align_d = alignment_log2(x.d);
    }
    if (!run_matmul(key, x, workspace, stream)) {
      MT_CHECK(first == 0, "matmul: cuBLASLt has no algorithm for the last ", count,
               " matrices of a batch of ", p.batch);
      return false;
    }
  }
  return true;
}

}  // namespace

void matmul(const Stream& stream, const MatmulArgs& args, Workspace workspace) {
  check_arguments(args);
  check_backward_of(args);
  if (args.out.numel() == 0) return;
  const CudaDeviceGuard device(stream.device());
  const bool backward = args.backward_of != Activation::none;
  const bool has_epilogue =
      args.bias || args.pre_activation || args.activation != Activation::none || backward;
  if (args.a.size(-1) == 0) {  // backward: 0 * act'(saved)
    if (has_epilogue || args.beta != 1)
      bias_activation(stream, args.out, args.beta, args.bias, args.activation, args.pre_activation);
    return;
  }
  Problem plain = problem_of(args, workspace);
  plain.key.device = stream.device().index;
  if (has_epilogue) {
    Problem fused = plain;
    if (set_epilogue(fused, args) && run_batches(fused, workspace, stream)) return;
  }
  MT_CHECK(run_batches(plain, workspace, stream), "matmul: cuBLASLt has no algorithm for a ",
           args.a.sizes, " strides ", args.a.strides, ", b ", args.b.sizes, " strides ",
           args.b.strides, ", out ", args.out.sizes, " strides ", args.out.strides, ", dtype ",
           args.a.dtype, " to ", args.out.dtype);
  if (backward)
    activation_backward(stream, args.backward_of, args.out, {}, 0, args.out, args.saved, workspace);
  else if (has_epilogue)
    bias_activation(stream, args.out, 1, args.bias, args.activation, args.pre_activation);
}

}  // namespace mixtape::kernels::cuda
