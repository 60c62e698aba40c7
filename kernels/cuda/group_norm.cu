// Group normalisation. One block works on one group of channels of one sample: it finds the moments
// in a first pass and normalises in a second, whose reads mostly come from the cache. Elements are
// taken in memory order in either layout.
//
// Backward leaves the sums of dy and dy * normalised per sample and channel in the workspace (a
// block per sample and channel, fixed order), one kernel makes dx of them, and column_sums adds
// them over samples for the gradients of weight and bias.
#include "kernels/group_norm.h"

#include "kernels/channels.h"
#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/channel_walk.cuh"
#include "kernels/cuda/column_sums.h"
#include "kernels/cuda/launch.cuh"

namespace mixtape::kernels::cuda {
namespace {

constexpr int kThreads = 512;

struct Groups {
  std::int64_t samples, channels, plane, groups, group_channels, size;  // size: of one group
  bool channels_last;
  FastDivide inner;  // group_channels (channels-last) or plane

  Groups(const ChannelLayout& l, std::int64_t g)
      : samples(l.n),
        channels(l.c),
        plane(l.s),
        groups(g),
        group_channels(l.c / g),
        size(l.c / g * l.s),
        channels_last(l.channels_last),
        inner(std::max<std::int64_t>(1, l.channels_last ? l.c / g : l.s)) {
    MT_CHECK(size < (std::int64_t{1} << 31),
             "group_norm: expected groups of fewer than 2^31 values, got ", size);
  }
  /// Element i of group g of sample n: its offset, and its channel.
  __device__ std::int64_t offset(std::int64_t n, std::int64_t g, std::int64_t i,
                                 std::int64_t& channel) const {
    std::uint32_t low = static_cast<std::uint32_t>(i);
    const std::int64_t high = inner.divide(low);
    const std::int64_t c = channels_last ? low : high, s = channels_last ? high : low;
    channel = g * group_channels + c;
    return n * channels * plane + (channels_last ? s * channels + channel : channel * plane + s);
  }
};

struct Vector {
  const void* data = nullptr;
  Dtype dtype = Dtype::f32;
  explicit Vector(const View& v) : data(v ? v.data : nullptr), dtype(v.dtype) {}
  template <class C>
  __device__ C at(std::int64_t c, C absent) const {
    return data != nullptr ? load_as<C>(data, dtype, c) : absent;
  }
};

/// x - mean in arithmetic type C, with what rounding the mean takes away.
template <class C>
struct CenteredBy {
  C mean, correction;
  __device__ explicit CenteredBy(double exact)
      : mean(static_cast<C>(exact)),
        correction(static_cast<C>(exact - static_cast<double>(mean))) {}
  __device__ C operator()(C x) const { return (x - mean) - correction; }
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    group_norm_forward_kernel(Groups s, T* y, const T* x, double* mean_out, compute_t<T>* rstd_out,
                              Vector weight, Vector bias, double eps) {
  using C = compute_t<T>;
  for (std::int64_t task = blockIdx.x; task < s.samples * s.groups; task += gridDim.x) {
    const std::int64_t n = task / s.groups, g = task % s.groups;
    std::int64_t channel;
    // Each thread sums deviations from its first value, so that a large mean does not cancel.
    C origin = 0, sum = 0, squares = 0, count = 0;
    if (threadIdx.x < s.size) origin = convert<C>(x[s.offset(n, g, threadIdx.x, channel)]);
    for (std::int64_t i = threadIdx.x; i < s.size; i += kThreads) {
      const C d = convert<C>(x[s.offset(n, g, i, channel)]) - origin;
      sum += d;
      squares += d * d;
      count += 1;
    }
    Moments mine;
    if (count > 0) {
      const double k = static_cast<double>(count), t = static_cast<double>(sum);
      mine = {k, static_cast<double>(origin) + t / k, static_cast<double>(squares) - t * (t / k)};
    }
    const Moments m = block_reduce(mine, Moments{}, MergeMoments{});
    const double variance = m.squares / m.count;
    const CenteredBy<C> center(m.mean);
    const C rstd = static_cast<C>(1 / sqrt((variance < 0 ? 0 : variance) + eps));
    if (threadIdx.x == 0) {
      mean_out[task] = m.mean;
      rstd_out[task] = rstd;
    }
    for (std::int64_t i = threadIdx.x; i < s.size; i += kThreads) {
      const std::int64_t at = s.offset(n, g, i, channel);
      y[at] = convert<T>(center(convert<C>(x[at])) * (rstd * weight.at<C>(channel, C(1))) +
                         bias.at<C>(channel, C(0)));
    }
  }
}

template <class T>
struct BackwardOperands {
  T* dx;
  const T *dy, *x;
  const double* mean;
  const compute_t<T>* rstd;
  Vector weight;
  compute_t<T>* sums;  // (2, N, C): dy, and dy * (x - mean) * rstd
};

/// A block per sample and channel.
template <class T>
__global__ void __launch_bounds__(kChannelThreads)
    group_norm_backward_sums_kernel(Groups s, BackwardOperands<T> p) {
  using C = compute_t<T>;
  const std::int64_t rows = s.samples * s.channels;
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const std::int64_t n = row / s.channels, c = row % s.channels;
    const std::int64_t task = n * s.groups + c / s.group_channels;
    const CenteredBy<C> center(p.mean[task]);
    const C rstd = p.rstd[task];
    const std::int64_t base = n * s.channels * s.plane + (s.channels_last ? c : c * s.plane);
    const std::int64_t step = s.channels_last ? s.channels : 1;
    SumPair mine;
    C dy_sum = 0, product = 0;
    for (std::int64_t i = threadIdx.x; i < s.plane; i += kChannelThreads) {
      const C dy = convert<C>(p.dy[base + i * step]);
      dy_sum += dy;
      product += dy * center(convert<C>(p.x[base + i * step]));
    }
    mine = {static_cast<double>(dy_sum), static_cast<double>(product)};
    const SumPair sum = block_reduce(mine, SumPair{}, AddPairs{});
    if (threadIdx.x == 0) {
      p.sums[row] = static_cast<C>(sum.a);
      p.sums[rows + row] = static_cast<C>(sum.b * static_cast<double>(rstd));
    }
  }
}

/// A block per group: dx = (dy * weight - mean_g - normalised * mean_gx) * rstd.
template <class T>
__global__ void __launch_bounds__(kThreads)
    group_norm_backward_kernel(Groups s, BackwardOperands<T> p) {
  using C = compute_t<T>;
  const std::int64_t rows = s.samples * s.channels;
  for (std::int64_t task = blockIdx.x; task < s.samples * s.groups; task += gridDim.x) {
    const std::int64_t n = task / s.groups, g = task % s.groups;
    SumPair mine;
    for (std::int64_t k = threadIdx.x; k < s.group_channels; k += kThreads) {
      const std::int64_t c = g * s.group_channels + k;
      const double weight = p.weight.template at<double>(c, 1);
      mine.a += weight * static_cast<double>(p.sums[n * s.channels + c]);
      mine.b += weight * static_cast<double>(p.sums[rows + n * s.channels + c]);
    }
    const SumPair sum = block_reduce(mine, SumPair{}, AddPairs{});
    const double count = static_cast<double>(s.size);
    const C mean_g = static_cast<C>(sum.a / count), mean_gx = static_cast<C>(sum.b / count);
    const CenteredBy<C> center(p.mean[task]);
    const C rstd = p.rstd[task];
    for (std::int64_t i = threadIdx.x; i < s.size; i += kThreads) {
      std::int64_t channel;
      const std::int64_t at = s.offset(n, g, i, channel);
      const C normalised = center(convert<C>(p.x[at])) * rstd;
      const C gradient = convert<C>(p.dy[at]) * p.weight.template at<C>(channel, C(1));
      p.dx[at] = convert<T>((gradient - mean_g - normalised * mean_gx) * rstd);
    }
  }
}

Groups check(const char* op, const View& x, std::initializer_list<View> images,
             std::initializer_list<View> vectors, std::int64_t groups) {
  const ChannelLayout l = channel_layout(op, x);
  MT_CHECK(groups >= 1 && l.c % groups == 0, op, ": expected channels divisible by ", groups,
           " groups, got ", x.sizes);
  check_like_x(op, x, images);
  check_channel_vectors(op, l.c, vectors);
  return {l, groups};
}

unsigned blocks_of(std::int64_t tasks) {
  return static_cast<unsigned>(std::clamp<std::int64_t>(tasks, 1, 65535));
}

}  // namespace

std::size_t group_norm_backward_workspace_bytes(const View& x) {
  return static_cast<std::size_t>(2 * x.size(0) * x.size(1)) * sizeof(double);
}

void group_norm_forward(const Stream& stream, const GroupNormForward& args) {
  const Groups s =
      check("group_norm_forward", args.x, {args.y}, {args.weight, args.bias}, args.groups);
  if (args.x.numel() == 0) return;
  const CudaDeviceGuard device(stream.device());
  dispatch_floating("group_norm_forward", args.x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = compute_t<T>;
    launch(group_norm_forward_kernel<T>, blocks_of(s.samples * s.groups), kThreads, 0,
           native_stream(stream), s, static_cast<T*>(args.y.data),
           static_cast<const T*>(args.x.data), args.mean.ptr<double>(), args.rstd.ptr<C>(),
           Vector(args.weight), Vector(args.bias), args.eps);
  });
}

void group_norm_backward(const Stream& stream, const GroupNormBackward& args, Workspace workspace) {
  const Groups s = check("group_norm_backward", args.x, {args.dy, args.dx},
                         {args.weight, args.dweight, args.dbias}, args.groups);
  const std::size_t bytes = group_norm_backward_workspace_bytes(args.x);
  MT_CHECK(workspace.bytes >= bytes, "group_norm_backward: expected a workspace of ", bytes,
           " bytes, got ", workspace.bytes);
  if (s.channels == 0) return;
  const CudaDeviceGuard device(stream.device());
  const cudaStream_t queue = native_stream(stream);
  dispatch_floating("group_norm_backward", args.x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = compute_t<T>;
    const BackwardOperands<T> p{args.dx ? static_cast<T*>(args.dx.data) : nullptr,
                                static_cast<const T*>(args.dy.data),
                                static_cast<const T*>(args.x.data),
                                args.mean.ptr<double>(),
                                args.rstd.ptr<C>(),
                                Vector(args.weight),
                                static_cast<C*>(workspace.data)};
    const std::int64_t rows = s.samples * s.channels;
    if (args.x.numel() > 0) {
      launch(group_norm_backward_sums_kernel<T>, blocks_of(rows), kChannelThreads, 0, queue, s, p);
      if (p.dx != nullptr)
        launch(group_norm_backward_kernel<T>, blocks_of(s.samples * s.groups), kThreads, 0, queue,
               s, p);
    }
    // Without values there are no samples' sums to add, only betas to apply.
    const std::int64_t samples = args.x.numel() > 0 ? s.samples : 0;
    const bool is_double = args.x.dtype == Dtype::f64;
    if (args.dbias) column_sums(stream, args.dbias, args.beta_bias, p.sums, is_double, samples);
    if (args.dweight)
      column_sums(stream, args.dweight, args.beta_weight, p.sums + rows, is_double, samples);
  });
}

}  // namespace mixtape::kernels::cuda
