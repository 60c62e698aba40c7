// The last layer of a language model and its loss in one op, for vocabularies whose logits would be
// most of the memory: rows are taken in chunks, and only the log-sum-exp of each row is kept.
// Backward makes the logits of a chunk again, turns them into their gradient in place and
// multiplies that out: a third product for the memory of all logits.
//
// Legend: N rows, C features, V classes, R rows of a chunk.
#include <algorithm>

#include "kernels/loss.h"
#include "kernels/matmul.h"
#include "ops/op_support.h"

namespace mixtape {
namespace {

constexpr std::int64_t kChunkBytes = std::int64_t{256} << 20;
constexpr std::int64_t kRowUnit = 128;  // whole tiles of the products

void product(const View& out, const View& a, const View& b, float beta, Workspace workspace) {
  kernels::matmul(Stream::current(out.device), {.out = out, .a = a, .b = b, .beta = beta},
                  workspace);
}

View rows_of(View v, std::int64_t first, std::int64_t count) {
  v.data = static_cast<char*>(v.data) +
           first * v.strides[0] * static_cast<std::int64_t>(size_of(v.dtype));
  v.sizes[0] = count;
  return v;
}

struct LinearCrossEntropy {  // x (N, C), w (V, C), target (N)
  LinearCrossEntropyOptions options;
  static constexpr OpInfo info{.name = "linear_cross_entropy", .cast = Cast::low};

  Metas infer(Inputs in) const {
    const Tensor &x = in[0], &w = in[1];
    check_floating("linear_cross_entropy", "x", x);
    MT_CHECK(x.dtype() == w.dtype(),
             "linear_cross_entropy: expected x and weight of one dtype, got ", x.describe(),
             " and ", w.describe());
    return {{Shape{}, compute_dtype(x.dtype())}};
  }

  std::int64_t chunk_rows(std::int64_t classes, Dtype dtype) const {
    if (options.chunk_rows > 0) return options.chunk_rows;
    const std::int64_t row =
        std::max<std::int64_t>(1, classes) * static_cast<std::int64_t>(size_of(dtype));
    return std::max<std::int64_t>(1, kChunkBytes / row / kRowUnit) * kRowUnit;
  }

  void forward(Inputs in, Outputs out, Saved& saved) const {
    const Tensor x = in[0].contiguous(), w = in[1].contiguous(), target = in[2].contiguous();
    const std::int64_t n = x.size(0), classes = w.size(0), step = chunk_rows(classes, x.dtype());
    const Dtype wide = out[0].dtype();
    const std::int64_t chunks = std::max<std::int64_t>(1, (n + step - 1) / step);
    const Tensor row_loss = Tensor::empty({n}, wide, x.device()),
                 lse = Tensor::empty({n}, wide, x.device()),
                 losses = Tensor::empty({chunks}, wide, x.device()),
                 counts = Tensor::empty({chunks}, Dtype::f32, x.device());
    const Tensor logits = Tensor::empty({std::min(n, step), classes}, x.dtype(), x.device());
    const ScratchWorkspace scratch(kernels::matmul_workspace_bytes(x.device()), x.device());
    for (std::int64_t c = 0; c < chunks; ++c) {
      const std::int64_t first = c * step, rows = std::min(step, n - first);
      const View z = rows_of(logits.view(), 0, rows);
      product(z, rows_of(x.view(), first, rows), transposed(w.view()), 0, scratch);
      kernels::cross_entropy_forward(stream_of(x),
                                     {.row_loss = rows_of(row_loss.view(), first, rows),
                                      .lse = rows_of(lse.view(), first, rows),
                                      .count = counts.slice(0, c, c + 1).view(),
                                      .loss = losses.slice(0, c, c + 1).view(),
                                      .logits = z,
                                      .target = rows_of(target.view(), first, rows),
                                      .ignore_index = options.ignore_index,
                                      .label_smoothing = options.label_smoothing});
    }
    const bool mean = options.reduction == Reduction::mean;
    const Tensor count = mean ? sum(counts) : Tensor();
    out[0] = mean ? div(sum(losses), count) : sum(losses);
    saved.value(x.same(in[0]) ? in[0] : x);
    saved.value(w.same(in[1]) ? in[1] : w);
    saved.value(target.same(in[2]) ? in[2] : target);
    saved.value(lse);
    saved.value(count);
  }

  void backward(const Saved& saved, Inputs dy, Grads dst) const {
    if (!dst[0] && !dst[1]) return;
    const Tensor x = saved[0], w = saved[1], target = saved[2], lse = saved[3], count = saved[4];
    const std::int64_t n = x.size(0), step = chunk_rows(w.size(0), x.dtype());
    const Tensor g = (count ? div(dy[0], count) : dy[0]).contiguous();
    const Tensor dx = dst[0] ? dst[0].out() : Tensor();
    GradDst::Accumulator dw{{}, 0};
    if (dst[1]) dw = dst[1].accumulator();
    // The sum over chunks is made in float32 where the gradient itself is 16-bit.
    const bool narrow = dw.tensor && is_low_precision(dw.tensor.dtype()) && n > step;
    const Tensor sums = narrow ? Tensor::empty(w.shape(), Dtype::f32, w.device()) : dw.tensor;
    float beta = narrow ? 0 : dw.beta;
    const Tensor logits = Tensor::empty({std::min(n, step), w.size(0)}, x.dtype(), x.device());
    const ScratchWorkspace scratch(kernels::matmul_workspace_bytes(x.device()), x.device());
    for (std::int64_t first = 0; first < n; first += step) {
      const std::int64_t rows = std::min(step, n - first);
      const View z = rows_of(logits.view(), 0, rows), x_rows = rows_of(x.view(), first, rows);
      product(z, x_rows, transposed(w.view()), 0, scratch);
      kernels::cross_entropy_backward(stream_of(x), {.dlogits = z,
                                                     .dy = g.view(),
                                                     .lse = rows_of(lse.view(), first, rows),
                                                     .logits = z,
                                                     .target = rows_of(target.view(), first, rows),
                                                     .ignore_index = options.ignore_index,
                                                     .label_smoothing = options.label_smoothing});
      if (dx) product(rows_of(dx.view(), first, rows), z, w.view(), 0, scratch);
      if (sums) product(sums.view(), transposed(z), x_rows, beta, scratch);
      beta = 1;
    }
    if (n == 0 && sums && beta == 0) Tensor(sums).zero_();
    if (narrow && dw.beta == 0) dst[1].set(sums);
    if (narrow && dw.beta != 0) Tensor(dw.tensor).add_(sums);
  }
  OpWork work(const OpCall& call) const {
    const Shape &x = call.in[0].shape, &w = call.in[1].shape;
    const double each = product_flops(x[0], w[0], w[1]);  // backward makes the logits again
    const bool any = call.wants(0) || call.wants(1);
    return {.flops = call.backward ? each * (any + call.wants(0) + call.wants(1)) : each};
  }
};

}  // namespace

Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& target,
                            const LinearCrossEntropyOptions& options) {
  MT_CHECK(x.dim() >= 1 && weight.dim() == 2 && x.size(-1) == weight.size(1),
           "linear_cross_entropy: expected x (.., C) and a weight (V, C), got ", x.describe(),
           " and ", weight.describe());
  Shape rows = x.shape();
  rows.erase(rows.size() - 1);
  MT_CHECK(target.shape() == rows && (target.dtype() == Dtype::i64 || target.dtype() == Dtype::i32),
           "linear_cross_entropy: expected an int64 target of shape ", rows, ", got ",
           target.describe());
  MT_CHECK(options.reduction != Reduction::none,
           "linear_cross_entropy: expected reduction mean or sum, got none");
  MT_CHECK(options.label_smoothing >= 0 && options.label_smoothing <= 1,
           "linear_cross_entropy: expected label_smoothing in [0, 1], got ",
           options.label_smoothing);
  MT_CHECK(options.chunk_rows >= 0, "linear_cross_entropy: expected chunk_rows of at least 0, got ",
           options.chunk_rows);
  return apply(LinearCrossEntropy{options}, {x.reshape({rows.numel(), x.size(-1)}), weight,
                                             cast(target, Dtype::i64).reshape({target.numel()})});
}

}  // namespace mixtape
