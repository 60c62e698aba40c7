// Batch normalisation, backward: partial sums of g and g (x - mean) per channel and chunk, one
// small kernel that adds them up and gives the gradients of weight and bias, then a pass for dx.
// The formulas are those of kernels/cpu/batch_norm_backward.cpp.
//
// The gradient of the residual, g itself, is written with the first pass, and the second reads it
// instead of dy and y.
#include "kernels/cuda/batch_norm.cuh"

namespace mixtape::kernels::cuda {
namespace {

template <class T>
struct Operands {
  const T *dy, *x, *y;  // y null without a ReLU
  T* dresidual;         // may be null
  ChannelStatistics<compute_t<T>> statistics;
};

template <class T, bool kLast, int kWidth>
__global__ void __launch_bounds__(kChannelThreads)
    batch_norm_backward_sums_kernel(ChannelGrid grid, Operands<T> p, SumPair* partials) {
  using C = compute_t<T>;
  const ChannelWalk<kLast, kWidth> walk(grid);
  C mean[kWidth] = {}, correction[kWidth] = {}, sum_g[kWidth] = {}, sum_gd[kWidth] = {}, rstd;
  if (walk.count > 0) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k)
      p.statistics.get(walk.channel_of(k), mean[k], correction[k], rstd);
  }
  const T* const operands[3] = {p.dy, p.x, p.y};
  for_each_vector<T>(walk, operands, [&](std::int64_t offset, const C(&v)[3][kWidth]) {
    C g[kWidth];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      g[k] = p.y != nullptr && v[2][k] <= C(0) ? C(0) : v[0][k];
      sum_g[k] += g[k];
      sum_gd[k] += g[k] * ((v[1][k] - mean[k]) - correction[k]);
    }
    if (p.dresidual != nullptr) store_channels<T, kWidth>(p.dresidual + offset, g);
  });
  SumPair mine[kWidth];
#pragma unroll
  for (int k = 0; k < kWidth; ++k)
    mine[k] = {static_cast<double>(sum_g[k]), static_cast<double>(sum_gd[k])};
  write_partials(walk, mine, AddPairs{}, partials);
}

template <class C>
struct Finish {
  ChannelStatistics<C> statistics;
  ChannelVector dweight, dbias;
  float beta_weight, beta_bias;
  C* numbers;  // (2, C): mean of g, and slope
  std::int64_t channels;
  int chunks;
  double count;  // values of a channel
};

template <class C>
__global__ void batch_norm_gradients_kernel(Finish<C> f, const SumPair* partials) {
  const SumPair sum = merge_chunks(partials, f.channels, f.chunks, AddPairs{});
  const std::int64_t c = std::int64_t{blockIdx.x} * 32 + threadIdx.x;
  if (threadIdx.y != 0 || c >= f.channels) return;
  C mean, correction, rounded = 0;
  if (f.count > 0) f.statistics.get(c, mean, correction, rounded);
  const double rstd = static_cast<double>(rounded);
  f.dweight.template accumulate<C>(c, sum.b * rstd, f.beta_weight);
  f.dbias.template accumulate<C>(c, sum.a, f.beta_bias);
  const bool training = f.statistics.statistics != nullptr && f.count > 0;
  f.numbers[c] = training ? static_cast<C>(sum.a / f.count) : C(0);
  f.numbers[f.channels + c] = training ? static_cast<C>(sum.b / f.count * rstd * rstd) : C(0);
}

template <class T>
struct InputGradient {
  T* dx;
  const T *dy, *x, *y;
  const compute_t<T>* numbers;  // null outside of training
  ChannelStatistics<compute_t<T>> statistics;
  ChannelVector weight;
  T* dresidual;  // null unless it is still to be written
};

template <class T, bool kLast, int kWidth>
__global__ void __launch_bounds__(kChannelThreads)
    batch_norm_backward_kernel(ChannelGrid grid, InputGradient<T> p) {
  using C = compute_t<T>;
  const ChannelWalk<kLast, kWidth> walk(grid);
  if (walk.count == 0) return;
  C mean[kWidth], correction[kWidth], scale[kWidth], mean_g[kWidth], slope[kWidth];
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    const int c = walk.channel_of(k);
    C rstd;
    p.statistics.get(c, mean[k], correction[k], rstd);
    scale[k] = rstd * p.weight.template at<C>(c, C(1));
    mean_g[k] = p.numbers != nullptr ? p.numbers[c] : C(0);
    slope[k] = p.numbers != nullptr ? p.numbers[grid.channels + c] : C(0);
  }
  const T* const operands[3] = {p.dy, p.numbers != nullptr ? p.x : nullptr, p.y};
  for_each_vector<T>(walk, operands, [&](std::int64_t offset, const C(&v)[3][kWidth]) {
    C g[kWidth], dx[kWidth];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      g[k] = p.y != nullptr && v[2][k] <= C(0) ? C(0) : v[0][k];
      const C d = (v[1][k] - mean[k]) - correction[k];
      dx[k] = (p.numbers != nullptr ? g[k] - mean_g[k] - d * slope[k] : g[k]) * scale[k];
    }
    if (p.dresidual != nullptr) store_channels<T, kWidth>(p.dresidual + offset, g);
    if (p.dx != nullptr) store_channels<T, kWidth>(p.dx + offset, dx);
  });
}

template <class T, bool kLast, int kWidth>
void run(const Stream& stream, const BatchNormBackward& args, const ChannelLayout& l,
         Workspace workspace) {
  using C = compute_t<T>;
  const ChannelGrid grid(l, kWidth);
  const dim3 blocks(blocks_for(std::max<std::int64_t>(1, grid.tiles), 1),
                    static_cast<unsigned>(grid.chunks));
  const cudaStream_t queue = native_stream(stream);
  const bool training = !args.running_mean;
  const auto pointer = [](const View& v) { return v ? static_cast<T*>(v.data) : nullptr; };
  const ChannelStatistics<C> statistics{training ? args.statistics.ptr<C>() : nullptr,
                                        ChannelVector(args.running_mean),
                                        ChannelVector(args.running_var), l.c, args.eps};
  auto* const partials = static_cast<SumPair*>(workspace.data);
  C* const numbers = reinterpret_cast<C*>(partials + grid.chunks * l.c);
  const bool sums = (training && args.dx) || args.dweight || args.dbias;
  InputGradient<T> p{pointer(args.dx),
                     pointer(args.dy),
                     pointer(args.x),
                     pointer(args.y),
                     training ? numbers : nullptr,
                     statistics,
                     ChannelVector(args.weight),
                     pointer(args.dresidual)};
  if (sums) {
    launch(batch_norm_backward_sums_kernel<T, kLast, kWidth>, blocks, kChannelThreads, 0, queue,
           grid, Operands<T>{p.dy, p.x, p.y, p.dresidual, statistics}, partials);
    const Finish<C> finish{statistics,
                           ChannelVector(args.dweight),
                           ChannelVector(args.dbias),
                           args.beta_weight,
                           args.beta_bias,
                           numbers,
                           l.c,
                           grid.chunks,
                           static_cast<double>(l.values())};
    launch(batch_norm_gradients_kernel<C>, blocks_for(l.c, 32), dim3(32, kMergeGroups), 0, queue,
           finish, static_cast<const SumPair*>(partials));
    if (p.dresidual != nullptr) {  // it is written, and is what dy and y come down to
      p.dy = p.dresidual;
      p.y = nullptr;
      p.dresidual = nullptr;
    }
  }
  if (args.x.numel() > 0 && (p.dx != nullptr || p.dresidual != nullptr))
    launch(batch_norm_backward_kernel<T, kLast, kWidth>, blocks, kChannelThreads, 0, queue, grid,
           p);
}

}  // namespace

void batch_norm_backward(const Stream& stream, const BatchNormBackward& args, Workspace workspace) {
  const ChannelLayout l = check_batch_norm(args, workspace);
  if (l.c == 0) return;
  const CudaDeviceGuard device(stream.device());
  const int width = 16 / static_cast<int>(size_of(args.x.dtype));
  bool vectors = true;
  for (const View& v : {args.x, args.dy, args.y, args.dx, args.dresidual})
    vectors = vectors && fits_width(l, v, width);
  dispatch_channels("batch_norm_backward", args.x.dtype, l.channels_last, vectors,
                    [&]<class T, bool kLast, int kWidth>() {
                      run<T, kLast, kWidth>(stream, args, l, workspace);
                    });
}

}  // namespace mixtape::kernels::cuda
