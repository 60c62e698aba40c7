// Group normalisation on the CPU.
//
// A task is a group of channels of one sample: its values are brought together as (channels, S) in
// arithmetic type, which planar images are already. Gradients of weight and bias are summed per
// sample and channel first and over samples in order then: the same bits for any number of threads.
#include "kernels/group_norm.h"

#include "engine/thread_pool.h"
#include "kernels/channels.h"
#include "kernels/cpu/channel_norm.h"

namespace mixtape::kernels::cpu {
namespace {

struct Groups {
  ChannelLayout l;
  std::int64_t groups;
  std::int64_t channels() const { return l.c / groups; }  // of one group
  std::int64_t size() const { return channels() * l.s; }
  std::int64_t tasks() const { return l.n * groups; }
  /// Element offset of a task's first value.
  std::int64_t offset(std::int64_t task) const {
    const std::int64_t n = task / groups, g = task % groups;
    return n * l.c * l.s + g * channels() * (l.channels_last ? 1 : l.s);
  }
};

Groups check(const char* op, const View& x, std::initializer_list<View> images,
             std::initializer_list<View> vectors, std::int64_t groups) {
  const Groups g{channel_layout(op, x), groups};
  MT_CHECK(groups >= 1 && g.l.c % groups == 0, op, ": expected channels divisible by ", groups,
           " groups, got ", x.sizes);
  check_like_x(op, x, images);
  check_channel_vectors(op, g.l.c, vectors);
  return g;
}

/// A task's values as (channels, S): in place or brought into `buffer`.
template <class C>
const C* gather(const View& v, const Groups& g, std::int64_t task, C* buffer, C* row) {
  const std::int64_t offset = g.offset(task), channels = g.channels();
  if (!g.l.channels_last) {
    const void* const from = element_address(v.data, v.dtype, offset);
    if (v.dtype == dtype_of<C>) return static_cast<const C*>(from);
    load_elements(v.dtype, from, buffer, g.size());
    return buffer;
  }
  for (std::int64_t s = 0; s < g.l.s; ++s) {
    load_elements(v.dtype, element_address(v.data, v.dtype, offset + s * g.l.c), row, channels);
    for (std::int64_t c = 0; c < channels; ++c) buffer[c * g.l.s + s] = row[c];
  }
  return buffer;
}
template <class C>
void scatter(const View& v, const Groups& g, std::int64_t task, const C* values, C* row) {
  const std::int64_t offset = g.offset(task), channels = g.channels();
  if (!g.l.channels_last)
    return store_elements(v.dtype, element_address(v.data, v.dtype, offset), values, g.size());
  for (std::int64_t s = 0; s < g.l.s; ++s) {
    for (std::int64_t c = 0; c < channels; ++c) row[c] = values[c * g.l.s + s];
    store_elements(v.dtype, element_address(v.data, v.dtype, offset + s * g.l.c), row, channels);
  }
}

template <class C>
void forward(const GroupNormForward& args, const Groups& g) {
  using P = RowPacket<C>;
  parallel_for(0, g.tasks(), row_grain(g.size()), [&](std::int64_t begin, std::int64_t end) {
    ScratchFrame frame;
    C* const buffer = frame.take<C>(g.size());
    C* const out = frame.take<C>(g.size());
    C* const row = frame.take<C>(g.channels());
    for (std::int64_t task = begin; task < end; ++task) {
      const C* const x = gather(args.x, g, task, buffer, row);
      const Moments m = run_moments(x, g.size());
      const double rstd = rstd_of(m.variance(), args.eps);
      args.mean.ptr<double>()[task] = m.mean;
      args.rstd.ptr<C>()[task] = static_cast<C>(rstd);
      const auto mean = P::splat(static_cast<C>(m.mean));
      const auto rest = P::splat(static_cast<C>(m.mean - static_cast<double>(C(m.mean))));
      for (std::int64_t k = 0; k < g.channels(); ++k) {
        const std::int64_t c = task % g.groups * g.channels() + k;
        const auto scale = P::splat(static_cast<C>(rstd * read_one_or(args.weight, c, 1)));
        const auto shift = P::splat(static_cast<C>(read_one_or(args.bias, c, 0)));
        for_each_packet<C>(0, g.l.s, [&](auto i, int valid, auto) {
          const auto d = (P::load(x + k * g.l.s + i, valid, C(0)) - mean) - rest;
          P::store(out + k * g.l.s + i, d * scale + shift, valid);
        });
      }
      scatter(args.y, g, task, out, row);
    }
  });
}

/// Numbers of a task's backward pass: dx = (dy * weight - mean_g - (x - mean) * slope) * rstd.
template <class C>
struct Task {
  const C *x, *dy;
  double mean_x, rstd, mean_g, slope, rest;  // rest: what rounding took away from mean_x
};

/// Sums of dy and dy * normalised for each channel of the task into (sum, product), and Task's
/// sums.
template <class C>
void sum_channels(const GroupNormBackward& args, const Groups& g, std::int64_t task, Task<C>& t,
                  double* sum, double* product) {
  using P = RowPacket<C>;
  const double count = static_cast<double>(g.size());
  const auto mean = P::splat(static_cast<C>(t.mean_x));
  const auto rest = P::splat(static_cast<C>(t.rest));
  double sum_g = 0, sum_gx = 0;
  for (std::int64_t k = 0; k < g.channels(); ++k) {
    const std::int64_t at = k * g.l.s, c = task % g.groups * g.channels() + k;
    const auto [dy, dyx] = row_sums<C, 2>(g.l.s, [&](std::int64_t i, int valid) {
      const auto v = P::load(t.dy + at + i, valid, C(0));
      return std::array{v, v * ((P::load(t.x + at + i, valid, C(0)) - mean) - rest)};
    });
    const double weight = read_one_or(args.weight, c, 1);
    sum[c] = dy;
    product[c] = dyx * t.rstd;
    sum_g += weight * dy;
    sum_gx += weight * dyx;
  }
  t.mean_g = sum_g / count;
  t.slope = sum_gx / count * t.rstd * t.rstd;
}

template <class C>
void finish(const GroupNormBackward& args, const Groups& g, std::int64_t task, const Task<C>& t,
            C* dx) {
  using P = RowPacket<C>;
  const auto mean = P::splat(static_cast<C>(t.mean_x)), rest = P::splat(static_cast<C>(t.rest)),
             rstd = P::splat(static_cast<C>(t.rstd)), mean_g = P::splat(static_cast<C>(t.mean_g)),
             slope = P::splat(static_cast<C>(t.slope));
  for (std::int64_t k = 0; k < g.channels(); ++k) {
    const std::int64_t at = k * g.l.s, c = task % g.groups * g.channels() + k;
    const auto weight = P::splat(static_cast<C>(read_one_or(args.weight, c, 1)));
    for_each_packet<C>(at, at + g.l.s, [&](auto i, int valid, auto) {
      const auto d = (P::load(t.x + i, valid, C(0)) - mean) - rest;
      const auto v = P::load(t.dy + i, valid, C(0)) * weight - mean_g - d * slope;
      P::store(dx + i, v * rstd, valid);
    });
  }
}

template <class C>
void backward(const GroupNormBackward& args, const Groups& g, Workspace workspace) {
  double* const sums = static_cast<double*>(workspace.data);  // (N, 2, C)
  if (g.size() == 0) std::fill(sums, sums + 2 * g.l.n * g.l.c, 0.0);
  parallel_for(0, g.size() == 0 ? 0 : g.tasks(), row_grain(g.size()),
               [&](std::int64_t begin, std::int64_t end) {
                 ScratchFrame frame;
                 C* const x = frame.take<C>(g.size());
                 C* const dy = frame.take<C>(g.size());
                 C* const dx = frame.take<C>(g.size());
                 C* const row = frame.take<C>(g.channels());
                 for (std::int64_t task = begin; task < end; ++task) {
                   Task<C> t{};
                   t.x = gather(args.x, g, task, x, row);
                   t.dy = gather(args.dy, g, task, dy, row);
                   t.mean_x = args.mean.ptr<double>()[task];
                   t.rest = t.mean_x - static_cast<double>(static_cast<C>(t.mean_x));
                   t.rstd = static_cast<double>(args.rstd.ptr<C>()[task]);
                   double* const sum = sums + task / g.groups * 2 * g.l.c;
                   sum_channels(args, g, task, t, sum, sum + g.l.c);
                   if (!args.dx) continue;
                   finish(args, g, task, t, dx);
                   scatter(args.dx, g, task, dx, row);
                 }
               });
  store_column_sums(args.dbias, sums, g.l.n, 2 * g.l.c, args.beta_bias);
  store_column_sums(args.dweight, sums + g.l.c, g.l.n, 2 * g.l.c, args.beta_weight);
}

}  // namespace

std::size_t group_norm_backward_workspace_bytes(const View& x) {
  return static_cast<std::size_t>(2 * x.size(0) * x.size(1)) * sizeof(double);
}

void group_norm_forward(const Stream&, const GroupNormForward& args) {
  const Groups g =
      check("group_norm_forward", args.x, {args.y}, {args.weight, args.bias}, args.groups);
  if (args.x.numel() == 0) return;
  args.x.dtype == Dtype::f64 ? forward<double>(args, g) : forward<float>(args, g);
}

void group_norm_backward(const Stream&, const GroupNormBackward& args, Workspace workspace) {
  const Groups g = check("group_norm_backward", args.x, {args.dy, args.dx},
                         {args.weight, args.dweight, args.dbias}, args.groups);
  MT_CHECK(workspace.bytes >= group_norm_backward_workspace_bytes(args.x),
           "group_norm_backward: expected a workspace of ",
           group_norm_backward_workspace_bytes(args.x), " bytes, got ", workspace.bytes);
  args.x.dtype == Dtype::f64 ? backward<double>(args, g, workspace)
                             : backward<float>(args, g, workspace);
}

}  // namespace mixtape::kernels::cpu
