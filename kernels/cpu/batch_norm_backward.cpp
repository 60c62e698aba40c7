// Batch normalisation on the CPU, backward.
//
// With g the gradient behind the ReLU and d = x - mean: dbias = sum g, dweight = rstd sum g d and,
// in training, dx = weight rstd (g - sum g / M - d rstd^2 sum(g d) / M) over the channel's M
// values. Work is divided as in the forward pass; a planar channel is summed and finished by one
// thread.
#include "kernels/batch_norm.h"

#include "kernels/cpu/channel_norm.h"

namespace mixtape::kernels::cpu {
namespace {

/// Arrays over channels. dx = (g - mean_g - (x - mean - correction) * slope) * scale.
template <class C>
struct Numbers {
  C *mean, *correction, *scale, *mean_g, *slope;
};

template <class C, bool kColumns>
struct Row {
  const C *x, *dy, *y;  // y null without a ReLU
  std::int64_t n;

  auto gradient(std::int64_t i, int valid) const {
    using P = RowPacket<C>;
    const auto g = P::load(dy + i, valid, C(0));
    if (y == nullptr) return g;
    const auto zero = P::splat(0);
    return math::select(math::le(P::load(y + i, valid, C(0)), zero), zero, g);
  }
  void finish(const Numbers<C>& numbers, C* dx, C* dresidual) const {
    using P = RowPacket<C>;
    const ChannelNumber<C, kColumns> mean(numbers.mean), correction(numbers.correction),
        scale(numbers.scale), mean_g(numbers.mean_g), slope(numbers.slope);
    for_each_packet<C>(0, n, [&](auto i, int valid, auto) {
      const auto g = gradient(i, valid);
      if (dresidual != nullptr) P::store(dresidual + i, g, valid);
      if (dx == nullptr) return;
      const auto d = (P::load(x + i, valid, C(0)) - mean.at(i, valid)) - correction.at(i, valid);
      P::store(dx + i, (g - mean_g.at(i, valid) - d * slope.at(i, valid)) * scale.at(i, valid),
               valid);
    });
  }
};

/// The rows of one call, loaded and stored in arithmetic type C.
template <class C, bool kColumns>
class Rows {
 public:
  Rows(const BatchNormBackward& args, const ChannelLayout& l)
      : x_(packed_rows(args.x, l)),
        dy_(packed_rows(args.dy, l)),
        y_(packed_rows(args.y, l)),
        dx_(packed_rows(args.dx, l)),
        dresidual_(packed_rows(args.dresidual, l)) {
    for (C*& buffer : buffers_) buffer = frame_.take<C>(x_.size(1));
  }
  Row<C, kColumns> load(std::int64_t row) {
    return {load_row(x_, row, buffers_[0]), load_row(dy_, row, buffers_[1]),
            y_ ? load_row(y_, row, buffers_[2]) : nullptr, x_.size(1)};
  }
  void finish(std::int64_t row, const Numbers<C>& numbers) {
    C* const dx = dx_ ? open_row(dx_, row, buffers_[3]) : nullptr;
    C* const dresidual = dresidual_ ? open_row(dresidual_, row, buffers_[4]) : nullptr;
    load(row).finish(numbers, dx, dresidual);
    if (dx_) store_row(dx_, row, dx);
    if (dresidual_) store_row(dresidual_, row, dresidual);
  }

 private:
  ScratchFrame frame_;
  View x_, dy_, y_, dx_, dresidual_;
  C* buffers_[5];
};

template <class C>
class Backward {
 public:
  Backward(const BatchNormBackward& args, const ChannelLayout& l)
      : args_(args), l_(l), training_(!args.running_mean) {}

  void planar() const {
    parallel_for(0, l_.c, row_grain(l_.values()), [&](std::int64_t begin, std::int64_t end) {
      using P = RowPacket<C>;
      Rows<C, false> rows(args_, l_);
      for (std::int64_t c = begin; c < end; ++c) {
        C storage[5];
        const Numbers<C> numbers{storage, storage + 1, storage + 2, storage + 3, storage + 4};
        const double rstd = set_channel(c, numbers, 0);
        double sum_g = 0, sum_gd = 0;
        const auto mean = P::splat(*numbers.mean), correction = P::splat(*numbers.correction);
        for (std::int64_t n = 0; needs_sums() && n < l_.n; ++n) {
          const Row<C, false> r = rows.load(n * l_.c + c);
          const auto [g, gd] = row_sums<C, 2>(l_.s, [&](std::int64_t i, int valid) {
            const auto v = r.gradient(i, valid);
            return std::array{v, v * ((P::load(r.x + i, valid, C(0)) - mean) - correction)};
          });
          sum_g += g;
          sum_gd += gd;
        }
        set_sums(c, rstd, sum_g, sum_gd, numbers, 0);
        if (!args_.dx && !args_.dresidual) continue;
        for (std::int64_t n = 0; n < l_.n; ++n) rows.finish(n * l_.c + c, numbers);
      }
    });
  }

  void channels_last(Workspace workspace) const {
    const std::int64_t rows = l_.values(), chunks = row_chunks(rows), each = rows_per_chunk(rows);
    double* const partial = static_cast<double*>(workspace.data);  // (chunks, 2, C)
    C* const storage = reinterpret_cast<C*>(partial + chunks * 2 * l_.c);
    const Numbers<C> numbers{storage, storage + l_.c, storage + 2 * l_.c, storage + 3 * l_.c,
                             storage + 4 * l_.c};
    for (std::int64_t c = 0; c < l_.c; ++c) set_channel(c, numbers, c);
    const std::int64_t grain = std::max<std::int64_t>(1, row_grain(l_.c) / each);
    parallel_for(0, needs_sums() ? chunks : 0, grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t k = begin; k < end; ++k)
        sum_rows(std::min(rows, k * each), std::min(rows, (k + 1) * each), numbers,
                 partial + k * 2 * l_.c);
    });
    for (std::int64_t c = 0; c < l_.c; ++c) {
      double sum_g = 0, sum_gd = 0;
      for (std::int64_t k = 0; needs_sums() && k < chunks; ++k) {
        sum_g += partial[k * 2 * l_.c + c];
        sum_gd += partial[(k * 2 + 1) * l_.c + c];
      }
      set_sums(c, rstd_of_channel(c), sum_g, sum_gd, numbers, c);
    }
    if (!args_.dx && !args_.dresidual) return;
    parallel_for(0, rows, row_grain(l_.c), [&](std::int64_t begin, std::int64_t end) {
      Rows<C, true> finisher(args_, l_);
      for (std::int64_t r = begin; r < end; ++r) finisher.finish(r, numbers);
    });
  }

 private:
  bool needs_sums() const { return (training_ && args_.dx) || args_.dweight || args_.dbias; }
  double rstd_of_channel(std::int64_t c) const {
    if (l_.values() == 0) return 0;  // there are no statistics
    return training_ ? static_cast<double>(args_.statistics.ptr<C>()[2 * l_.c + c])
                     : rstd_of(read_one(args_.running_var, c), args_.eps);
  }
  double set_channel(std::int64_t c, const Numbers<C>& to, std::int64_t at) const {
    const C* const statistics = training_ ? args_.statistics.ptr<C>() : nullptr;
    const double rstd = rstd_of_channel(c);
    const double mean = training_ ? 0 : read_one(args_.running_mean, c);
    to.mean[at] = training_ ? statistics[c] : static_cast<C>(mean);
    to.correction[at] =
        training_ ? statistics[l_.c + c] : static_cast<C>(mean - static_cast<double>(to.mean[at]));
    to.scale[at] = static_cast<C>(rstd * read_one_or(args_.weight, c, 1));
    return rstd;
  }
  void set_sums(std::int64_t c, double rstd, double sum_g, double sum_gd, const Numbers<C>& to,
                std::int64_t at) const {
    const double count = static_cast<double>(l_.values());
    to.mean_g[at] = training_ ? static_cast<C>(sum_g / count) : C(0);
    to.slope[at] = training_ ? static_cast<C>(sum_gd / count * rstd * rstd) : C(0);
    if (args_.dweight) accumulate(args_.dweight, c, sum_gd * rstd, args_.beta_weight);
    if (args_.dbias) accumulate(args_.dbias, c, sum_g, args_.beta_bias);
  }
  static void accumulate(const View& to, std::int64_t c, double value, float beta) {
    write_one(to, c, beta == 0 ? value : value + static_cast<double>(beta) * read_one(to, c));
  }
  /// Column sums of g and g d over rows [begin, end) into `total` (2, C).
  void sum_rows(std::int64_t begin, std::int64_t end, const Numbers<C>& numbers,
                double* total) const {
    using P = RowPacket<C>;
    const std::int64_t n = l_.c;
    ScratchFrame frame;
    C* const part = frame.take<C>(2 * n);
    ColumnSums<C> sums(part, total, 2 * n);
    Rows<C, true> rows(args_, l_);
    const ChannelNumber<C, true> mean(numbers.mean), correction(numbers.correction);
    for (std::int64_t row = begin; row < end; ++row) {
      const Row<C, true> r = rows.load(row);
      for_each_packet<C>(0, n, [&](auto i, int valid, auto) {
        const auto g = r.gradient(i, valid);
        const auto d =
            (P::load(r.x + i, valid, C(0)) - mean.at(i, valid)) - correction.at(i, valid);
        P::store(part + i, P::load(part + i, valid, C(0)) + g, valid);
        P::store(part + n + i, P::load(part + n + i, valid, C(0)) + g * d, valid);
      });
      sums.row_done();
    }
    sums.flush();
  }

  const BatchNormBackward& args_;
  ChannelLayout l_;
  bool training_;
};

template <class C>
void backward(const BatchNormBackward& args, const ChannelLayout& l, Workspace workspace) {
  const Backward<C> pass(args, l);
  l.channels_last ? pass.channels_last(workspace) : pass.planar();
}

}  // namespace

void batch_norm_backward(const Stream&, const BatchNormBackward& args, Workspace workspace) {
  const ChannelLayout l = check_batch_norm(args, workspace);
  if (args.x.dtype == Dtype::f64)
    backward<double>(args, l, workspace);
  else
    backward<float>(args, l, workspace);
}

}  // namespace mixtape::kernels::cpu
