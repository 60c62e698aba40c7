// Cross-entropy: the forward reads the logits once, the backward reads them once and writes their
// gradient once.
//
// Forward: maximum and sum of exponentials in one pass (online_softmax.cuh), a group of lanes a row
// up to 1024 classes, else a block a row; rows need not be aligned. A second kernel of one block
// adds the row losses, in double and in a fixed order: deterministic, no host synchronisation.
// Backward: p = exp(x - lse) with the saved log-sum-exp, so that each element stands alone; logits
// and dlogits may be the same memory. f64 and mixed dtypes take plain kernels.
#include <algorithm>

#include "kernels/cuda/device_error.cuh"
#include "kernels/cuda/online_softmax.cuh"
#include "kernels/cuda/rows.cuh"
#include "kernels/loss.h"

namespace mixtape::kernels::cuda {
namespace {

constexpr int kForwardThreads = 256;  // of a block that reads a long row, at most

/// Targets and what turns them into losses.
struct Labels {
  const std::int64_t* target;  // (N)
  std::int64_t classes, ignore_index;
  double smoothing;
  ErrorTarget error;

  /// The class of a row, or -1 for an ignored one; a bad label is ignored and, with `report`,
  /// reported.
  __device__ __forceinline__ std::int64_t label(std::int64_t row, bool report) const {
    const std::int64_t t = target[row];
    if (t == ignore_index) return -1;
    if (t >= 0 && t < classes) return t;
    if (report) report_error(error, t, classes);
    return -1;
  }
};

/// The class of a row and its logit: asked for early, so that they arrive while the row is read.
/// Class -1 for an ignored row and for threads other than the `one` that wants it.
template <class T>
struct Picked {
  std::int64_t label = -1;
  T logit = T(0.0f);

  __device__ __forceinline__ Picked(const Labels& labels, const T* logits, std::int64_t row,
                                    bool one) {
    if (one) label = labels.label(row, true);
    if (label >= 0) logit = logits[label];
  }
};

/// Loss of one row with log-sum-exp max + log(sum), the logit of its class and the sum of its
/// logits (used with smoothing only).
template <class C>
__device__ __forceinline__ C row_loss(C max, C log_sum, C picked, C total, const Labels& labels) {
  const C s = static_cast<C>(labels.smoothing);
  const C loss = (C(1) - s) * (log_sum + (max - picked));
  if (s == C(0)) return loss;
  return loss + s * (log_sum + (max - total / static_cast<C>(labels.classes)));
}

template <class T, bool kVector>
__global__ void __launch_bounds__(kGroupThreads)
    cross_entropy_forward_warp_kernel(float* loss, float* lse, const T* __restrict__ logits,
                                      Labels labels, std::int64_t rows, int units, int group) {
  constexpr int kWidth = kUnitWidth<T, kVector>, kAtOnce = kVector ? 2 : 4;
  const int lane = threadIdx.x & (group - 1);
  const std::int64_t row =
      static_cast<std::int64_t>(blockIdx.x) * (kGroupThreads / group) + threadIdx.x / group;
  const T* const x = logits + row * (static_cast<std::int64_t>(units) * kWidth);
  const Picked<T> picked(labels, x, row, lane == 0 && row < rows);
  OnlineSum online;
  float total = 0;
  for (int first = lane; row < rows && first < units; first += kAtOnce * group) {
    Unit<T, kVector> unit[kAtOnce];
    float v[kAtOnce * kWidth];
#pragma unroll
    for (int b = 0; b < kAtOnce; ++b)
      if (first + b * group < units) unit[b] = read_unit<T, kVector>(x, first + b * group);
#pragma unroll
    for (int b = 0; b < kAtOnce; ++b) {
      const bool active = first + b * group < units;
      float part[kWidth] = {};
      if (active) unpack<T>(unit[b], part);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        total += part[k];
        v[b * kWidth + k] = active ? part[k] : -INFINITY;
      }
    }
    online.add<T>(v);
  }
  online = online.group_total(group);
  if (labels.smoothing != 0) total = warp_reduce(total, Sum{}, group);
  if (row >= rows || lane != 0) return;
  const float log_sum = logf(online.sum);
  lse[row] = online.max + log_sum;
  loss[row] = picked.label < 0
                  ? 0.0f
                  : row_loss(online.max, log_sum, static_cast<float>(picked.logit), total, labels);
}

/// Each thread has its next batch of vectors under way while it works on one.
template <class T>
__global__ void __launch_bounds__(kForwardThreads, 3)
    cross_entropy_forward_block_kernel(float* loss, float* lse, const T* __restrict__ logits,
                                       Labels labels, int classes) {
  constexpr int kWidth = kUnitWidth<T, true>;
  const std::int64_t row = blockIdx.x;
  const T* const x = logits + row * classes;
  const RowParts parts = split_row(x, classes);
  const T* const body = x + parts.head;
  const bool smooth = labels.smoothing != 0;
  const int step = kBatch * static_cast<int>(blockDim.x);
  uint4 next[kBatch];
  load_batch(next, body, threadIdx.x, parts.units);
  const Picked<T> picked(labels, x, row, threadIdx.x == 0);
  OnlineSum online;
  float total = 0;
  const int edge = parts.edge_column(threadIdx.x);
  if (edge >= 0) {
    const float v[1] = {static_cast<float>(x[edge])};
    online.add<T>(v);
    total = v[0];
  }
  for (int first = threadIdx.x; first < parts.units; first += step) {
    uint4 unit[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) unit[b] = next[b];
    load_batch(next, body, first + step, parts.units);
    float v[kBatch * kWidth];
    if (smooth) {
      unpack_batch<T>(unit, v, first, parts.units, 0.0f);
#pragma unroll
      for (int k = 0; k < kBatch * kWidth; ++k) total += v[k];
    }
    unpack_batch<T>(unit, v, first, parts.units, -INFINITY);
    online.add<T>(v);
  }
  online = online.block_total();
  if (smooth) total = block_sum(total);
  if (threadIdx.x != 0) return;
  const float log_sum = logf(online.sum);
  lse[row] = online.max + log_sum;
  loss[row] = picked.label < 0
                  ? 0.0f
                  : row_loss(online.max, log_sum, static_cast<float>(picked.logit), total, labels);
}

template <class C>
__global__ void cross_entropy_forward_any_dtype_kernel(AnyVector loss, AnyVector lse,
                                                       AnyRows logits, Labels labels,
                                                       std::int64_t rows) {
  const std::int64_t classes = labels.classes;
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    C max = -INFINITY, sum = 0, total = 0;
    for (std::int64_t c = threadIdx.x; c < classes; c += blockDim.x) {
      const C v = logits.load<C>(row, c);
      max = fmax(max, v);
      total += v;
    }
    max = finite_max(block_reduce(max, C(-INFINITY), Max{}));
    total = block_sum(total);
    for (std::int64_t c = threadIdx.x; c < classes; c += blockDim.x)
      sum += exp_of(logits.load<C>(row, c) - max);
    sum = block_sum(sum);
    if (threadIdx.x != 0) continue;
    const C log_sum = log_of(sum);
    lse.store(row, max + log_sum);
    const std::int64_t t = labels.label(row, true);
    loss.store(row, t < 0 ? C(0) : row_loss(max, log_sum, logits.load<C>(row, t), total, labels));
  }
}

/// count = rows with a label; loss = sum of the row losses, over count if `mean`. One block.
__global__ void __launch_bounds__(1024)
    cross_entropy_reduce_kernel(float* count, AnyVector loss, AnyVector losses, Labels labels,
                                std::int64_t rows, bool mean) {
  constexpr int kAtOnce = 4;
  double sum = 0;
  long long labelled = 0;
  for (std::int64_t first = threadIdx.x; first < rows; first += kAtOnce * blockDim.x) {
    double value[kAtOnce];
    std::int64_t target[kAtOnce];
#pragma unroll
    for (int b = 0; b < kAtOnce; ++b) {
      const std::int64_t row = first + b * blockDim.x;
      value[b] = row < rows ? losses.load<double>(row) : 0;
      target[b] = row < rows ? labels.target[row] : labels.ignore_index;
    }
#pragma unroll
    for (int b = 0; b < kAtOnce; ++b) {
      sum += value[b];
      labelled += target[b] != labels.ignore_index && target[b] >= 0 && target[b] < labels.classes;
    }
  }
  sum = block_sum(sum);
  labelled = block_sum(labelled);
  if (threadIdx.x != 0) return;
  if (count != nullptr) *count = static_cast<float>(labelled);
  if (loss) loss.store(0, mean ? sum / static_cast<double>(labelled) : sum);
}

// ---- backward ------------------------------------------------------------------------------

/// Gradient of the row losses, over the count where there is one.
struct RowGradient {
  const void* dy;
  Dtype dtype;
  std::int64_t stride;  // 0: one element for all rows
  const float* count;   // may be null

  template <class C>
  __device__ __forceinline__ C load(std::int64_t row) const {
    const C g = load_as<C>(dy, dtype, row * stride);
    return count != nullptr ? g / static_cast<C>(*count) : g;
  }
};

/// What one row's gradient needs: dx = (exp(x - lse) - uniform) * scale, less on_target at the
/// label. An ignored row has label -1 and gradient 0.
struct RowScale {
  float lse, uniform, scale, on_target;
  int label;

  __device__ __forceinline__ RowScale(const Labels& labels, const RowGradient& gradient,
                                      const float* lse_of_rows, std::int64_t row, bool report)
      : label(static_cast<int>(labels.label(row, report))) {
    const float s = static_cast<float>(labels.smoothing);
    lse = lse_of_rows[row];
    scale = label < 0 ? 0.0f : gradient.load<float>(row);
    uniform = s / static_cast<float>(labels.classes);
    on_target = (1.0f - s) * scale;
  }
  /// Gradients of the logits v of columns first, first + 1, ...
  template <class T, int N>
  __device__ __forceinline__ void apply(float (&v)[N], int first) const {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      v[k] = label < 0 ? 0.0f : (exp_for<T>(v[k] - lse) - uniform) * scale;
      if (first + k == label) v[k] -= on_target;
    }
  }
};

template <class T, bool kVector>
__global__ void __launch_bounds__(kGroupThreads)
    cross_entropy_backward_warp_kernel(T* dlogits, const T* logits, const float* lse, Labels labels,
                                       RowGradient gradient, std::int64_t rows, int units,
                                       int group) {
  constexpr int kWidth = kUnitWidth<T, kVector>;
  const int lane = threadIdx.x & (group - 1);
  const std::int64_t row =
      static_cast<std::int64_t>(blockIdx.x) * (kGroupThreads / group) + threadIdx.x / group;
  if (row >= rows) return;
  const std::int64_t base = row * (static_cast<std::int64_t>(units) * kWidth);
  const RowScale scale(labels, gradient, lse, row, lane == 0);
#pragma unroll 4
  for (int u = lane; u < units; u += group) {
    float v[kWidth];
    unpack<T>(load_unit<T, kVector>(logits + base, u), v);
    scale.apply<T>(v, u * kWidth);
    store_unit<T, kVector>(dlogits + base, u, pack<T>(v));
  }
}

/// One row a block; both pointers are equal modulo 16.
template <class T>
__global__ void __launch_bounds__(512)
    cross_entropy_backward_block_kernel(T* dlogits, const T* logits, const float* lse,
                                        Labels labels, RowGradient gradient, int classes) {
  constexpr int kWidth = kUnitWidth<T, true>;
  const std::int64_t row = blockIdx.x, base = row * classes;
  const RowParts parts = split_row(logits + base, classes);
  const T* const body = logits + base + parts.head;
  const RowScale scale(labels, gradient, lse, row, threadIdx.x == 0);
  const int edge = parts.edge_column(threadIdx.x);
  if (edge >= 0) {
    float v[1] = {static_cast<float>(logits[base + edge])};
    scale.apply<T>(v, edge);
    dlogits[base + edge] = T(v[0]);
  }
  for (int first = threadIdx.x; first < parts.units; first += kBatch * blockDim.x) {
    uint4 unit[kBatch];
    load_batch(unit, body, first, parts.units);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int u = first + b * static_cast<int>(blockDim.x);
      if (u >= parts.units) continue;
      float v[kWidth];
      unpack<T>(unit[b], v);
      scale.apply<T>(v, parts.head + u * kWidth);
      store_unit<T, true>(dlogits + base + parts.head, u, pack<T>(v));
    }
  }
}

template <class C>
__global__ void cross_entropy_backward_any_dtype_kernel(AnyRows dlogits, AnyRows logits,
                                                        AnyVector lse, Labels labels,
                                                        RowGradient gradient, std::int64_t rows) {
  const C s = static_cast<C>(labels.smoothing);
  const C uniform = s / static_cast<C>(labels.classes);
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const std::int64_t label = labels.label(row, threadIdx.x == 0);
    const C shift = lse.load<C>(row), scale = label < 0 ? C(0) : gradient.load<C>(row);
    for (std::int64_t c = threadIdx.x; c < labels.classes; c += blockDim.x) {
      C d = (exp_of(logits.load<C>(row, c) - shift) - uniform) * scale;
      if (c == label) d -= (C(1) - s) * scale;
      dlogits.store(row, c, label < 0 ? C(0) : d);
    }
  }
}

// ---- host ----------------------------------------------------------------------------------

Labels make_labels(const Stream& stream, const View& logits, const View& target,
                   std::int64_t ignore_index, float smoothing) {
  check_rows("cross_entropy", "logits", logits, row_shape("cross_entropy", logits));
  MT_CHECK(target.dtype == Dtype::i64, "cross_entropy: expected int64 targets, got ", target.dtype);
  check_vector("cross_entropy", "target", target, logits.size(0));
  return {target.ptr<std::int64_t>(), logits.size(1), ignore_index, smoothing,
          error_target(stream, "cross_entropy")};
}

/// Threads of a block that streams a long row.
template <class T>
unsigned stream_threads(std::int64_t columns, int most) {
  const std::int64_t threads = ceil_div<std::int64_t>(columns, kPerVector<T> * kBatch * kWarp);
  return static_cast<unsigned>(std::clamp<std::int64_t>(threads * kWarp, 2 * kWarp, most));
}

template <class T>
void launch_forward(cudaStream_t queue, const CrossEntropyForward& args, const Labels& labels,
                    RowShape shape) {
  float* const loss = args.row_loss.ptr<float>();
  float* const lse = args.lse.ptr<float>();
  const T* const logits = args.logits.ptr<T>();
  if (shape.columns > kWarpColumns)
    return launch(cross_entropy_forward_block_kernel<T>, blocks_for(shape.rows, 1),
                  stream_threads<T>(shape.columns, kForwardThreads), 0, queue, loss, lse, logits,
                  labels, static_cast<int>(shape.columns));
  const auto run = [&]<bool kVector>(std::bool_constant<kVector>) {
    const int units = static_cast<int>(shape.columns) / kUnitWidth<T, kVector>;
    const int group = group_size(units);
    launch(cross_entropy_forward_warp_kernel<T, kVector>,
           blocks_for(shape.rows, kGroupThreads / group), kGroupThreads, 0, queue, loss, lse,
           logits, labels, shape.rows, units, group);
  };
  if (aligned(logits, 16) && shape.columns % kPerVector<T> == 0)
    run(std::true_type{});
  else
    run(std::false_type{});
}

template <class T>
void launch_backward(cudaStream_t queue, const CrossEntropyBackward& args, const Labels& labels,
                     const RowGradient& gradient, RowShape shape) {
  T* const dlogits = args.dlogits.ptr<T>();
  const T* const logits = args.logits.ptr<T>();
  const float* const lse = args.lse.ptr<float>();
  if (shape.columns > kWarpColumns)
    return launch(cross_entropy_backward_block_kernel<T>, blocks_for(shape.rows, 1),
                  stream_threads<T>(shape.columns, 512), 0, queue, dlogits, logits, lse, labels,
                  gradient, static_cast<int>(shape.columns));
  const auto run = [&]<bool kVector>(std::bool_constant<kVector>) {
    const int units = static_cast<int>(shape.columns) / kUnitWidth<T, kVector>;
    const int group = group_size(units);
    launch(cross_entropy_backward_warp_kernel<T, kVector>,
           blocks_for(shape.rows, kGroupThreads / group), kGroupThreads, 0, queue, dlogits, logits,
           lse, labels, gradient, shape.rows, units, group);
  };
  if (aligned(logits, 16) && aligned(dlogits, 16) && shape.columns % kPerVector<T> == 0)
    run(std::true_type{});
  else
    run(std::false_type{});
}

}  // namespace

void cross_entropy_forward(const Stream& stream, const CrossEntropyForward& args) {
  const char* const op = "cross_entropy";
  const CudaDeviceGuard guard(stream.device());
  const Labels labels =
      make_labels(stream, args.logits, args.target, args.ignore_index, args.label_smoothing);
  const RowShape shape = row_shape(op, args.logits);
  const Dtype compute = compute_dtype(args.logits.dtype);
  MT_CHECK(args.row_loss.dtype == compute && args.lse.dtype == compute, op,
           ": expected row losses and lse of dtype ", compute, ", got ", args.row_loss.dtype,
           " and ", args.lse.dtype);
  check_vector(op, "row_loss", args.row_loss, shape.rows);
  check_vector(op, "lse", args.lse, shape.rows);
  const cudaStream_t queue = native_stream(stream);
  if (shape.rows > 0 &&
      !(all_contiguous(args.logits) && fits_row_kernels(shape, args.logits, args.logits) &&
        dispatch_row_type(args.logits.dtype, [&](auto tag) {
          launch_forward<typename decltype(tag)::type>(queue, args, labels, shape);
        }))) {
    const RowGrid grid = any_dtype_grid(shape);
    const auto run = [&](auto* kernel) {
      launch(kernel, grid.blocks, grid.threads, 0, queue, AnyVector(args.row_loss),
             AnyVector(args.lse), AnyRows(args.logits), labels, shape.rows);
    };
    compute == Dtype::f64 ? run(cross_entropy_forward_any_dtype_kernel<double>)
                          : run(cross_entropy_forward_any_dtype_kernel<float>);
  }
  if (!args.count && !args.loss) return;
  const unsigned threads = static_cast<unsigned>(
      std::clamp<std::int64_t>(ceil_div<std::int64_t>(shape.rows, kWarp) * kWarp, kWarp, 1024));
  launch(cross_entropy_reduce_kernel, 1u, threads, 0, queue,
         args.count ? args.count.ptr<float>() : nullptr, AnyVector(args.loss),
         AnyVector(args.row_loss), labels, shape.rows, args.mean);
}

void cross_entropy_backward(const Stream& stream, const CrossEntropyBackward& args) {
  const char* const op = "cross_entropy_backward";
  const CudaDeviceGuard guard(stream.device());
  const Labels labels =
      make_labels(stream, args.logits, args.target, args.ignore_index, args.label_smoothing);
  const RowShape shape = row_shape(op, args.logits);
  check_rows(op, "dlogits", args.dlogits, shape);
  check_vector(op, "lse", args.lse, shape.rows);
  MT_CHECK(args.lse.dtype == compute_dtype(args.logits.dtype), op, ": expected lse of dtype ",
           compute_dtype(args.logits.dtype), ", got ", args.lse.dtype);
  const std::int64_t gradients = args.dy.numel();
  MT_CHECK(gradients == 1 || (args.dy.dim() == 1 && gradients == shape.rows), op,
           ": expected dy with 1 or ", shape.rows, " elements, got ", args.dy.sizes);
  if (shape.rows == 0 || shape.columns == 0) return;
  const RowGradient gradient{args.dy.data, args.dy.dtype, gradients == 1 ? 0 : args.dy.stride(0),
                             args.count ? args.count.ptr<float>() : nullptr};
  const cudaStream_t queue = native_stream(stream);
  const bool typed =
      args.logits.dtype == args.dlogits.dtype && all_contiguous(args.logits, args.dlogits) &&
      fits_row_kernels(shape, args.logits, args.dlogits) &&
      dispatch_row_type(args.logits.dtype, [&](auto tag) {
        launch_backward<typename decltype(tag)::type>(queue, args, labels, gradient, shape);
      });
  if (typed) return;
  const RowGrid grid = any_dtype_grid(shape);
  const auto run = [&](auto* kernel) {
    launch(kernel, grid.blocks, grid.threads, 0, queue, AnyRows(args.dlogits), AnyRows(args.logits),
           AnyVector(args.lse), labels, gradient, shape.rows);
  };
  args.logits.dtype == Dtype::f64 ? run(cross_entropy_backward_any_dtype_kernel<double>)
                                  : run(cross_entropy_backward_any_dtype_kernel<float>);
}

}  // namespace mixtape::kernels::cuda
