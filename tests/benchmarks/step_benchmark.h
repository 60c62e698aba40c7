// What the benchmarks of whole training steps share: options, timing of each step by events as the
// PyTorch peer does it, and one line of JSON.
#pragma once

#include <mixtape.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace step_benchmark {

namespace mt = mixtape;
using Clock = std::chrono::steady_clock;

/// --name value pairs with defaults; anything else ends the program.
class Options {
 public:
  Options(int argc, char** argv, std::map<std::string, std::string> defaults)
      : values_(std::move(defaults)) {
    for (int i = 1; i < argc; i += 2) {
      const std::string name = argv[i] + (std::strncmp(argv[i], "--", 2) == 0 ? 2 : 0);
      if (i + 1 == argc || !values_.contains(name)) {
        std::fprintf(stderr, "unknown option or no value: %s\n", argv[i]);
        std::exit(2);
      }
      values_[name] = argv[i + 1];
    }
  }
  const std::string& text(const std::string& name) const { return values_.at(name); }
  std::int64_t number(const std::string& name) const {
    return std::atoll(values_.at(name).c_str());
  }

 private:
  std::map<std::string, std::string> values_;
};

/// Autocast as a precision names it: fp32, fp16 or bf16.
class Precision {
 public:
  explicit Precision(const std::string& name) : name_(name) {
    MT_CHECK(name == "fp32" || name == "fp16" || name == "bf16",
             "benchmark: expected --precision fp32, fp16 or bf16, got ", name);
  }
  mt::Autocast autocast() const {
    return mt::Autocast(name_ == "fp16" ? mt::Dtype::f16 : mt::Dtype::bf16, name_ != "fp32");
  }
  bool scaled() const { return name_ == "fp16"; }

 private:
  std::string name_;
};

struct Result {
  double step_ms = 0, host_ms = 0, first_ms = 0;
  float loss_first = 0, loss_last = 0;
};

inline double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.empty() ? 0 : v[v.size() / 2];
}

/// Medians over `steps` of one step's device and host time, after `warmup` steps. A step returns
/// its loss.
inline Result measure(const std::function<mt::Tensor()>& step, mt::Device device, int warmup,
                      int steps) {
  Result r;
  const auto begin = Clock::now();
  const auto since = [&](Clock::time_point t) {
    return std::chrono::duration<double, std::milli>(Clock::now() - t).count();
  };
  r.loss_first = step().item<float>();
  r.first_ms = since(begin);
  for (int i = 1; i < warmup; ++i) step();
  mt::synchronize(device);
  mt::reset_peak_memory_stats(device);
  std::vector<mt::Event> marks;
  std::vector<double> host, each;
  mt::Tensor loss;
  marks.emplace_back(mt::Stream::current(device), true);
  for (int i = 0; i < steps; ++i) {
    const auto t = Clock::now();
    loss = step();
    host.push_back(since(t));
    marks.emplace_back(mt::Stream::current(device), true);
  }
  mt::synchronize(device);
  for (std::size_t i = 0; i + 1 < marks.size(); ++i)
    each.push_back(marks[i].elapsed_ms(marks[i + 1]));
  r.step_ms = median(each);
  r.host_ms = median(host);
  r.loss_last = loss.item<float>();
  return r;
}

inline void print(const char* workload, const std::string& mode, const std::string& precision,
                  std::int64_t batch, double units, const char* unit, mt::Device device,
                  const Result& r) {
  const mt::MemoryStats memory = mt::memory_stats(device);
  std::printf(
      "{\"workload\": \"%s\", \"engine\": \"mixtape\", \"mode\": \"%s\", \"precision\": \"%s\", "
      "\"batch\": %lld, \"step_ms\": %.4f, \"host_ms\": %.4f, \"first_ms\": %.0f, \"rate\": %.0f, "
      "\"unit\": \"%s\", \"peak_gib\": %.3f, \"reserved_gib\": %.3f, \"loss_first\": %.4f, "
      "\"loss_last\": %.4f}\n",
      workload, mode.c_str(), precision.c_str(), static_cast<long long>(batch), r.step_ms,
      r.host_ms, r.first_ms, units / r.step_ms * 1e3, unit,
      static_cast<double>(memory.allocated_peak) / 1073741824,
      static_cast<double>(memory.reserved_peak) / 1073741824, r.loss_first, r.loss_last);
}

}  // namespace step_benchmark
