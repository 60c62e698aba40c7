// Cross-entropy on the CPU: rows in parallel, labels checked before anything is written, the
// reduction added in row order in double.
#include "kernels/loss.h"

#include "engine/thread_pool.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/row.h"
#include "kernels/cpu/scratch.h"

namespace mixtape::kernels::cpu {
namespace {

void check_logits(const char* op, const View& logits, const View& target) {
  MT_CHECK(logits.dim() == 2 && (logits.size(1) <= 1 || logits.stride(1) == 1), op,
           ": expected row-major logits (N, V), got sizes ", logits.sizes, " strides ",
           logits.strides);
  MT_CHECK(target.dtype == Dtype::i64 && target.dim() == 1 && target.size(0) == logits.size(0), op,
           ": expected int64 targets of shape (", logits.size(0), "), got ", target.dtype, " ",
           target.sizes);
}

/// Address of element i of a one-dimensional view.
template <class T>
T& at(const View& v, std::int64_t i) {
  return v.ptr<T>()[i * v.stride(0)];
}

/// Number of rows that are not ignored; throws for a label that is not a class.
std::int64_t count_labels(const View& target, std::int64_t classes, std::int64_t ignore_index) {
  std::int64_t count = 0;
  for (std::int64_t row = 0; row < target.size(0); ++row) {
    const std::int64_t t = at<std::int64_t>(target, row);
    if (t == ignore_index) continue;
    MT_CHECK(t >= 0 && t < classes, "cross_entropy: expected a class in [0, ", classes,
             ") or ignore_index ", ignore_index, ", got ", t);
    ++count;
  }
  return count;
}

template <class C>
void forward(const CrossEntropyForward& args) {
  const std::int64_t classes = args.logits.size(1);
  const double s = args.label_smoothing;
  parallel_for(
      0, args.logits.size(0), row_grain(classes), [&](std::int64_t begin, std::int64_t end) {
        ScratchFrame frame;
        C* buffer = frame.take<C>(classes);
        for (std::int64_t row = begin; row < end; ++row) {
          const C* const x = load_row(args.logits, row, buffer);
          const C max = row_max(x, classes);
          // All -inf: log-sum-exp is -inf; subtracting the maximum would make it NaN.
          const double lse = max == -std::numeric_limits<C>::infinity()
                                 ? static_cast<double>(max)
                                 : max + std::log(row_exp_sum<C>(x, classes, max, nullptr));
          at<C>(args.lse, row) = static_cast<C>(lse);
          const std::int64_t t = at<std::int64_t>(args.target, row);
          double loss = 0;
          if (t != args.ignore_index) {
            loss = (1 - s) * (lse - x[t]);
            if (s != 0) {
              const double sum = row_sums<C, 1>(classes, [&](std::int64_t i, int count) {
                return std::array{RowPacket<C>::load(x + i, count, C(0))};
              })[0];
              loss += s * (lse - sum / static_cast<double>(classes));
            }
          }
          at<C>(args.row_loss, row) = static_cast<C>(loss);
        }
      });
}

template <class C>
double sum_of_rows(const View& row_loss) {
  double total = 0;
  for (std::int64_t row = 0; row < row_loss.size(0); ++row) total += at<C>(row_loss, row);
  return total;
}

double first_element(const View& v) {
  double value = 0;
  load_elements(v.dtype, v.data, &value, 1);
  return value;
}

template <class C>
void backward(const CrossEntropyBackward& args) {
  using P = RowPacket<C>;
  const std::int64_t rows = args.logits.size(0), classes = args.logits.size(1);
  const double s = args.label_smoothing, divisor = args.count ? first_element(args.count) : 1;
  const bool per_row = args.dy.numel() > 1;
  const C uniform = static_cast<C>(s / static_cast<double>(classes));
  parallel_for(0, rows, row_grain(classes), [&](std::int64_t begin, std::int64_t end) {
    ScratchFrame frame;
    C* in = frame.take<C>(classes);
    C* out = frame.take<C>(classes);
    for (std::int64_t row = begin; row < end; ++row) {
      C* const dx = open_row(args.dlogits, row, out);
      const std::int64_t t = at<std::int64_t>(args.target, row);
      if (t == args.ignore_index) {
        std::fill(dx, dx + classes, C(0));
      } else {
        C dy = 0;
        const std::int64_t offset = per_row ? row * args.dy.stride(0) : 0;
        load_elements(args.dy.dtype, element_address(args.dy.data, args.dy.dtype, offset), &dy, 1);
        const C g = static_cast<C>(dy / divisor);
        const C* const x = load_row(args.logits, row, in);
        const C lse = at<C>(args.lse, row);
        const C at_target =
            static_cast<C>((std::exp(static_cast<double>(x[t]) - lse) - uniform - (1 - s)) * g);
        const auto shift = P::splat(lse), share = P::splat(uniform), scale = P::splat(g);
        for_each_packet<C>(0, classes, [&](auto i, int count, auto) {
          const auto p = math::exp(P::load(x + i, count, C(0)) - shift);
          P::store(dx + i, (p - share) * scale, count);
        });
        dx[t] = at_target;
      }
      store_row(args.dlogits, row, dx);
    }
  });
}

}  // namespace

void cross_entropy_forward(const Stream&, const CrossEntropyForward& args) {
  check_logits("cross_entropy", args.logits, args.target);
  const Dtype compute = compute_dtype(args.logits.dtype);
  MT_CHECK(args.row_loss.dtype == compute && args.lse.dtype == compute,
           "cross_entropy: expected row losses and lse of dtype ", compute, ", got ",
           args.row_loss.dtype, " and ", args.lse.dtype);
  const std::int64_t count = count_labels(args.target, args.logits.size(1), args.ignore_index);
  const bool wide = compute == Dtype::f64;
  wide ? forward<double>(args) : forward<float>(args);
  if (args.count) *args.count.ptr<float>() = static_cast<float>(count);
  if (args.loss) {
    double total = wide ? sum_of_rows<double>(args.row_loss) : sum_of_rows<float>(args.row_loss);
    if (args.mean) total /= static_cast<double>(count);
    store_elements(args.loss.dtype, args.loss.data, &total, 1);
  }
}

void cross_entropy_backward(const Stream&, const CrossEntropyBackward& args) {
  check_logits("cross_entropy", args.logits, args.target);
  count_labels(args.target, args.logits.size(1), args.ignore_index);
  args.logits.dtype == Dtype::f64 ? backward<double>(args) : backward<float>(args);
}

}  // namespace mixtape::kernels::cpu
