// Batch normalisation on the CPU, forward.
//
// Planar images: a channel belongs to one thread, which finds its moments plane by plane and
// normalises it while it is still in the cache. Channels-last: rows of channels are cut into chunks
// by their count alone, moments are found per block of rows and column and merged in order, then
// rows are normalised. The mean is kept in two parts (what its rounding took away is the second),
// so that data whose mean is a million times its deviation is normalised to full precision.
#include "kernels/batch_norm.h"

#include "kernels/cpu/channel_norm.h"

namespace mixtape::kernels::cpu {
namespace {

/// y = (x - mean - correction) * scale + shift, arrays over channels.
template <class C>
struct Affine {
  C *mean, *correction, *scale, *shift;
};

template <class C>
void set_affine(const BatchNormForward& args, std::int64_t c, double mean, double rstd,
                const Affine<C>& to, std::int64_t at) {
  to.mean[at] = static_cast<C>(mean);
  to.correction[at] = static_cast<C>(mean - static_cast<double>(to.mean[at]));
  to.scale[at] = static_cast<C>(rstd * read_one_or(args.weight, c, 1));
  to.shift[at] = static_cast<C>(read_one_or(args.bias, c, 0));
}

template <class C, bool kColumns>
void normalise_row(C* y, const C* x, const C* residual, std::int64_t n, const Affine<C>& a,
                   bool relu) {
  using P = RowPacket<C>;
  const ChannelNumber<C, kColumns> mean(a.mean), correction(a.correction), scale(a.scale),
      shift(a.shift);
  const auto zero = P::splat(0);
  for_each_packet<C>(0, n, [&](auto i, int valid, auto) {
    auto v = ((P::load(x + i, valid, C(0)) - mean.at(i, valid)) - correction.at(i, valid)) *
                 scale.at(i, valid) +
             shift.at(i, valid);
    if (residual != nullptr) v = v + P::load(residual + i, valid, C(0));
    if (relu) v = math::select(math::le(v, zero), zero, v);
    P::store(y + i, v, valid);
  });
}

/// Rows [begin, end) of the packed views; `a` is indexed by column, or is one channel's.
template <class C, bool kColumns>
class RowNormaliser {
 public:
  RowNormaliser(const BatchNormForward& args, const ChannelLayout& l)
      : x_(packed_rows(args.x, l)),
        y_(packed_rows(args.y, l)),
        residual_(packed_rows(args.residual, l)),
        relu_(args.relu) {
    const std::int64_t n = x_.size(1);
    x_buffer_ = frame_.take<C>(n);
    y_buffer_ = frame_.take<C>(n);
    if (residual_) r_buffer_ = frame_.take<C>(n);
  }
  const C* load(std::int64_t row) { return load_row(x_, row, x_buffer_); }
  void normalise(std::int64_t row, const Affine<C>& a) {
    C* const y = open_row(y_, row, y_buffer_);
    const C* const r = residual_ ? load_row(residual_, row, r_buffer_) : nullptr;
    normalise_row<C, kColumns>(y, load(row), r, x_.size(1), a, relu_);
    store_row(y_, row, y);
  }

 private:
  ScratchFrame frame_;
  View x_, y_, residual_;
  bool relu_;
  C *x_buffer_, *y_buffer_, *r_buffer_ = nullptr;
};

// ---- statistics

/// Keeps a channel's statistics and moves the running ones; gives 1 / sqrt(var + eps).
template <class C>
double keep_statistics(const BatchNormForward& args, std::int64_t c, const Moments& m,
                       double momentum) {
  const double rstd = rstd_of(m.variance(), args.eps);
  const std::int64_t channels = args.x.size(1);
  C* const to = args.statistics.ptr<C>();
  to[c] = static_cast<C>(m.mean);
  to[channels + c] = static_cast<C>(m.mean - static_cast<double>(to[c]));
  to[2 * channels + c] = static_cast<C>(rstd);
  const auto move = [&](const View& running, double value) {
    if (running) write_one(running, c, (1 - momentum) * read_one(running, c) + momentum * value);
  };
  move(args.running_mean, m.mean);
  move(args.running_var, m.squares / (m.count - 1));
  return rstd;
}

/// Column moments of rows [begin, end) into (mean, squares), arrays over C: sums about the first
/// row of each block of kFlushRows.
template <class C>
void column_moments(const View& rows, std::int64_t begin, std::int64_t end, double* mean,
                    double* squares) {
  using P = RowPacket<C>;
  const std::int64_t n = rows.size(1);
  ScratchFrame frame;
  C* const first = frame.take<C>(n);
  C* const part = frame.take<C>(2 * n);
  C* const buffer = frame.take<C>(n);
  std::fill(mean, mean + n, 0.0);
  std::fill(squares, squares + n, 0.0);
  for (std::int64_t block = begin; block < end; block += kFlushRows) {
    const std::int64_t stop = std::min(end, block + kFlushRows);
    const C* const row = load_row(rows, block, buffer);
    std::copy(row, row + n, first);
    std::fill(part, part + 2 * n, C(0));
    for (std::int64_t r = block; r < stop; ++r) {
      const C* const x = load_row(rows, r, buffer);
      for_each_packet<C>(0, n, [&](auto i, int valid, auto) {
        const auto d = P::load(x + i, valid, C(0)) - P::load(first + i, valid, C(0));
        P::store(part + i, P::load(part + i, valid, C(0)) + d, valid);
        P::store(part + n + i, P::load(part + n + i, valid, C(0)) + d * d, valid);
      });
    }
    const double count = static_cast<double>(stop - block);
    for (std::int64_t c = 0; c < n; ++c) {
      const double sum = static_cast<double>(part[c]);
      Moments m{static_cast<double>(block - begin), mean[c], squares[c]};
      m.merge({count, static_cast<double>(first[c]) + sum / count,
               static_cast<double>(part[n + c]) - sum * (sum / count)});
      mean[c] = m.mean;
      squares[c] = m.squares;
    }
  }
}

// ---- the two layouts

template <class C>
void forward_planar(const BatchNormForward& args, const ChannelLayout& l, double momentum) {
  parallel_for(0, l.c, row_grain(l.values()), [&](std::int64_t begin, std::int64_t end) {
    RowNormaliser<C, false> rows(args, l);
    for (std::int64_t c = begin; c < end; ++c) {
      double mean = 0, rstd = 0;
      if (args.training) {
        Moments m;
        for (std::int64_t n = 0; n < l.n; ++n) m.merge(run_moments(rows.load(n * l.c + c), l.s));
        mean = m.mean;
        rstd = keep_statistics<C>(args, c, m, momentum);
      } else {
        mean = read_one(args.running_mean, c);
        rstd = rstd_of(read_one(args.running_var, c), args.eps);
      }
      C numbers[4];
      const Affine<C> a{numbers, numbers + 1, numbers + 2, numbers + 3};
      set_affine(args, c, mean, rstd, a, 0);
      for (std::int64_t n = 0; n < l.n; ++n) rows.normalise(n * l.c + c, a);
    }
  });
}

template <class C>
void forward_channels_last(const BatchNormForward& args, const ChannelLayout& l, double momentum,
                           Workspace workspace) {
  const std::int64_t rows = l.values(), chunks = row_chunks(rows), each = rows_per_chunk(rows);
  double* const partial = static_cast<double*>(workspace.data);  // (chunks, 2, C)
  C* const numbers = reinterpret_cast<C*>(partial + chunks * 2 * l.c);
  const Affine<C> a{numbers, numbers + l.c, numbers + 2 * l.c, numbers + 3 * l.c};
  if (args.training) {
    const std::int64_t grain = std::max<std::int64_t>(1, row_grain(l.c) / each);
    parallel_for(0, chunks, grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t k = begin; k < end; ++k)
        column_moments<C>(packed_rows(args.x, l), std::min(rows, k * each),
                          std::min(rows, (k + 1) * each), partial + k * 2 * l.c,
                          partial + (k * 2 + 1) * l.c);
    });
  }
  for (std::int64_t c = 0; c < l.c; ++c) {
    if (!args.training) {
      set_affine(args, c, read_one(args.running_mean, c),
                 rstd_of(read_one(args.running_var, c), args.eps), a, c);
      continue;
    }
    Moments m;
    for (std::int64_t k = 0; k < chunks; ++k) {
      const std::int64_t count = std::min(rows, (k + 1) * each) - std::min(rows, k * each);
      m.merge(
          {static_cast<double>(count), partial[k * 2 * l.c + c], partial[(k * 2 + 1) * l.c + c]});
    }
    set_affine(args, c, m.mean, keep_statistics<C>(args, c, m, momentum), a, c);
  }
  parallel_for(0, rows, row_grain(l.c), [&](std::int64_t begin, std::int64_t end) {
    RowNormaliser<C, true> normaliser(args, l);
    for (std::int64_t r = begin; r < end; ++r) normaliser.normalise(r, a);
  });
}

template <class C>
void forward(const BatchNormForward& args, const ChannelLayout& l, Workspace workspace) {
  double momentum = args.momentum;
  if (args.training && args.batches) {
    const std::int64_t batches = ++*args.batches.ptr<std::int64_t>();
    if (momentum < 0) momentum = 1 / static_cast<double>(batches);
  }
  if (l.channels_last)
    forward_channels_last<C>(args, l, momentum, workspace);
  else
    forward_planar<C>(args, l, momentum);
}

}  // namespace

std::size_t batch_norm_workspace_bytes(const View& x) {
  const ChannelLayout l = channel_layout("batch_norm", x);
  if (!l.channels_last) return 0;
  return static_cast<std::size_t>((row_chunks(l.values()) * 2 + 5) * l.c) * sizeof(double);
}

void batch_norm_forward(const Stream&, const BatchNormForward& args, Workspace workspace) {
  const ChannelLayout l = check_batch_norm(args, workspace);
  if (args.x.numel() == 0) return;
  if (args.x.dtype == Dtype::f64)
    forward<double>(args, l, workspace);
  else
    forward<float>(args, l, workspace);
}

}  // namespace mixtape::kernels::cpu
