// Gathering and scattering against plain loops in float64: every dimension, strides, index and
// value dtypes, repeated and padding indices, both values of beta, indices out of range.
#include "kernels/index.h"

#include <string>

#include "tests/kernels/layouts.h"

namespace mixtape::testing {
namespace {

using namespace kernels;
using Values = std::vector<double>;

struct Input {
  const char* name;
  Shape sizes, strides;
};
std::vector<Input> inputs() {
  return {
      {"vector", {50}, {1}},
      {"step_vector", {50}, {3}},
      {"matrix", {40, 33}, {33, 1}},
      {"wide", {6, 1300}, {1300, 1}},
      {"sliced", {40, 33}, {50, 1}},
      {"transposed", {33, 40}, {1, 33}},
      {"cube", {5, 6, 7}, {42, 7, 1}},
      {"permuted_cube", {5, 6, 7}, {1, 35, 5}},
      {"one_wide", {9, 1, 4}, {4, 4, 1}},
      {"four", {2, 3, 4, 5}, {60, 20, 5, 1}},
  };
}

/// Row-major strides with the layout's element order reversed when it is not row-major itself, so
/// that outputs are strided too.
Shape strides_for(const Shape& sizes, bool reversed) {
  if (!reversed) return contiguous_strides(sizes);
  Shape s = Shape::filled(sizes.size(), 1);
  for (int d = 1; d < sizes.size(); ++d) s[d] = s[d - 1] * std::max<std::int64_t>(1, sizes[d - 1]);
  return s;
}

Values random_indices(std::int64_t n, std::int64_t bound, unsigned seed) {
  std::mt19937 generator(seed);
  std::uniform_int_distribution<std::int64_t> draw(0, bound - 1);
  Values v(static_cast<std::size_t>(n));
  for (double& i : v) i = static_cast<double>(draw(generator));
  return v;
}

/// Calls f(position) for every position of `sizes` in row-major order.
template <class F>
void for_each_position(const Shape& sizes, F&& f) {
  Shape p = Shape::filled(sizes.size(), 0);
  for (std::int64_t i = 0, n = sizes.numel(); i < n; ++i) {
    f(p);
    for (int d = sizes.size() - 1; d >= 0; --d) {
      if (++p[d] < sizes[d]) break;
      p[d] = 0;
    }
  }
}
std::size_t flat(const Shape& p, const Shape& sizes) {
  std::int64_t i = 0;
  for (int d = 0; d < sizes.size(); ++d) i = i * sizes[d] + p[d];
  return static_cast<std::size_t>(i);
}

class Index : public ::testing::TestWithParam<Device> {
 protected:
  Device device() const { return GetParam(); }
  Stream stream() const { return Stream::current(device()); }

  struct Scratch {
    Device device;
    Block block;
    Workspace workspace;
    Scratch(Device d, std::int64_t count, const Shape& out, int dim) : device(d) {
      const std::int64_t rows = out.empty() ? 1 : out[dim];
      const std::int64_t width = rows == 0 ? 0 : out.numel() / rows;
      const std::size_t bytes = index_add_workspace_bytes(device, count, rows, width);
      block = allocator_of(device).allocate(bytes, Stream::current(device));
      workspace = {block.data, bytes};
    }
    ~Scratch() { allocator_of(device).release(block); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
  };

  void add(Buffer& out, const Shape& sizes, float beta, int dim, const Buffer& index,
           const Buffer& src, std::int64_t padding = -1) {
    const Scratch scratch(device(), index.view().numel(), sizes, dim);
    index_add(stream(), "index_add", out.view(), beta, dim, index.view(), src.view(), padding,
              scratch.workspace);
    stream().synchronize();
    out.check_guards();
  }
  void scatter(Buffer& out, const Shape& sizes, float beta, int dim, const Buffer& index,
               const Buffer& src) {
    const Scratch scratch(device(), index.view().numel(), sizes, dim);
    scatter_add(stream(), "scatter_add", out.view(), beta, dim, index.view(), src.view(),
                scratch.workspace);
    stream().synchronize();
    out.check_guards();
  }
  /// f throws an Error that names the op and the value, at once or at the next synchronisation.
  template <class F>
  void expect_out_of_range(F&& f, const std::string& op, const std::string& value) {
    try {
      f();
      stream().synchronize();
      FAIL() << "expected an error from " << op;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(op), std::string::npos) << e.what();
      EXPECT_NE(std::string(e.what()).find(value), std::string::npos) << e.what();
    }
  }
};

constexpr Dtype kValueDtypes[] = {Dtype::f32, Dtype::f64, Dtype::f16, Dtype::bf16,
                                  Dtype::i64, Dtype::i32, Dtype::u8,  Dtype::b8};

TEST_P(Index, SelectsAlongEveryDimension) {
  for (Dtype dtype : kValueDtypes) {
    for (const Input& in : inputs()) {
      for (int dim = 0; dim < in.sizes.size(); ++dim) {
        for (std::int64_t count : {0, 1, 17}) {
          SCOPED_TRACE(std::string(in.name) + " dim " + std::to_string(dim) + " " +
                       std::string(name_of(dtype)));
          Values v = normals(Dtype::f32, in.sizes.numel(), 51, 20);
          for (double& e : v) e = dtype == Dtype::b8 ? e > 0 : std::trunc(std::fabs(e));
          Buffer x(device(), dtype, in.sizes, in.strides, v);
          const Values k = random_indices(count, in.sizes[dim], 52);
          const bool narrow = count == 17;
          Buffer index(device(), narrow ? Dtype::i32 : Dtype::i64, Shape{count},
                       Shape{narrow ? 2 : 1}, k);
          Shape sizes = in.sizes;
          sizes[dim] = count;
          Buffer out(device(), dtype, sizes, strides_for(sizes, dim % 2 == 1));
          index_select(stream(), "index_select", out.view(), x.view(), dim, index.view());
          Values want;
          for_each_position(sizes, [&](Shape p) {
            p[dim] = static_cast<std::int64_t>(k[static_cast<std::size_t>(p[dim])]);
            want.push_back(v[flat(p, in.sizes)]);
          });
          expect_same(out.get(), want);
          out.check_guards();
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_P(Index, SelectConvertsFloats) {
  Buffer x(device(), Dtype::f32, {3, 2}, Values{1.0001, 2, 3, 4, 5, 6});
  Buffer index(device(), Dtype::i64, {2}, Values{2, 0}), out(device(), Dtype::bf16, {2, 2});
  index_select(stream(), "embedding", out.view(), x.view(), 0, index.view());
  expect_same(out.get(), {5, 6, 1, 2});
}

TEST_P(Index, AddsAlongEveryDimension) {
  for (Dtype dtype : {Dtype::f32, Dtype::f64, Dtype::f16, Dtype::bf16, Dtype::i64}) {
    for (const Input& in : inputs()) {
      for (int dim = 0; dim < in.sizes.size(); ++dim) {
        for (float beta : {0.0f, 1.0f}) {
          SCOPED_TRACE(std::string(in.name) + " dim " + std::to_string(dim) + " " +
                       std::string(name_of(dtype)) + " beta " + std::to_string(beta));
          const std::int64_t count = 29;
          const auto draw = [&](const Shape& s, unsigned seed) {
            Values v = normals(is_floating(dtype) ? dtype : Dtype::f32, s.numel(), seed, 3);
            if (!is_floating(dtype))
              for (double& e : v) e = std::trunc(e);
            return v;
          };
          Shape src_sizes = in.sizes;
          src_sizes[dim] = count;
          const Values before = draw(in.sizes, 53), added = draw(src_sizes, 54);
          const Values k = random_indices(count, in.sizes[dim], 55);
          Buffer out(device(), dtype, in.sizes, in.strides);
          if (beta != 0) out.set(before);
          Buffer src(device(), dtype, src_sizes, strides_for(src_sizes, dim % 2 == 0), added);
          Buffer index(device(), Dtype::i64, {count}, k);
          add(out, in.sizes, beta, dim, index, src);
          Values want = beta != 0 ? before : Values(before.size(), 0.0), size(want.size());
          for (std::size_t i = 0; i < want.size(); ++i) size[i] = std::fabs(want[i]);
          for_each_position(src_sizes, [&](const Shape& p) {
            Shape q = p;
            q[dim] = static_cast<std::int64_t>(k[static_cast<std::size_t>(p[dim])]);
            want[flat(q, in.sizes)] += added[flat(p, src_sizes)];
            size[flat(q, in.sizes)] += std::fabs(added[flat(p, src_sizes)]);
          });
          Values bound(want.size());
          if (is_floating(dtype))
            for (std::size_t i = 0; i < want.size(); ++i)
              bound[i] = unit_roundoff(dtype) * std::fabs(want[i]) +
                         static_cast<double>(count) * compute_roundoff(dtype) * size[i];
          expect_close(out.get(), want, bound);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// CASES 29: one row hit 1000 times in bf16 is 1000, not 256.
TEST_P(Index, RepeatedIndicesAccumulateInFloat) {
  const std::int64_t n = 1000, width = 5;
  for (Dtype dtype : {Dtype::bf16, Dtype::f16}) {
    Buffer out(device(), dtype, {3, width});
    Buffer index(device(), Dtype::i64, {n}, Values(n, 1.0));
    Buffer src(device(), dtype, {n, width}, Values(n * width, 1.0));
    add(out, {3, width}, 0, 0, index, src);
    Values want(15, 0.0);
    for (std::size_t i = 5; i < 10; ++i) want[i] = 1000;
    expect_same(out.get(), want);
    Buffer vector(device(), dtype, {4}), ones(device(), dtype, {n}, Values(n, 1.0));
    scatter(vector, {4}, 0, 0, index, ones);
    expect_same(vector.get(), {0, 1000, 0, 0});
  }
}

// CASES 27: more than 768 indices, all of them the padding row.
TEST_P(Index, PaddingRowsAreSkipped) {
  const std::int64_t n = 769, width = 8;
  Buffer index(device(), Dtype::i64, {n}, Values(n, 2.0));
  Buffer src(device(), Dtype::f32, {n, width}, Values(n * width, 1.0));
  Buffer out(device(), Dtype::f32, {4, width});
  add(out, {4, width}, 0, 0, index, src, 2);
  expect_same(out.get(), Values(32, 0.0));
  out.set(Values(32, 5.0));
  add(out, {4, width}, 1, 0, index, src, 2);
  expect_same(out.get(), Values(32, 5.0));
  add(out, {4, width}, 1, 0, index, src, 1);
  Values want(32, 5.0);
  for (std::size_t i = 16; i < 24; ++i) want[i] += 769;
  expect_same(out.get(), want);
}

TEST_P(Index, NothingToAdd) {
  Buffer index(device(), Dtype::i64, {0}), src(device(), Dtype::f32, {0, 3});
  Buffer out(device(), Dtype::f32, {2, 3}), empty(device(), Dtype::f32, {2, 0}),
      none(device(), Dtype::f32, {4, 0});
  Buffer four(device(), Dtype::i64, {4}, Values(4, 1.0));
  add(out, {2, 3}, 0, 0, index, src);
  expect_same(out.get(), Values(6, 0.0));
  out.set(Values(6, 2.0));
  add(out, {2, 3}, 1, 0, index, src);
  expect_same(out.get(), Values(6, 2.0));
  add(empty, {2, 0}, 0, 0, four, none);
  Buffer no_index(device(), Dtype::i64, {0, 3});
  scatter(out, {2, 3}, 0, 0, no_index, src);
  expect_same(out.get(), Values(6, 0.0));
}

TEST_P(Index, GathersAlongEveryDimension) {
  for (Dtype dtype : kValueDtypes) {
    for (const Input& in : inputs()) {
      for (int dim = 0; dim < in.sizes.size(); ++dim) {
        SCOPED_TRACE(std::string(in.name) + " dim " + std::to_string(dim) + " " +
                     std::string(name_of(dtype)));
        Values v = normals(Dtype::f32, in.sizes.numel(), 56, 20);
        for (double& e : v) e = dtype == Dtype::b8 ? e > 0 : std::trunc(std::fabs(e));
        Buffer x(device(), dtype, in.sizes, in.strides, v);
        Shape sizes = in.sizes;  // longer along dim, one shorter elsewhere
        for (int d = 0; d < sizes.size(); ++d)
          sizes[d] = d == dim ? sizes[d] + 4 : std::max<std::int64_t>(1, sizes[d] - 1);
        const Values k = random_indices(sizes.numel(), in.sizes[dim], 57);
        Buffer index(device(), dim % 2 ? Dtype::i32 : Dtype::i64, sizes,
                     strides_for(sizes, dim == 1), k);
        Buffer out(device(), dtype, sizes, strides_for(sizes, dim == 0));
        gather(stream(), "gather", out.view(), x.view(), dim, index.view());
        Values want;
        for_each_position(sizes, [&](Shape p) {
          p[dim] = static_cast<std::int64_t>(k[flat(p, sizes)]);
          want.push_back(v[flat(p, in.sizes)]);
        });
        expect_same(out.get(), want);
        out.check_guards();
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(Index, ScattersAlongEveryDimension) {
  for (Dtype dtype : {Dtype::f32, Dtype::f64, Dtype::f16, Dtype::bf16, Dtype::i64}) {
    for (const Input& in : inputs()) {
      for (int dim = 0; dim < in.sizes.size(); ++dim) {
        for (float beta : {0.0f, 1.0f}) {
          SCOPED_TRACE(std::string(in.name) + " dim " + std::to_string(dim) + " " +
                       std::string(name_of(dtype)));
          Shape sizes = in.sizes;
          for (int d = 0; d < sizes.size(); ++d)
            sizes[d] = d == dim ? sizes[d] + 9 : std::max<std::int64_t>(1, sizes[d] - 1);
          Values before =
              normals(dtype == Dtype::i64 ? Dtype::f32 : dtype, in.sizes.numel(), 58, 3);
          Values added = normals(dtype == Dtype::i64 ? Dtype::f32 : dtype, sizes.numel(), 59, 3);
          if (dtype == Dtype::i64) {
            for (double& e : before) e = std::trunc(e);
            for (double& e : added) e = std::trunc(e);
          }
          const Values k = random_indices(sizes.numel(), in.sizes[dim], 60);
          Buffer out(device(), dtype, in.sizes, in.strides);
          if (beta != 0) out.set(before);
          Buffer index(device(), Dtype::i64, sizes, strides_for(sizes, dim == 1), k);
          Buffer src(device(), dtype, sizes, strides_for(sizes, dim == 0), added);
          scatter(out, in.sizes, beta, dim, index, src);
          Values want = beta != 0 ? before : Values(before.size(), 0.0), size(want.size());
          for (std::size_t i = 0; i < want.size(); ++i) size[i] = std::fabs(want[i]);
          for_each_position(sizes, [&](const Shape& p) {
            Shape q = p;
            q[dim] = static_cast<std::int64_t>(k[flat(p, sizes)]);
            want[flat(q, in.sizes)] += added[flat(p, sizes)];
            size[flat(q, in.sizes)] += std::fabs(added[flat(p, sizes)]);
          });
          Values bound(want.size());
          if (is_floating(dtype))
            for (std::size_t i = 0; i < want.size(); ++i)
              bound[i] = unit_roundoff(dtype) * std::fabs(want[i]) +
                         static_cast<double>(sizes[dim]) * compute_roundoff(dtype) * size[i];
          expect_close(out.get(), want, bound);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// CASES 26 for indices: no read or write out of bounds, and an error that says what was given.
TEST_P(Index, OutOfRangeIsAnErrorThatNamesOpAndValue) {
  Buffer x(device(), Dtype::f32, {3, 4}, Values(12, 1.0));
  for (double bad : {-1.0, 3.0, 1e15}) {
    const std::string value = std::to_string(static_cast<std::int64_t>(bad));
    Buffer index(device(), Dtype::i64, {2}, Values{0, bad}), out(device(), Dtype::f32, {2, 4});
    expect_out_of_range(
        [&] { index_select(stream(), "embedding", out.view(), x.view(), 0, index.view()); },
        "embedding", value);
    out.check_guards();
    Buffer sum(device(), Dtype::f32, {3, 4}, Values(12, 0.0)),
        src(device(), Dtype::f32, {2, 4}, Values(8, 1.0));
    const Scratch scratch(device(), 2, {3, 4}, 0);
    expect_out_of_range(
        [&] {
          index_add(stream(), "index_add", sum.view(), 1, 0, index.view(), src.view(), -1,
                    scratch.workspace);
        },
        "index_add", value);
    sum.check_guards();
    Buffer grid(device(), Dtype::i64, {1, 2}, Values{0, bad}), picked(device(), Dtype::f32, {1, 2});
    expect_out_of_range(
        [&] { gather(stream(), "gather", picked.view(), x.view(), 0, grid.view()); }, "gather",
        value);
    picked.check_guards();
    View two = src.view();
    two.sizes = {1, 2};
    const Scratch more(device(), 2, {3, 4}, 0);
    expect_out_of_range(
        [&] {
          scatter_add(stream(), "scatter_add", sum.view(), 1, 0, grid.view(), two, more.workspace);
        },
        "scatter_add", value);
    sum.check_guards();
  }
}

TEST_P(Index, RunsAndThreadCountsAreBitEqual) {
  const std::int64_t n = 3000, rows = 200, width = 96;
  Buffer index(device(), Dtype::i64, {n}, random_indices(n, rows, 61));
  Buffer src(device(), Dtype::f32, {n, width}, normals(Dtype::f32, n * width, 62));
  Buffer grid(device(), Dtype::i64, {n, 8}, random_indices(n * 8, rows, 63));
  View narrow = src.view();
  narrow.sizes = {n, 8};
  Values first;
  for_thread_counts([&](int) {
    Buffer sums(device(), Dtype::f32, {rows, width}), scattered(device(), Dtype::bf16, {rows, 8});
    add(sums, {rows, width}, 0, 0, index, src);
    const Scratch scratch(device(), n * 8, {rows, 8}, 0);
    scatter_add(stream(), "scatter_add", scattered.view(), 0, 0, grid.view(), narrow,
                scratch.workspace);
    Values all = sums.get();
    const Values more = scattered.get();
    all.insert(all.end(), more.begin(), more.end());
    if (first.empty()) first = all;
    expect_same(all, first);
  });
}

INSTANTIATE_TEST_SUITE_P(Devices, Index, ::testing::ValuesIn(test_devices()),
                         [](const auto& info) { return device_name(info.param); });

}  // namespace
}  // namespace mixtape::testing
