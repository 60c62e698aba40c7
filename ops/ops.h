// The public functions on tensors, by family. Shapes are in comments: B batch, N rows or samples,
// C channels or classes, H W image. Every function checks its arguments and throws mixtape::Error
// as "op: expected ..., got ..."; all but those marked [no gradient] are recorded on the tape.
#pragma once

#include <optional>
#include <vector>

#include "engine/tensor.h"

namespace mixtape {

// ---- factories (ops/factory.cpp) ---------------------------------------------------------------
Tensor empty(const Shape& sizes, const TensorOptions& options = {});
Tensor zeros(const Shape& sizes, const TensorOptions& options = {});
Tensor ones(const Shape& sizes, const TensorOptions& options = {});
Tensor full(const Shape& sizes, const Scalar& value, const TensorOptions& options = {});
/// start, start + step, ... below stop (above it for a negative step).
Tensor arange(const Scalar& start, const Scalar& stop, const Scalar& step = 1,
              const TensorOptions& options = {.dtype = Dtype::i64});
/// Uniform in [0, 1), from the device's generator.
Tensor rand(const Shape& sizes, const TensorOptions& options = {});
/// Standard normal.
Tensor randn(const Shape& sizes, const TensorOptions& options = {});
/// Integers in [lo, hi).
Tensor randint(std::int64_t lo, std::int64_t hi, const Shape& sizes,
               const TensorOptions& options = {.dtype = Dtype::i64});
Tensor zeros_like(const Tensor& t);
Tensor ones_like(const Tensor& t);
Tensor empty_like(const Tensor& t);
/// A copy of `values`, converted to options.dtype; their count must match the shape.
template <class T>
Tensor from_span(std::span<const T> values, const Shape& sizes,
                 const TensorOptions& options = {.dtype = dtype_of<T>});
template <class T>
Tensor from_vector(const std::vector<T>& values, const Shape& sizes,
                   const TensorOptions& options = {.dtype = dtype_of<T>}) {
  return from_span(std::span<const T>(values), sizes, options);
}
/// A 1-D tensor of the listed values: tensor({1.0f, 2.0f}).
template <class T>
Tensor tensor(std::initializer_list<T> values,
              const TensorOptions& options = {.dtype = dtype_of<T>}) {
  return from_span(std::span<const T>(values.begin(), values.size()),
                   {static_cast<std::int64_t>(values.size())}, options);
}
/// A 0-d tensor.
Tensor scalar_tensor(const Scalar& value, const TensorOptions& options = {});

// ---- elementwise (ops/elementwise.cpp; the list is kernels/elementwise.def) --------------------
#define MT_UNARY(function, Functor) Tensor function(const Tensor& x);
#define MT_BINARY(function, Functor)                 \
  Tensor function(const Tensor& a, const Tensor& b); \
  Tensor function(const Tensor& a, const Scalar& b); \
  Tensor function(const Scalar& a, const Tensor& b);
#include "kernels/elementwise.def"
/// min(max(x, lo), hi); the gradient passes where lo <= x <= hi. NaN in x or a bound gives NaN.
Tensor clamp(const Tensor& x, std::optional<double> lo, std::optional<double> hi);
/// condition ? a : b, with broadcasting; the side not chosen gets a gradient of exactly 0.
Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b);
Tensor where(const Tensor& condition, const Tensor& a, const Scalar& b);
Tensor where(const Tensor& condition, const Scalar& a, const Tensor& b);
/// x in another dtype.
Tensor cast(const Tensor& x, Dtype dtype);

inline Tensor operator+(const Tensor& a, const Tensor& b) { return add(a, b); }
inline Tensor operator-(const Tensor& a, const Tensor& b) { return sub(a, b); }
inline Tensor operator*(const Tensor& a, const Tensor& b) { return mul(a, b); }
inline Tensor operator/(const Tensor& a, const Tensor& b) { return div(a, b); }
inline Tensor operator-(const Tensor& a) { return neg(a); }
#define MT_SCALAR_OPERATOR(symbol, function)                                                 \
  inline Tensor operator symbol(const Tensor& a, const Scalar& b) { return function(a, b); } \
  inline Tensor operator symbol(const Scalar& a, const Tensor& b) { return function(a, b); }
MT_SCALAR_OPERATOR(+, add)
MT_SCALAR_OPERATOR(-, sub)
MT_SCALAR_OPERATOR(*, mul)
MT_SCALAR_OPERATOR(/, div)
#undef MT_SCALAR_OPERATOR

// ---- reductions (ops/reduce.cpp): over `dims`, all of them when empty --------------------------
Tensor sum(const Tensor& x, const Shape& dims = {}, bool keepdim = false);
Tensor mean(const Tensor& x, const Shape& dims = {}, bool keepdim = false);
/// Variance with divisor n - correction.
Tensor var(const Tensor& x, const Shape& dims = {}, double correction = 1, bool keepdim = false);
/// The largest element; equal maxima share its gradient equally.
Tensor max(const Tensor& x);
struct MaxResult {
  Tensor values, indices;  // indices: int64 [no gradient]
};
/// The largest element along dim and its first index; the gradient goes to that index.
MaxResult max(const Tensor& x, int dim, bool keepdim = false);
/// Index of the first largest element along dim, int64 [no gradient].
Tensor argmax(const Tensor& x, int dim, bool keepdim = false);
/// x summed to `sizes`, which must broadcast to x's shape: the gradient of broadcasting.
Tensor sum_to(const Tensor& x, const Shape& sizes);

// ---- products (ops/matmul.cpp) -----------------------------------------------------------------
/// NumPy's matmul: (.., M, K) x (.., K, N) -> (.., M, N), batches broadcast; 1-D operands are
/// vectors.
Tensor matmul(const Tensor& a, const Tensor& b);
enum class Act : std::uint8_t { none, relu, gelu_tanh, gelu, silu };
struct LinearOptions {
  Act act = Act::none;
};
/// act(x w^T + bias): x (.., in), weight (out, in), bias (out) or undefined -> (.., out).
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
              LinearOptions options = {});
struct MlpOptions {
  Act act = Act::gelu_tanh;
  /// Keeps one (.., hidden) tensor for backward, not two: the activation is computed again there.
  bool recompute_activation = false;
};
/// act(x w1^T + b1) w2^T + b2, with the activation's derivative fused into backward's products:
/// x (.., in), w1 (hidden, in), b1 (hidden), w2 (out, hidden), b2 (out) -> (.., out); biases may be
/// undefined.
Tensor mlp(const Tensor& x, const Tensor& w1, const Tensor& b1, const Tensor& w2, const Tensor& b2,
           MlpOptions options = {});

// ---- shape (ops/shape.cpp) ---------------------------------------------------------------------
Tensor reshape(const Tensor& x, const Shape& sizes);
Tensor permute(const Tensor& x, const Shape& dims);
Tensor transpose(const Tensor& x, int a, int b);
Tensor expand(const Tensor& x, const Shape& sizes);
Tensor slice(const Tensor& x, int dim, std::int64_t start, std::int64_t stop = Slice::kEnd,
             std::int64_t step = 1);
/// Joins along an existing dimension.
Tensor cat(const std::vector<Tensor>& tensors, int dim = 0);
/// Joins along a new dimension.
Tensor stack(const std::vector<Tensor>& tensors, int dim = 0);

// ---- indexing (ops/index.cpp): index tensors are int64 or int32 --------------------------------
/// Rows of x along dim: out[.., k, ..] = x[.., index[k], ..].
Tensor index_select(const Tensor& x, int dim, const Tensor& index);
/// out[p] = x[p with p[dim] = index[p]]; out has index's shape.
Tensor gather(const Tensor& x, int dim, const Tensor& index);
/// x plus source added at index along dim (a new tensor).
Tensor scatter_add(const Tensor& x, int dim, const Tensor& index, const Tensor& source);
/// Rows of weight (V, C) at index (..) -> (.., C); rows at padding_index get no gradient.
Tensor embedding(const Tensor& weight, const Tensor& index, std::int64_t padding_index = -1);

// ---- softmax and losses (ops/loss.cpp) ---------------------------------------------------------
Tensor softmax(const Tensor& x, int dim = -1);
Tensor log_softmax(const Tensor& x, int dim = -1);
enum class Reduction : std::uint8_t { mean, sum, none };
struct CrossEntropyOptions {
  std::int64_t ignore_index = -100;
  float label_smoothing = 0;
  Reduction reduction = Reduction::mean;
};
/// Logits (N, C) or (N, C, d1, ..) against classes (N) or (N, d1, ..) of int64 or int32.
Tensor cross_entropy(const Tensor& logits, const Tensor& target, CrossEntropyOptions options = {});
struct LinearCrossEntropyOptions {
  std::int64_t ignore_index = -100;
  float label_smoothing = 0;
  Reduction reduction = Reduction::mean;  // or sum
  std::int64_t chunk_rows = 0;            // rows of logits at a time; 0: as many as 256 MiB hold
};
/// cross_entropy(linear(x, weight), target) without ever holding all logits, at the price of making
/// them twice: x (.., C), weight (V, C), target (..) -> ().
Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& target,
                            const LinearCrossEntropyOptions& options = {});
/// Mean (or sum, or elementwise) of (x - target)^2.
Tensor mse_loss(const Tensor& x, const Tensor& target, Reduction reduction = Reduction::mean);

// ---- normalisation (ops/norm.cpp) --------------------------------------------------------------
/// (x - mean) * rstd over the last dimensions `normalized_shape`, times weight plus bias
/// (optional).
Tensor layer_norm(const Tensor& x, const Shape& normalized_shape, const Tensor& weight = {},
                  const Tensor& bias = {}, double eps = 1e-5);
struct AddLayerNormResult {
  Tensor normalized, sum;
};
/// sum = x + residual, normalized = layer_norm(sum) over the last dimension, in one pass.
AddLayerNormResult add_layer_norm(const Tensor& x, const Tensor& residual,
                                  const Tensor& weight = {}, const Tensor& bias = {},
                                  double eps = 1e-5);

/// x * rstd * weight (optional) with rstd = 1 / sqrt(mean(x^2) + eps) over the last dimensions
/// `normalized_shape` (Zhang and Sennrich, 2019).
Tensor rms_norm(const Tensor& x, const Shape& normalized_shape, const Tensor& weight = {},
                double eps = 1e-5);
struct AddRmsNormResult {
  Tensor normalized, sum;
};
/// sum = x + residual, normalized = rms_norm(sum) over the last dimension, in one pass.
AddRmsNormResult add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight = {},
                              double eps = 1e-5);

// ---- normalisation over a batch or groups of channels (ops/batch_norm.cpp, ops/group_norm.cpp) --
struct BatchNormOptions {
  /// Statistics of x, which must have more than one value per channel; false: the running ones.
  bool training = true;
  /// running = (1 - momentum) * running + momentum * this batch's; std::nullopt averages all
  /// batches so far alike and needs batches_tracked.
  std::optional<double> momentum = 0.1;
  double eps = 1e-5;
  bool relu = false;            // fused: relu(normalised + residual)
  Tensor residual = {};         // of x's shape and dtype, added after the normalisation
  Tensor batches_tracked = {};  // int64 (): counts the training calls
};
/// (x - mean) * rstd * weight + bias for each channel of x (N, C, ..) -> the same, in x's layout
/// (Ioffe and Szegedy, 2015). Statistics are over everything but the channel, in float32 or wider:
/// x's own in training, which also move running_mean and running_var (of the unbiased variance) in
/// place, else the running ones. weight, bias and, in training, the running ones may be undefined.
///   Tensor y = batch_norm(x, w, b, mean, var, {.training = false, .relu = true, .residual = x0});
Tensor batch_norm(const Tensor& x, const Tensor& weight, const Tensor& bias,
                  const Tensor& running_mean, const Tensor& running_var,
                  const BatchNormOptions& options = {});
/// (x - mean) * rstd over each of `groups` groups of channels of each sample of x (N, C, ..), times
/// weight (C) plus bias (C), both optional (Wu and He, 2018).
Tensor group_norm(const Tensor& x, std::int64_t groups, const Tensor& weight = {},
                  const Tensor& bias = {}, double eps = 1e-5);

// ---- gated activations (ops/swiglu.cpp) --------------------------------------------------------
/// silu(gate) * up (Shazeer, 2020): (.., 2H), halves [gate | up], -> (.., H).
///   Tensor y = linear(swiglu(linear(x, w_gate_up)), w_down);
Tensor swiglu(const Tensor& gate_and_up);

// ---- attention (ops/attention.cpp) -------------------------------------------------------------
struct AttentionOptions {
  bool causal = false;  // query t attends to keys s <= t, also where T != S
  /// Broadcastable to (B, H, T, S): bool (true: attend) or floating (added; -inf masks). It must
  /// not require a gradient. A query that may attend to no key gives 0 and sends no gradient.
  Tensor mask = {};
  double scale = 0;    // 0: 1 / sqrt(D)
  double dropout = 0;  // of the probabilities
};
/// softmax(scale q k^T + mask) v (Vaswani et al., 2017): q (B, H, T, D), k and v (B, G, S, D) with
/// H a multiple of G (grouped queries) -> (B, H, T, D), laid out (B, T, H, D), so that transposing
/// and reshaping to (B, T, H D) is a view. Memory grows with T, not with T S.
Tensor scaled_dot_product_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                    const AttentionOptions& options = {});
struct SelfAttentionOptions {
  std::int64_t heads = 1, kv_heads = 0;  // kv_heads 0: as many as heads
  bool causal = true;
  double scale = 0, dropout = 0;
};
/// Attention that reads queries, keys and values in place from one projection: qkv (B, T, (heads +
/// 2 kv_heads) D), [query heads | key heads | value heads] -> (B, T, heads D). Its gradient is one
/// packed tensor.
///   Tensor y = self_attention(linear(x, w_qkv), {.heads = 12});
Tensor self_attention(const Tensor& qkv, const SelfAttentionOptions& options);

// ---- positions (ops/rotary.cpp) ----------------------------------------------------------------
struct RotaryOptions {
  Tensor positions = {};    // int64 or int32, (T) or (B, T); undefined: 0, 1, .., T - 1
  std::int64_t offset = 0;  // added to positions
  std::int64_t heads = 0;   // leading heads to rotate, the others are copied; 0: all
  double base = 10000;
};
/// Rotary position embedding (Su et al., 2021) of x (B, T, H, D), D even and at most 512 -> the
/// same: pair (x[i], x[i + D/2]) of a head turns by position * base^(-2i/D) radians. These are the
/// pairs of Llama and Hugging Face ("rotate half"), not the paper's neighbours. Any strides are
/// read in place if the last is 1; of a packed projection, rotate queries and keys at once:
///   Tensor qkv = linear(x, w_qkv).reshape({B, T, H + 2 * G, D});
///   Tensor y = self_attention(rotary_embedding(qkv, {.heads = H + G}).flatten(2), {.heads = H,
///   ..});
Tensor rotary_embedding(const Tensor& x, const RotaryOptions& options = {});

// ---- random (ops/random.cpp) -------------------------------------------------------------------
/// Zeroes each element with probability p, scales the rest by 1 / (1 - p); x itself if not
/// training.
Tensor dropout(const Tensor& x, double p = 0.5, bool training = true);

// ---- images (ops/conv.cpp, ops/pool.cpp): NCHW, or channels-last by strides -------------------
/// x (N, C, H, W) with memory laid out (N, H, W, C), the layout that convolution on Tensor Cores
/// wants; x itself if it is already. Ops on images and elementwise ones keep it, so that it is
/// enough to convert a network's input.
Tensor to_channels_last(const Tensor& x);
struct Conv2dOptions {
  Shape stride = {1, 1}, padding = {0, 0}, dilation = {1, 1};
  std::int64_t groups = 1;
  Act act = Act::none;  // none or relu, fused
};
/// x (N, C, H, W), weight (O, C/groups, R, S), bias (O) or undefined -> (N, O, P, Q).
Tensor conv2d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
              const Conv2dOptions& options = {});
struct Pool2dOptions {
  Shape kernel = {2, 2};
  Shape stride = {};  // the kernel's size when empty
  Shape padding = {0, 0};
  bool count_include_pad = true;
};
/// x (N, C, H, W) -> (N, C, P, Q).
Tensor max_pool2d(const Tensor& x, const Pool2dOptions& options = {});
Tensor avg_pool2d(const Tensor& x, const Pool2dOptions& options = {});
/// x (N, C, H, W) -> (N, C, P, Q) for size {P, Q}: output i is of inputs floor(i H / P) up to
/// ceil((i + 1) H / P), and columns likewise.
Tensor adaptive_max_pool2d(const Tensor& x, const Shape& size);
Tensor adaptive_avg_pool2d(const Tensor& x, const Shape& size);

}  // namespace mixtape
