// Bus bandwidth of all_reduce over message sizes, on the ranks that it is started with:
//
//   mpirun -np 8 all_reduce_benchmark [--min BYTES] [--max BYTES] [--device auto|cpu|cuda]
//                                     [--dtype f32|f16|bf16]
//
// Bus bandwidth is 2 (n - 1) / n x bytes / time: what each link must carry in a ring of n ranks,
// comparable between numbers of ranks and with the hardware's figure. The time is the mean of
// repeated calls (queued one behind the other on GPUs) on the slowest rank.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "distributed/process_group.h"
#include "mixtape.h"

namespace dist = mixtape::distributed;
using mixtape::Dtype;
using mixtape::Tensor;

namespace {

struct Options {
  std::int64_t min_bytes = 4 << 10, max_bytes = std::int64_t{512} << 20;
  dist::DeviceChoice device = dist::DeviceChoice::automatic;
  Dtype dtype = Dtype::f32;
};

/// "4096", "4K", "512M", "1G".
std::int64_t parse_bytes(std::string_view text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const std::string_view unit(end, text.data() + text.size());
  const int shift = unit.empty() ? 0 : unit == "K" ? 10 : unit == "M" ? 20 : unit == "G" ? 30 : -1;
  MT_CHECK(error == std::errc{} && value > 0 && shift >= 0, "expected a size as 4K or 512M, got \"",
           text, '"');
  return value << shift;
}

template <class T>
T choose(std::string_view text, std::initializer_list<std::pair<std::string_view, T>> values) {
  for (const auto& [name, value] : values)
    if (text == name) return value;
  MT_THROW("unknown value \"", text, '"');
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string_view name = argv[i];
    MT_CHECK(i + 1 < argc, name, " needs a value");
    const std::string_view value = argv[i + 1];
    if (name == "--min") {
      options.min_bytes = parse_bytes(value);
    } else if (name == "--max") {
      options.max_bytes = parse_bytes(value);
    } else if (name == "--device") {
      options.device = choose<dist::DeviceChoice>(value, {{"auto", dist::DeviceChoice::automatic},
                                                          {"cpu", dist::DeviceChoice::cpu},
                                                          {"cuda", dist::DeviceChoice::cuda}});
    } else if (name == "--dtype") {
      options.dtype =
          choose<Dtype>(value, {{"f32", Dtype::f32}, {"f16", Dtype::f16}, {"bf16", Dtype::bf16}});
    } else {
      MT_THROW("unknown option ", name, "; expected --min, --max, --device or --dtype");
    }
  }
  MT_CHECK(options.min_bytes <= options.max_bytes, "expected --min of at most --max");
  return options;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Seconds for `calls` all_reduces of t, on the slowest rank.
double measure(dist::Communicator& world, const Tensor& t, int calls) {
  mixtape::synchronize(t.device());
  world.barrier();
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) world.all_reduce(t);
  mixtape::synchronize(t.device());
  Tensor seconds = mixtape::full({1}, seconds_since(start), {.dtype = Dtype::f64});
  seconds = seconds.to(t.device());
  world.all_reduce(seconds, dist::ReduceOp::max);
  return seconds.item<double>();
}

void run(const Options& options) {
  dist::init({.device = options.device, .force_comm = true});
  dist::Communicator world = dist::world();
  const double n = world.size();
  if (world.rank() == 0)
    std::printf("all_reduce of %s over %d ranks on %s\n%14s %12s %14s %14s\n",
                std::string(mixtape::name_of(options.dtype)).c_str(), world.size(),
                world.device().is_cuda() ? "GPUs" : "CPUs", "bytes", "us a call", "GB/s",
                "bus GB/s");
  constexpr double kSeconds = 0.5;  // of measuring a size
  constexpr int kMaxCalls = 200;
  for (std::int64_t bytes = options.min_bytes; bytes <= options.max_bytes; bytes *= 2) {
    const auto count = bytes / static_cast<std::int64_t>(mixtape::size_of(options.dtype));
    const Tensor t = mixtape::zeros({std::max<std::int64_t>(count, 1)},
                                    {.dtype = options.dtype, .device = world.device()});
    const double once = std::max(measure(world, t, 2) / 2, 1e-7);  // the first call sets up
    const int calls = std::clamp(static_cast<int>(kSeconds / once), 3, kMaxCalls);
    const double seconds = measure(world, t, calls) / calls;
    const double rate = static_cast<double>(bytes) / seconds / 1e9;
    if (world.rank() == 0) {
      std::printf("%14lld %12.1f %14.3f %14.3f\n", static_cast<long long>(bytes), seconds * 1e6,
                  rate, rate * 2 * (n - 1) / n);
      std::fflush(stdout);
    }
  }
  dist::finalize();
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  try {
    options = parse(argc, argv);
  } catch (const mixtape::Error& e) {
    std::fprintf(stderr, "all_reduce_benchmark: %s\n", e.what());
    return 2;
  }
  run(options);
}
