// Attention, forward and backward, against float64: causal and not, T != S, grouped queries, masks,
// dropout, head sizes of every kind, packed projections, on every device and backend. Bounds
// follow the terms that each result is a sum of.
#include "kernels/attention.h"

#include <functional>
#include <memory>

#include "engine/determinism.h"
#include "engine/thread_pool.h"
#include "kernels/random_math.h"
#include "tests/kernels/device_array.h"
#include "tests/kernels/numbers.h"
#include "tests/support/expect_error.h"

namespace mixtape::testing {
namespace {

using namespace kernels;
using Values = std::vector<double>;

struct Problem {
  std::int64_t b, h, g, t, s, d;
  bool causal = false;
  double dropout = 0;
  double scale = 0;  // 0: 1 / sqrt(d)
  double factor() const { return scale != 0 ? scale : 1 / std::sqrt(static_cast<double>(d)); }
  Shape q() const { return {b, h, t, d}; }
  Shape k() const { return {b, g, s, d}; }
};
std::ostream& operator<<(std::ostream& out, const Problem& p) {
  return out << "B " << p.b << " H " << p.h << " G " << p.g << " T " << p.t << " S " << p.s << " D "
             << p.d << (p.causal ? " causal" : "") << " dropout " << p.dropout;
}
constexpr PhiloxState kRandom{77, 5};

/// Values, (B, H, T, D) or (B, G, S, D); mask (B, H, T, S) is added to the scores, may be empty.
struct Inputs {
  Values q, k, v, dout, mask;
};
Inputs make_inputs(const Problem& p, Dtype dtype) {
  return {normals(dtype, p.q().numel(), 1),
          normals(dtype, p.k().numel(), 2),
          normals(dtype, p.k().numel(), 3),
          normals(dtype, p.q().numel(), 4),
          {}};
}

/// Results, and for each element the size of the terms it is a sum of.
struct Result {
  Values out, lse, dq, dk, dv;
};
struct Reference {
  Result value, size;
  double score_error = 0;  // largest |q| |k| scale of a score, which multiplies its roundings
};

double keep_factor(const Problem& p, std::int64_t row, std::int64_t s) {
  if (p.dropout == 0) return 1;
  const std::int64_t index = row * ((p.s + 3) / 4 * 4) + s;
  const float u = philox_uniform(kRandom, static_cast<std::uint64_t>(index));
  return u >= static_cast<float>(p.dropout) ? random_math::dropout_scale(p.dropout) : 0;
}

Reference reference(const Problem& p, const Inputs& in) {
  const auto nq = in.q.size(), nk = in.k.size(), d = static_cast<std::size_t>(p.d),
             keys = static_cast<std::size_t>(p.s);
  Reference r;
  for (Result* x : {&r.value, &r.size}) {
    x->out.assign(nq, 0), x->dq.assign(nq, 0), x->dk.assign(nk, 0), x->dv.assign(nk, 0);
    x->lse.assign(static_cast<std::size_t>(p.b * p.h * p.t), -kInfinity);
  }
  for (std::int64_t row = 0; row < p.b * p.h * p.t; ++row) {
    const std::int64_t t = row % p.t, h = row / p.t % p.h, b = row / p.t / p.h;
    const std::size_t q0 = static_cast<std::size_t>(row) * d;
    const std::size_t k0 = static_cast<std::size_t>(b * p.g + h / (p.h / p.g)) * keys * d;
    Values score(keys, -kInfinity), dp(keys), dp_size(keys);
    double top = -kInfinity, sum = 0, delta = 0, delta_size = 0;
    for (std::size_t s = 0; s < keys; ++s) {
      if (p.causal && static_cast<std::int64_t>(s) > t) continue;
      double product = 0, size = 0;
      for (std::size_t i = 0; i < d; ++i) {
        product += in.q[q0 + i] * in.k[k0 + s * d + i] * p.factor();
        size += std::abs(in.q[q0 + i] * in.k[k0 + s * d + i] * p.factor());
      }
      score[s] =
          product + (in.mask.empty() ? 0 : in.mask[static_cast<std::size_t>(row) * keys + s]);
      if (score[s] > -kInfinity) r.score_error = std::max(r.score_error, size);
      top = std::max(top, score[s]);
    }
    if (top == -kInfinity) continue;
    for (double& x : score) sum += x = std::exp(x - top);
    r.value.lse[static_cast<std::size_t>(row)] = top + std::log(sum);
    Values z(keys);
    for (std::size_t s = 0; s < keys; ++s) {
      score[s] /= sum;
      z[s] = keep_factor(p, row, static_cast<std::int64_t>(s));
      for (std::size_t i = 0; i < d; ++i) {
        const double pv = score[s] * z[s] * in.v[k0 + s * d + i];
        const double pg = score[s] * z[s] * in.dout[q0 + i];
        r.value.out[q0 + i] += pv, r.size.out[q0 + i] += std::abs(pv);
        r.value.dv[k0 + s * d + i] += pg, r.size.dv[k0 + s * d + i] += std::abs(pg);
        dp[s] += z[s] * in.dout[q0 + i] * in.v[k0 + s * d + i];
        dp_size[s] += std::abs(z[s] * in.dout[q0 + i] * in.v[k0 + s * d + i]);
      }
    }
    for (std::size_t i = 0; i < d; ++i) {
      delta += in.dout[q0 + i] * r.value.out[q0 + i];
      delta_size += std::abs(in.dout[q0 + i]) * r.size.out[q0 + i];
    }
    for (std::size_t s = 0; s < keys; ++s) {
      const double ds = score[s] * (dp[s] - delta) * p.factor();
      const double size = std::abs(score[s] * (dp_size[s] + delta_size) * p.factor());
      for (std::size_t i = 0; i < d; ++i) {
        r.value.dq[q0 + i] += ds * in.k[k0 + s * d + i];
        r.size.dq[q0 + i] += size * std::abs(in.k[k0 + s * d + i]);
        r.value.dk[k0 + s * d + i] += ds * in.q[q0 + i];
        r.size.dk[k0 + s * d + i] += size * std::abs(in.q[q0 + i]);
      }
    }
  }
  return r;
}

/// How the operands lie in memory.
enum class Layout : std::uint8_t {
  heads_first,  // each (B, H, T, D) contiguous
  rows_first,   // each (B, T, H, D), seen transposed, rows with a gap
  packed,       // q, k, v in one (B, T, H + 2 G, D); gradients too
};

/// A (B, H, T, D) operand in its own guarded memory.
std::unique_ptr<Buffer> operand(Device device, Dtype dtype, const Shape& n, Layout layout) {
  if (layout == Layout::heads_first) return std::make_unique<Buffer>(device, dtype, n);
  const std::int64_t row = n[1] * n[3] + 8;
  return std::make_unique<Buffer>(device, dtype, n, Shape{n[2] * row, n[3], row, 1});
}

/// q, k, v (or their gradients) in one of the layouts.
class Three {
 public:
  Three(Device device, Dtype dtype, const Problem& p, Layout layout) : p_(p), layout_(layout) {
    if (layout == Layout::packed) {
      parts_.push_back(
          std::make_unique<Buffer>(device, dtype, Shape{p.b, p.t, p.h + 2 * p.g, p.d}));
      return;
    }
    for (const Shape& n : {p.q(), p.k(), p.k()})
      parts_.push_back(operand(device, dtype, n, layout));
  }
  View view(int i) const {
    if (layout_ != Layout::packed) return parts_[static_cast<std::size_t>(i)]->view();
    View v = parts_[0]->view();
    const Shape n = v.sizes, s = v.strides;
    const std::int64_t first = i == 0 ? 0 : p_.h + (i - 1) * p_.g;
    v.data =
        static_cast<char*>(v.data) + first * p_.d * static_cast<std::int64_t>(size_of(v.dtype));
    v.sizes = {n[0], i == 0 ? p_.h : p_.g, n[1], n[3]};
    v.strides = {s[0], s[2], s[1], 1};
    return v;
  }
  void set(const Values& q, const Values& k, const Values& v) {
    if (layout_ != Layout::packed) {
      parts_[0]->set(q), parts_[1]->set(k), parts_[2]->set(v);
      return;
    }
    Values all;
    each_packed([&](int i, std::size_t at) { all.push_back((i == 0 ? q : i == 1 ? k : v)[at]); });
    parts_[0]->set(all);
  }
  std::array<Values, 3> get() {
    if (layout_ != Layout::packed) return {parts_[0]->get(), parts_[1]->get(), parts_[2]->get()};
    const Values all = parts_[0]->get();
    std::array<Values, 3> out = {Values(static_cast<std::size_t>(p_.q().numel())),
                                 Values(static_cast<std::size_t>(p_.k().numel())),
                                 Values(static_cast<std::size_t>(p_.k().numel()))};
    std::size_t from = 0;
    each_packed([&](int i, std::size_t at) { out[static_cast<std::size_t>(i)][at] = all[from++]; });
    return out;
  }
  void check_guards() {
    for (const auto& part : parts_) part->check_guards();
  }

 private:
  /// f(which of q, k, v; index in its (B, H, T, D) values) in the packed order.
  void each_packed(const std::function<void(int, std::size_t)>& f) const {
    for (std::int64_t b = 0; b < p_.b; ++b)
      for (std::int64_t t = 0; t < p_.t; ++t)
        for (std::int64_t h = 0; h < p_.h + 2 * p_.g; ++h)
          for (std::int64_t d = 0; d < p_.d; ++d) {
            const int i = h < p_.h ? 0 : h < p_.h + p_.g ? 1 : 2;
            const std::int64_t heads = i == 0 ? p_.h : p_.g,
                               head = i == 0 ? h : h - p_.h - (i - 1) * p_.g;
            f(i, static_cast<std::size_t>(((b * heads + head) * p_.t + t) * p_.d + d));
          }
  }
  Problem p_;
  Layout layout_;
  std::vector<std::unique_ptr<Buffer>> parts_;
};

struct Wanted {
  bool dq = true, dk = true, dv = true;
};

/// Runs both passes.
Result run(Device device, Dtype dtype, const Problem& p, const Inputs& in, Layout layout,
           const View& mask = {}, Wanted wanted = {}) {
  const Stream stream = Stream::current(device);
  Three qkv(device, dtype, p, layout), gradients(device, dtype, p, layout);
  qkv.set(in.q, in.k, in.v);
  const Layout other = layout == Layout::packed ? Layout::rows_first : layout;
  const auto out = operand(device, dtype, p.q(), other),
             dout = operand(device, dtype, p.q(), other);
  dout->set(in.dout);
  Buffer lse(device, compute_dtype(dtype), {p.b, p.h, p.t});
  AttentionArgs args;
  args.q = qkv.view(0);
  args.k = qkv.view(1);
  args.v = qkv.view(2);
  args.mask = mask;
  args.causal = p.causal;
  args.scale = p.factor();
  args.dropout = p.dropout;
  args.random = kRandom;
  AttentionForward forward;
  forward.out = out->view();
  forward.lse = lse.view();
  forward.args = args;
  attention_forward(stream, forward,
                    TestWorkspace(device, attention_forward_workspace_bytes(stream, forward)));
  Result r;
  r.out = out->get();
  r.lse = lse.get();
  AttentionBackward backward;
  if (wanted.dq) backward.dq = gradients.view(0);
  if (wanted.dk) backward.dk = gradients.view(1);
  if (wanted.dv) backward.dv = gradients.view(2);
  backward.dout = dout->view();
  backward.out = out->view();
  backward.lse = lse.view();
  backward.args = args;
  attention_backward(stream, backward,
                     TestWorkspace(device, attention_backward_workspace_bytes(stream, backward)));
  auto d = gradients.get();
  r.dq = std::move(d[0]), r.dk = std::move(d[1]), r.dv = std::move(d[2]);
  qkv.check_guards();
  gradients.check_guards();
  out->check_guards();
  lse.check_guards();
  return r;
}

void expect_matches(const Result& got, const Problem& p, const Inputs& in, Dtype dtype) {
  const Reference want = reference(p, in);
  const double u = compute_roundoff(dtype), store = unit_roundoff(dtype);
  // A score is a sum of D products; its absolute error is a relative one of the probability.
  const double score = 2 * (static_cast<double>(p.d) + 8) * u * want.score_error;
  const auto bounds = [&](const Values& size, double additions, double roundings) {
    Values bound(size.size());
    const double relative = score + (additions + 40) * u + roundings * store;
    for (std::size_t i = 0; i < size.size(); ++i)
      bound[i] = size[i] * relative + (dtype == Dtype::f16 ? 0x1p-23 : 0x1p-100);
    return bound;
  };
  // Results are rounded once; cuDNN rounds probabilities and dS to the storage type before their
  // products, and the backward pass reads a rounded out. Heads that share keys and values round
  // their parts of dk and dv before these are added.
  const double shared = p.h == p.g ? 0 : 1;
  const double keys = static_cast<double>(p.s), rows = static_cast<double>(p.t * p.h / p.g);
  const double d = static_cast<double>(p.d);
  {
    SCOPED_TRACE("out");
    expect_close(got.out, want.value.out, bounds(want.size.out, keys, 2));
  }
  {
    SCOPED_TRACE("lse");
    expect_close(got.lse, want.value.lse, score + (keys + 40) * u * 8, u);
  }
  {
    SCOPED_TRACE("dq");
    expect_close(got.dq, want.value.dq, bounds(want.size.dq, keys + d, 4));
  }
  {
    SCOPED_TRACE("dk");
    expect_close(got.dk, want.value.dk, bounds(want.size.dk, rows + d, 4 + shared));
  }
  {
    SCOPED_TRACE("dv");
    expect_close(got.dv, want.value.dv, bounds(want.size.dv, rows, 2 + shared));
  }
}

/// f(device) on each device and with each backend of it.
template <class F>
void on_each_backend(F&& f) {
  const AttentionBackend before = attention_backend();
  on_each_device([&](Device device) {
    for (const AttentionBackend backend : {AttentionBackend::automatic, AttentionBackend::own}) {
      if (device.is_cpu() && backend == AttentionBackend::own) continue;
      set_attention_backend(backend);
      SCOPED_TRACE(backend == AttentionBackend::own ? "own kernels" : "automatic");
      f(device);
    }
  });
  set_attention_backend(before);
}

const Problem kProblems[] = {
    {2, 3, 3, 17, 17, 8},
    {1, 4, 2, 37, 53, 40, true},
    {2, 4, 1, 65, 33, 64, true},
    {1, 2, 2, 129, 257, 64},
    {1, 2, 1, 301, 301, 64, true},
    {1, 2, 2, 64, 64, 128, true},
    {1, 2, 2, 50, 130, 128},
    {1, 2, 2, 31, 45, 33, true},
    {1, 1, 1, 40, 70, 256, true},
    {1, 1, 1, 1, 1, 1},
    {3, 1, 1, 1, 19, 16},
    {1, 6, 2, 5, 3, 7, true},
    {1, 1, 1, 260, 128, 24},
    {1, 1, 1, 33, 20, 200, false},
    {2, 2, 2, 48, 96, 80, true, 0, 0.3},
    {1, 2, 2, 16, 16, 64, false, 0, -0.2},
};

TEST(Attention, MatchesFloat64) {
  on_each_backend([](Device device) {
    for (const Problem& p : kProblems)
      for (const Dtype dtype : kFloatingDtypes)
        for (const Layout layout : {Layout::heads_first, Layout::rows_first}) {
          SCOPED_TRACE(::testing::Message()
                       << p << " " << dtype << " " << static_cast<int>(layout));
          const Inputs in = make_inputs(p, dtype);
          expect_matches(run(device, dtype, p, in, layout), p, in, dtype);
        }
  });
}

TEST(Attention, ReadsAndWritesOnePackedProjection) {
  on_each_backend([](Device device) {
    for (const Problem& p : {Problem{2, 4, 4, 65, 65, 64, true}, Problem{2, 6, 2, 33, 33, 40, true},
                             Problem{1, 3, 1, 21, 21, 33}, Problem{1, 2, 2, 130, 130, 128, true}})
      for (const Dtype dtype : kFloatingDtypes) {
        SCOPED_TRACE(::testing::Message() << p << " " << dtype);
        const Inputs in = make_inputs(p, dtype);
        expect_matches(run(device, dtype, p, in, Layout::packed), p, in, dtype);
      }
  });
}

/// Cases 9 and 24: masks of every shape reach the backward pass; rows without a key are 0.
TEST(Attention, MasksMatchFloat64) {
  on_each_backend([](Device device) {
    for (const Problem& p : {Problem{2, 4, 2, 35, 50, 16}, Problem{1, 2, 2, 60, 140, 64, true}})
      for (const Dtype dtype : kFloatingDtypes)
        for (const bool boolean : {true, false})
          for (const Shape& n : {Shape{p.b, p.h, p.t, p.s}, Shape{1, 1, p.t, p.s},
                                 Shape{p.b, 1, 1, p.s}, Shape{p.b, 1, p.t, 1}}) {
            SCOPED_TRACE(::testing::Message()
                         << p << " " << dtype << " mask " << n << (boolean ? " bool" : " added"));
            Inputs in = make_inputs(p, dtype);
            Values mask = normals(dtype, n.numel(), 9);
            for (std::size_t i = 0; i < mask.size(); ++i) {
              const bool hidden =
                  mask[i] > 0.7 || (n[2] > 1 && static_cast<std::int64_t>(i) / n[3] % n[2] == 3);
              mask[i] = boolean ? !hidden : hidden ? -kInfinity : mask[i];
            }
            const Buffer buffer(device, boolean ? Dtype::b8 : dtype, n, mask);
            const View view = buffer.view().expand_to({p.b, p.h, p.t, p.s});
            for (std::int64_t row = 0; row < p.b * p.h * p.t; ++row)
              for (std::int64_t s = 0; s < p.s; ++s) {
                const std::int64_t at[4] = {row / p.t / p.h, row / p.t % p.h, row % p.t, s};
                std::int64_t from = 0;
                for (int i = 0; i < 4; ++i) from = from * n[i] + (n[i] == 1 ? 0 : at[i]);
                const double m = mask[static_cast<std::size_t>(from)];
                in.mask.push_back(boolean ? (m != 0 ? 0 : -kInfinity) : m);
              }
            expect_matches(run(device, dtype, p, in, Layout::heads_first, view), p, in, dtype);
          }
  });
}

TEST(Attention, WhatReachesARowWithoutKeysDoesNotMatter) {  // case 24
  on_each_backend([](Device device) {
    const Problem p{1, 2, 1, 5, 6, 16};
    for (const Dtype dtype : kFloatingDtypes) {
      SCOPED_TRACE(dtype);
      Inputs in = make_inputs(p, dtype), poisoned = in;
      Values mask(static_cast<std::size_t>(p.t * p.s), 1);
      for (std::size_t s = 0; s < 6; ++s) mask[2 * 6 + s] = 0;
      const Buffer buffer(device, Dtype::b8, {p.t, p.s}, mask);
      const View view = buffer.view().expand_to({p.b, p.h, p.t, p.s});
      poisoned.dout[2 * 16] = kNaN;
      poisoned.dout[2 * 16 + 1] = kInfinity;
      const Result want = run(device, dtype, p, in, Layout::heads_first, view),
                   got = run(device, dtype, p, poisoned, Layout::heads_first, view);
      for (std::size_t i = 2 * 16; i < 3 * 16; ++i) {
        EXPECT_EQ(got.out[i], 0);
        EXPECT_EQ(got.dq[i], 0);
      }
      EXPECT_EQ(got.lse[2], -kInfinity);
      expect_same(got.dq, want.dq);
      expect_same(got.dk, want.dk);
      expect_same(got.dv, want.dv);
    }
  });
}

TEST(Attention, DropoutIsRemadeInBackward) {
  on_each_backend([](Device device) {
    for (const Problem& p :
         {Problem{2, 2, 2, 37, 37, 64, true, 0.2}, Problem{1, 4, 2, 50, 135, 24, false, 0.5},
          Problem{1, 1, 1, 20, 20, 16, false, 1}})
      for (const Dtype dtype : kFloatingDtypes) {
        SCOPED_TRACE(::testing::Message() << p << " " << dtype);
        const Inputs in = make_inputs(p, dtype);
        expect_matches(run(device, dtype, p, in, Layout::heads_first), p, in, dtype);
      }
  });
}

TEST(Attention, EmptySizes) {
  on_each_backend([](Device device) {
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      for (const Problem& p : {Problem{0, 2, 2, 4, 4, 64, true}, Problem{2, 2, 2, 0, 4, 64},
                               Problem{2, 2, 1, 3, 0, 64}, Problem{1, 2, 2, 0, 0, 64, true}}) {
        SCOPED_TRACE(::testing::Message() << p << " " << dtype);
        const Inputs in = make_inputs(p, dtype);
        expect_matches(run(device, dtype, p, in, Layout::heads_first), p, in, dtype);
      }
    }
  });
}

TEST(Attention, EachGradientAlone) {
  set_deterministic(true);
  on_each_backend([](Device device) {
    const Problem p{2, 4, 2, 70, 70, 64, true};
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      SCOPED_TRACE(dtype);
      const Inputs in = make_inputs(p, dtype);
      const Result all = run(device, dtype, p, in, Layout::heads_first);
      expect_same(run(device, dtype, p, in, Layout::heads_first, {}, {true, false, false}).dq,
                  all.dq);
      expect_same(run(device, dtype, p, in, Layout::heads_first, {}, {false, true, false}).dk,
                  all.dk);
      expect_same(run(device, dtype, p, in, Layout::heads_first, {}, {false, false, true}).dv,
                  all.dv);
    }
  });
  set_deterministic(false);
}

TEST(Attention, RunsAndThreadCountsAreBitEqual) {
  const int threads = num_threads();
  set_deterministic(true);
  on_each_backend([&](Device device) {
    // Fewer heads than threads, and more.
    for (const Problem& p : {Problem{1, 2, 1, 300, 300, 24, true}, Problem{2, 4, 2, 70, 200, 64}})
      for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
        SCOPED_TRACE(::testing::Message() << p << " " << dtype);
        const Inputs in = make_inputs(p, dtype);
        Result first;
        for (const int n : {1, 2, 3, 5, 5}) {
          set_num_threads(n);
          const Result r = run(device, dtype, p, in, Layout::heads_first);
          if (first.out.empty()) first = r;
          expect_same(r.out, first.out);
          expect_same(r.lse, first.lse);
          expect_same(r.dq, first.dq);
          expect_same(r.dk, first.dk);
          expect_same(r.dv, first.dv);
        }
      }
  });
  set_deterministic(false);
  set_num_threads(threads);
}

TEST(Attention, LargeScoresDoNotOverflow) {
  on_each_backend([](Device device) {
    const Problem p{1, 1, 1, 3, 3, 8, false, 0, 1};
    for (const Dtype dtype : kFloatingDtypes) {
      SCOPED_TRACE(dtype);
      Inputs in = make_inputs(p, dtype);
      for (double& x : in.q) x = 100;
      for (std::size_t i = 0; i < in.k.size(); ++i) in.k[i] = i < 8 ? 120 : -120;
      const Result r = run(device, dtype, p, in, Layout::heads_first);
      for (std::size_t i = 0; i < r.out.size(); ++i) EXPECT_EQ(r.out[i], in.v[i % 8]);
      for (const double x : r.lse) EXPECT_NEAR(x, 96000, 96000 * 0x1p-22);
      for (const Values* g : {&r.dq, &r.dk, &r.dv})
        for (const double x : *g) EXPECT_TRUE(std::isfinite(x));
    }
  });
}

TEST(Attention, NanStaysInItsRow) {
  on_each_backend([](Device device) {
    const Problem p{1, 1, 1, 4, 5, 8};
    for (const Dtype dtype : kFloatingDtypes) {
      SCOPED_TRACE(dtype);
      Inputs in = make_inputs(p, dtype);
      in.q[8 + 3] = kNaN;
      const Result r = run(device, dtype, p, in, Layout::heads_first);
      for (std::size_t i = 0; i < 8; ++i) {
        EXPECT_TRUE(std::isnan(r.out[8 + i]));
        EXPECT_TRUE(std::isfinite(r.out[i]));
        EXPECT_TRUE(std::isfinite(r.out[16 + i]));
      }
    }
  });
}

TEST(Attention, ChoosesABackendAndSaysWhich) {
  const AttentionBackend before = attention_backend();
  on_each_device([](Device device) {
    const auto choice = [&](Dtype dtype, const Problem& p) {
      const Three qkv(device, dtype, p, Layout::heads_first);
      const Buffer out(device, dtype, p.q());
      AttentionForward forward;
      forward.out = out.view();
      forward.args.q = qkv.view(0);
      forward.args.k = qkv.view(1);
      forward.args.v = qkv.view(2);
      forward.args.causal = p.causal;
      return attention_choice(forward);
    };
    const Problem usual{2, 4, 4, 64, 64, 64, true}, odd{2, 4, 4, 64, 64, 33, true};
    if (device.is_cpu()) {
      EXPECT_EQ(choice(Dtype::bf16, usual), "cpu");
      return;
    }
    set_attention_backend(AttentionBackend::automatic);
    const std::string fused = choice(Dtype::bf16, usual);
    EXPECT_TRUE(fused == "cudnn" || fused.find("own (cuDNN: ") == 0) << fused;
    for (const std::string& other : {choice(Dtype::f32, usual), choice(Dtype::bf16, odd)})
      EXPECT_EQ(other.find("own (cuDNN: "), 0u) << other;
    set_attention_backend(AttentionBackend::own);
    EXPECT_EQ(choice(Dtype::bf16, usual), "own");
    set_attention_backend(AttentionBackend::cudnn);
    expect_error([&] { choice(Dtype::f32, usual); }, "attention: expected");
  });
  set_attention_backend(before);
}

TEST(Attention, RefusesWhatTheContractExcludes) {
  on_each_device([](Device device) {
    const Buffer q(device, Dtype::f32, {1, 2, 3, 4}), k(device, Dtype::f32, {1, 2, 5, 4}),
        half(device, Dtype::f16, {1, 2, 5, 4}), three(device, Dtype::f32, {1, 3, 5, 4}),
        wide(device, Dtype::f32, {1, 2, 3, 4}, Shape{48, 24, 8, 2}),
        lse(device, Dtype::f32, {1, 2, 3});
    AttentionForward f;
    f.out = q.view();
    f.args.q = q.view();
    f.args.k = f.args.v = k.view();
    const auto with = [&](const std::function<void(AttentionForward&)>& change,
                          const std::string& text) {
      AttentionForward changed = f;
      change(changed);
      expect_error([&] { attention_forward(Stream::current(device), changed, Workspace{}); }, text);
    };
    with([&](AttentionForward& a) { a.args.v = half.view(); }, "expected values of float32");
    with([&](AttentionForward& a) { a.args.k = a.args.v = three.view(); }, "H a multiple of G");
    with([&](AttentionForward& a) { a.args.q = wide.view(); }, "expected a last stride of 1");
    with([&](AttentionForward& a) { a.out = wide.view(); }, "expected a last stride of 1 for out");
    with([&](AttentionForward& a) { a.args.mask = q.view(); }, "floating mask (1, 2, 3, 5)");
    with([&](AttentionForward& a) { a.args.dropout = 1.5; }, "expected a dropout in [0, 1]");
    with([&](AttentionForward& a) { a.lse = q.view(); }, "expected a contiguous lse");
  });
}

}  // namespace
}  // namespace mixtape::testing
