// Batch normalisation, forward: partial moments per channel and chunk, one small kernel that merges
// them and moves the running statistics, then a pass that normalises, adds the residual and applies
// the ReLU. x is read twice in training, once else.
//
// A thread sums deviations from the first value that it sees of a channel, so that a large mean
// does not cancel; partial moments are merged in double.
#include "kernels/cuda/batch_norm.cuh"

namespace mixtape::kernels::cuda {
namespace {

template <class T, bool kLast, int kWidth>
__global__ void __launch_bounds__(kChannelThreads)
    batch_norm_moments_kernel(ChannelGrid grid, const T* x, Moments* partials) {
  using C = compute_t<T>;
  const ChannelWalk<kLast, kWidth> walk(grid);
  C origin[kWidth] = {}, sum[kWidth] = {}, squares[kWidth] = {};
  if (walk.count > 0) load_channels<T, kWidth>(x + walk.offset(0), origin);
  const T* const operands[1] = {x};
  for_each_vector<T>(walk, operands, [&](std::int64_t, const C(&v)[1][kWidth]) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const C d = v[0][k] - origin[k];
      sum[k] += d;
      squares[k] += d * d;
    }
  });
  Moments mine[kWidth];
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    const double count = static_cast<double>(walk.count), s = static_cast<double>(sum[k]);
    if (walk.count > 0)
      mine[k] = {count, static_cast<double>(origin[k]) + s / count,
                 static_cast<double>(squares[k]) - s * (s / count)};
  }
  write_partials(walk, mine, MergeMoments{}, partials);
}

template <class C>
struct Finish {
  C* statistics;  // (3, C)
  ChannelVector running_mean, running_var;
  std::int64_t* batches;
  std::int64_t channels;
  int chunks;
  double momentum, eps;
};

__global__ void count_batch_kernel(std::int64_t* batches) { ++*batches; }

template <class C>
__global__ void batch_norm_statistics_kernel(Finish<C> f, const Moments* partials) {
  const Moments m = merge_chunks(partials, f.channels, f.chunks, MergeMoments{});
  const std::int64_t c = std::int64_t{blockIdx.x} * 32 + threadIdx.x;
  if (threadIdx.y != 0 || c >= f.channels) return;
  const double variance = m.squares / m.count;
  const C mean = static_cast<C>(m.mean);
  f.statistics[c] = mean;
  f.statistics[f.channels + c] = static_cast<C>(m.mean - static_cast<double>(mean));
  f.statistics[2 * f.channels + c] =
      static_cast<C>(1 / sqrt((variance < 0 ? 0 : variance) + f.eps));
  const double momentum = f.momentum >= 0 ? f.momentum : 1 / static_cast<double>(*f.batches);
  const auto move = [&](const ChannelVector& running, double value) {
    if (running.data == nullptr) return;
    const double old = running.at<double>(c, 0);
    store_as(running.data, running.dtype, c, (1 - momentum) * old + momentum * value);
  };
  move(f.running_mean, m.mean);
  move(f.running_var, m.squares / (m.count - 1));
}

template <class T>
struct Normalise {
  T* y;
  const T *x, *residual;  // residual may be null
  ChannelStatistics<compute_t<T>> statistics;
  ChannelVector weight, bias;
  bool relu;
};

template <class T, bool kLast, int kWidth>
__global__ void __launch_bounds__(kChannelThreads)
    batch_norm_forward_kernel(ChannelGrid grid, Normalise<T> p) {
  using C = compute_t<T>;
  const ChannelWalk<kLast, kWidth> walk(grid);
  if (walk.count == 0) return;
  C mean[kWidth], correction[kWidth], scale[kWidth], shift[kWidth];
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    const int c = walk.channel_of(k);
    C rstd;
    p.statistics.get(c, mean[k], correction[k], rstd);
    scale[k] = rstd * p.weight.template at<C>(c, C(1));
    shift[k] = p.bias.template at<C>(c, C(0));
  }
  const T* const operands[2] = {p.x, p.residual};
  for_each_vector<T>(walk, operands, [&](std::int64_t offset, const C(&v)[2][kWidth]) {
    C y[kWidth];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      y[k] = ((v[0][k] - mean[k]) - correction[k]) * scale[k] + shift[k] + v[1][k];
      if (p.relu && y[k] <= C(0)) y[k] = C(0);  // NaN stays NaN
    }
    store_channels<T, kWidth>(p.y + offset, y);
  });
}

template <class T, bool kLast, int kWidth>
void run(const Stream& stream, const BatchNormForward& args, const ChannelLayout& l,
         Workspace workspace) {
  using C = compute_t<T>;
  const ChannelGrid grid(l, kWidth);
  const dim3 blocks(blocks_for(grid.tiles, 1), static_cast<unsigned>(grid.chunks));
  const cudaStream_t queue = native_stream(stream);
  const C* const statistics = args.training ? args.statistics.ptr<C>() : nullptr;
  if (args.training) {
    auto* const partials = static_cast<Moments*>(workspace.data);
    launch(batch_norm_moments_kernel<T, kLast, kWidth>, blocks, kChannelThreads, 0, queue, grid,
           static_cast<const T*>(args.x.data), partials);
    if (args.batches) launch(count_batch_kernel, 1, 1, 0, queue, args.batches.ptr<std::int64_t>());
    const Finish<C> finish{args.statistics.ptr<C>(),
                           ChannelVector(args.running_mean),
                           ChannelVector(args.running_var),
                           args.batches ? args.batches.ptr<std::int64_t>() : nullptr,
                           l.c,
                           grid.chunks,
                           args.momentum,
                           args.eps};
    launch(batch_norm_statistics_kernel<C>, blocks_for(l.c, 32), dim3(32, kMergeGroups), 0, queue,
           finish, static_cast<const Moments*>(partials));
  }
  const Normalise<T> normalise{static_cast<T*>(args.y.data),
                               static_cast<const T*>(args.x.data),
                               args.residual ? static_cast<const T*>(args.residual.data) : nullptr,
                               {statistics, ChannelVector(args.running_mean),
                                ChannelVector(args.running_var), l.c, args.eps},
                               ChannelVector(args.weight),
                               ChannelVector(args.bias),
                               args.relu};
  launch(batch_norm_forward_kernel<T, kLast, kWidth>, blocks, kChannelThreads, 0, queue, grid,
         normalise);
}

}  // namespace

std::size_t batch_norm_workspace_bytes(const View& x) {
  const ChannelLayout l = channel_layout("batch_norm", x);
  const int width = x.dtype == Dtype::f64 ? 1 : 16 / static_cast<int>(size_of(x.dtype));
  const int chunks = std::max(ChannelGrid(l, 1).chunks,
                              fits_width(l, x, width) ? ChannelGrid(l, width).chunks : 0);
  // Partial results of a chunk, and the two numbers that backward makes of them.
  return (static_cast<std::size_t>(chunks) * sizeof(Moments) + 2 * sizeof(double)) *
         static_cast<std::size_t>(l.c);
}

void batch_norm_forward(const Stream& stream, const BatchNormForward& args, Workspace workspace) {
  const ChannelLayout l = check_batch_norm(args, workspace);
  if (args.x.numel() == 0) return;
  const CudaDeviceGuard device(stream.device());
  const int width = 16 / static_cast<int>(size_of(args.x.dtype));
  const bool vectors = fits_width(l, args.x, width) && fits_width(l, args.y, width) &&
                       fits_width(l, args.residual, width);
  dispatch_channels("batch_norm_forward", args.x.dtype, l.channels_last, vectors,
                    [&]<class T, bool kLast, int kWidth>() {
                      run<T, kLast, kWidth>(stream, args, l, workspace);
                    });
}

}  // namespace mixtape::kernels::cuda
