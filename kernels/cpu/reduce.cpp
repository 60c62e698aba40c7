// sum, mean, max, min, any and all on the CPU: register loops over dense runs and columns, for
// float, double and int64, under the loop nest of reduce_loop.h. Runs are summed in float
// registers, several at once, and added up in double; integers in int64.
#include "kernels/reduce.h"

#include "kernels/cpu/load_store.h"
#include "kernels/cpu/reduce_loop.h"
#include "kernels/cpu/register.h"

namespace mixtape::kernels::cpu {

namespace {

/// Reduction of C by Op: accumulators are double for floats, int64 for integers.
template <class Op, class C>
struct Reducer {
  using R = Register<C>;
  using V = typename R::Lanes;
  using Acc = std::conditional_t<std::is_same_v<C, std::int64_t>, std::int64_t, double>;
  static constexpr std::int64_t kLanes = R::kLanes;

  static void init(void* acc, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) static_cast<Acc*>(acc)[i] = Op::template identity<Acc>();
  }

  static void run(const void* data, std::int64_t n, void* acc) {
    const C* x = static_cast<const C*>(data);
    const V none = V{} + Op::template identity<C>();
    V part[4] = {none, none, none, none};
    std::int64_t i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes)
      for (int k = 0; k < 4; ++k) part[k] = Op::take(part[k], R::load(x + i + k * kLanes));
    for (; i + kLanes <= n; i += kLanes) part[0] = Op::take(part[0], R::load(x + i));
    Acc total = *static_cast<Acc*>(acc);
    if (n >= kLanes) {
      const V all = Op::take(Op::take(part[0], part[1]), Op::take(part[2], part[3]));
      for (std::int64_t k = 0; k < kLanes; ++k) total = Op::take(total, static_cast<Acc>(all[k]));
    }
    for (; i < n; ++i) total = Op::take(total, static_cast<Acc>(x[i]));
    *static_cast<Acc*>(acc) = total;
  }

  static void columns(const void* data, std::int64_t row_stride, std::int64_t rows,
                      std::int64_t columns, void* acc) {
    const C* x = static_cast<const C*>(data);
    Acc* to = static_cast<Acc*>(acc);
    const V none = V{} + Op::template identity<C>();
    std::int64_t j = 0;
    for (; j + 4 * kLanes <= columns; j += 4 * kLanes) {
      V part[4] = {none, none, none, none};
      for (std::int64_t r = 0; r < rows; ++r)
        for (int k = 0; k < 4; ++k)
          part[k] = Op::take(part[k], R::load(x + r * row_stride + j + k * kLanes));
      alignas(64) C sums[4 * kLanes];
      std::memcpy(sums, part, sizeof sums);
      for (std::int64_t k = 0; k < 4 * kLanes; ++k)
        to[j + k] = Op::take(to[j + k], static_cast<Acc>(sums[k]));
    }
    for (; j < columns; ++j) {
      C sum = Op::template identity<C>();
      for (std::int64_t r = 0; r < rows; ++r) sum = Op::take(sum, x[r * row_stride + j]);
      to[j] = Op::take(to[j], static_cast<Acc>(sum));
    }
  }

  static void combine(void* acc, const void* other, std::int64_t n) {
    Acc* a = static_cast<Acc*>(acc);
    for (std::int64_t i = 0; i < n; ++i) a[i] = Op::take(a[i], static_cast<const Acc*>(other)[i]);
  }

  static Reduction reduction() { return {dtype_of<C>, sizeof(Acc), init, run, columns, combine}; }
};

template <class Op>
Reduction reduction_in(Dtype compute) {
  switch (compute) {
    case Dtype::f64: return Reducer<Op, double>::reduction();
    case Dtype::i64: return Reducer<Op, std::int64_t>::reduction();
    default: return Reducer<Op, float>::reduction();
  }
}

Reduction reduction_for(ReduceOp op, const View& out, const View& x) {
  Dtype compute = compute_dtype(x.dtype);
  const bool logical = op == ReduceOp::any || op == ReduceOp::all;
  if (logical && compute == Dtype::i64) compute = Dtype::f32;  // a nonzero integer stays nonzero
  if (!logical && compute == Dtype::f32 && out.dtype == Dtype::f64) compute = Dtype::f64;
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::mean: return reduction_in<Sum>(compute);
    case ReduceOp::max: return reduction_in<Max>(compute);
    case ReduceOp::min: return reduction_in<Min>(compute);
    case ReduceOp::any: return reduction_in<Any>(compute);
    case ReduceOp::all: return reduction_in<All>(compute);
  }
  MT_THROW("reduce: invalid op ", static_cast<int>(op));
}

}  // namespace

void reduce(const Stream&, ReduceOp op, View out, View x, Workspace) {
  const Reduction reduction = reduction_for(op, out, x);
  const std::int64_t outputs = out.numel(), inputs = x.numel();
  if (op == ReduceOp::max || op == ReduceOp::min)
    MT_CHECK(inputs > 0 || outputs == 0, "reduce: expected at least one element to reduce, got ",
             x.sizes);
  const double count = outputs == 0 ? 0 : static_cast<double>(inputs / outputs);
  const bool integral = reduction.compute == Dtype::i64;
  const bool mean = op == ReduceOp::mean;
  const Dtype result = integral && !mean ? Dtype::i64 : Dtype::f64;
  const StoreFunction store = store_function(result, out.dtype);
  reduce_loop(
      "reduce", reduction, x, out, View{}, [&](const void* acc, std::int64_t at, std::int64_t) {
        void* to = element(out.data, out.dtype, at);
        if (!mean) return store(acc, to, 1, 1);
        const double sum = integral ? static_cast<double>(*static_cast<const std::int64_t*>(acc))
                                    : *static_cast<const double*>(acc);
        const double value = sum / count;
        store(&value, to, 1, 1);
      });
}

}  // namespace mixtape::kernels::cpu
