// Models and batches of the data-parallel tests. A step's whole batch is the same on every rank;
// each takes its rows of it, and the reference run takes all.
#pragma once

#include <gtest/gtest.h>
#include <mixtape.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "distributed/data_parallel.h"
#include "distributed/process_group.h"

namespace mixtape::testing {

using distributed::world;

constexpr std::int64_t kRows = 16;  // of a whole batch: parts of 1, 2 and 4 ranks are equal
constexpr distributed::BucketSizes kTiny{.first = 1, .rest = 1};

struct Mlp : nn::Module<Mlp> {
  nn::Linear in{6, 40}, mid{40, 40}, out{40, 5};
  Mlp() {
    add("in", in);
    add("mid", mid);
    add("out", out);
  }
  Tensor forward(const Tensor& x) { return out(relu(mid(relu(in(x))))); }  // (B, 6) -> (B, 5)
};

struct Cnn : nn::Module<Cnn> {
  nn::Conv2d conv{1, 4, {.padding = {1, 1}, .act = Act::relu}};
  nn::Linear out{4 * 3 * 3, 5};
  Cnn() {
    add("conv", conv);
    add("out", out);
  }
  Tensor forward(const Tensor& x) {  // (B, 36) -> (B, 5)
    return out(max_pool2d(conv(x.reshape({x.size(0), 1, 6, 6}))).flatten(1));
  }
};

/// Two branches; the caller chooses which ones a forward uses.
struct Branches : nn::Module<Branches> {
  nn::Linear a{6, 5}, b{6, 5};
  Branches() {
    add("a", a);
    add("b", b);
  }
  Tensor forward(const Tensor& x, bool use_a, bool use_b) {  // (B, 6) -> (B, 5)
    if (use_a && use_b) return a(x) + b(x);
    return use_a ? a(x) : b(x);
  }
};

/// Adds its inputs up in a buffer, as running statistics do.
struct Counting : nn::Module<Counting> {
  nn::Linear out{6, 5};
  Tensor total = zeros({1});
  Counting() {
    add("out", out);
    add_buffer("total", total);
  }
  Tensor forward(const Tensor& x) {
    const NoGrad no_grad;
    total.add_(sum(x).reshape({1}));
    return {};
  }
  Tensor run(const Tensor& x) {
    (*this)(x);
    return out(x);
  }
};

struct Batch {
  Tensor x, y;
};

/// Batch `step`: `rows` samples of `features` numbers and one of 5 classes each, drawn on the CPU
/// so that they are the same everywhere.
inline Batch batch(std::int64_t step, std::int64_t rows, std::int64_t features,
                   Dtype dtype = Dtype::f32) {
  manual_seed(1000 + static_cast<std::uint64_t>(step));
  const Device device = world().device();
  return {randn({rows, features}).to(device, dtype), randint(0, 5, {rows}).to(device)};
}

/// Rank `rank`'s rows of a batch.
inline Batch part(const Batch& whole, int rank, int size) {
  const std::int64_t rows = whole.x.size(0) / size;
  return {whole.x.slice(0, rank * rows, (rank + 1) * rows).contiguous(),
          whole.y.slice(0, rank * rows, (rank + 1) * rows).contiguous()};
}
inline Batch my_part(const Batch& whole) { return part(whole, world().rank(), world().size()); }

/// Model M on the ranks' device, with the weights that `seed` gives.
template <class M, class... Args>
std::unique_ptr<M> make(std::uint64_t seed, Dtype dtype = Dtype::f32, const Args&... args) {
  manual_seed(seed);
  auto model = std::make_unique<M>(args...);
  model->to(world().device(), dtype);
  return model;
}

/// A step of plain gradient descent, in any dtype, and zero_grad.
inline void descend(const nn::ModuleBase& model, double lr) {
  const NoGrad no_grad;
  for (Tensor& p : model.parameters()) {
    p.sub_(p.grad() * lr);
    p.zero_grad();
  }
}

inline std::vector<std::vector<double>> gradients_of(const nn::ModuleBase& model) {
  std::vector<std::vector<double>> all;
  for (const Tensor& p : model.parameters())
    all.push_back(p.grad() ? p.grad().to_vector<double>() : std::vector<double>{});
  return all;
}
inline std::vector<std::vector<double>> values_of(const nn::ModuleBase& model) {
  std::vector<std::vector<double>> all;
  for (const nn::NamedTensor& n : model.state_dict()) all.push_back(n.tensor.to_vector<double>());
  return all;
}

inline Tensor loss(const Tensor& logits, const Batch& b) { return cross_entropy(logits, b.y); }

inline bool first_rank() { return world().rank() == 0; }
inline bool last_rank() { return world().rank() == world().size() - 1; }

/// Every number within `tolerance` of the largest in its tensor; 0: equal.
inline void expect_near(const std::vector<std::vector<double>>& got,
                        const std::vector<std::vector<double>>& expected, double tolerance) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t t = 0; t < got.size(); ++t) {
    ASSERT_EQ(got[t].size(), expected[t].size()) << "tensor " << t;
    double largest = 0, error = 0;
    for (std::size_t i = 0; i < got[t].size(); ++i) {
      largest = std::max(largest, std::abs(expected[t][i]));
      const double e = std::abs(got[t][i] - expected[t][i]);
      if (!(e <= error)) error = e;
    }
    EXPECT_LE(error, tolerance * largest) << "tensor " << t << " on rank " << world().rank();
  }
}

/// Rounding of sums of `terms` numbers in `dtype`, relative to the largest result.
inline double rounding(std::int64_t terms, Dtype dtype = Dtype::f32) {
  return unit_roundoff(dtype) * static_cast<double>(terms);
}

}  // namespace mixtape::testing
