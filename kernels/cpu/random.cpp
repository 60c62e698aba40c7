// Random fills and dropout on the CPU. A register's worth of Philox counters runs at once; what is
// made of the words is kernels/random_math.h in loops that the compiler vectorises, so the numbers
// are those of the scalar formulas.
#include "kernels/random.h"

#include <algorithm>

#include "engine/thread_pool.h"
#include "kernels/cpu/load_store.h"
#include "kernels/cpu/philox_words.h"
#include "kernels/random_math.h"

namespace mixtape::kernels::cpu {

namespace {

constexpr std::int64_t kBlock = 1024;   // elements made at a time
constexpr std::int64_t kGrain = 16384;  // elements worth a thread
constexpr std::int64_t kLanes = Packet::kLanes;
static_assert(kBlock % (4 * kLanes) == 0);

/// Calls f(first element, count, words) for each block of a draw of n elements; words are kBlock
/// long, whatever the count.
template <class F>
void for_each_block(std::int64_t n, PhiloxState state, F&& f) {
  const std::int64_t blocks = (n + kBlock - 1) / kBlock;
  const auto part = [&](std::int64_t begin, std::int64_t end) {
    alignas(64) std::uint32_t words[kBlock];
    for (std::int64_t b = begin; b < end; ++b) {
      const std::int64_t first = b * kBlock, count = std::min(kBlock, n - first);
      for (std::int64_t i = 0; i < count; i += 4 * kLanes)
        philox_words(state, static_cast<std::uint64_t>((first + i) / 4), words + i);
      f(first, count, words);
    }
  };
  parallel_for(0, blocks, kGrain / kBlock, part);
}

/// As for_each_block for a draw made in floats: f(words, count, values), then values go to `out`.
template <class F>
void draw_floats(const View& out, PhiloxState state, F&& f) {
  const StoreFunction store = store_function(Dtype::f32, out.dtype);
  for_each_block(out.numel(), state,
                 [&](std::int64_t first, std::int64_t count, const std::uint32_t* words) {
                   void* to = element(out.data, out.dtype, first);
                   alignas(64) float values[kBlock];
                   f(words, count, values);
                   store(values, to, 1, count);
                 });
}

/// Two elements a word.
template <class C>
void dropout_blocks(const View& out, const View& x, double p, PhiloxState state) {
  const LoadFunction load = load_function(x.dtype, dtype_of<C>);
  const StoreFunction store = store_function(dtype_of<C>, out.dtype);
  const C scale = static_cast<C>(random_math::dropout_scale(p));
  const std::uint32_t threshold = random_math::dropout_threshold(p);
  const std::int64_t n = out.numel();
  for_each_block(
      (n + 1) / 2, state, [&](std::int64_t first, std::int64_t pairs, const std::uint32_t* words) {
        alignas(64) C values[2 * kBlock];
        const std::int64_t begin = 2 * first, count = std::min(2 * pairs, n - begin);
        values[2 * pairs - 1] = 0;
        load(element(x.data, x.dtype, begin), 1, count, values);
        for (std::int64_t i = 0; i < pairs; ++i) {
          C& even = values[2 * i];
          C& odd = values[2 * i + 1];
          even = random_math::dropout_keeps(words[i] & 0xFFFF, threshold) ? even * scale : C{0};
          odd = random_math::dropout_keeps(words[i] >> 16, threshold) ? odd * scale : C{0};
        }
        store(values, element(out.data, out.dtype, begin), 1, count);
      });
}

}  // namespace

void uniform(const Stream&, View out, PhiloxState state, double lo, double hi) {
  const random_math::UniformRange range = random_math::uniform_range(out.dtype, lo, hi);
  draw_floats(out, state, [&](const std::uint32_t* words, std::int64_t n, float* values) {
    for (std::int64_t i = 0; i < n; ++i) values[i] = random_math::uniform_value(words[i], range);
  });
}

void normal(const Stream&, View out, PhiloxState state, double mean, double std) {
  const float centre = static_cast<float>(mean), deviation = static_cast<float>(std);
  draw_floats(out, state, [&](const std::uint32_t* words, std::int64_t n, float* values) {
    const std::int64_t pairs = (n + 1) / 2;
    for (std::int64_t i = 0; i < pairs; ++i) {
      const random_math::Pair z = random_math::normal_pair(words[2 * i], words[2 * i + 1]);
      values[2 * i] = random_math::fused(deviation, z.first, centre);
      values[2 * i + 1] = random_math::fused(deviation, z.second, centre);
    }
  });
}

void randint(const Stream&, View out, PhiloxState state, std::int64_t lo, std::int64_t hi) {
  const std::uint64_t range = static_cast<std::uint64_t>(hi) - static_cast<std::uint64_t>(lo);
  MT_CHECK(lo < hi && range <= (std::uint64_t{1} << 32),
           "randint: expected 0 < hi - lo <= 2^32, got [", lo, ", ", hi, ")");
  const Dtype compute = conversion_dtype(Dtype::i64, out.dtype);
  const LoadFunction widen = load_function(Dtype::i64, compute);
  const StoreFunction store = store_function(compute, out.dtype);
  for_each_block(out.numel(), state,
                 [&](std::int64_t first, std::int64_t count, const std::uint32_t* words) {
                   alignas(64) std::int64_t values[kBlock], converted[kBlock];
                   for (std::int64_t i = 0; i < count; ++i)
                     values[i] = random_math::randint_value(words[i], lo, range);
                   widen(values, 1, count, converted);
                   store(converted, element(out.data, out.dtype, first), 1, count);
                 });
}

void dropout(const Stream&, View out, View x, double p, PhiloxState state) {
  if (x.dtype == Dtype::f64 || out.dtype == Dtype::f64)
    dropout_blocks<double>(out, x, p, state);
  else
    dropout_blocks<float>(out, x, p, state);
}

}  // namespace mixtape::kernels::cpu
