#if defined(MIXTAPE_WITH_ONEDNN)

#include "kernels/cpu/conv_plan.h"

#include <array>
#include <unordered_map>

namespace mixtape::kernels::cpu::onednn {
namespace {

using Dims = dnnl::memory::dims;
using Desc = dnnl::memory::desc;
using Use = PlanOperand::Use;
constexpr auto kFloat = dnnl::memory::data_type::f32;
constexpr auto kDirect = dnnl::algorithm::convolution_direct;
constexpr std::size_t kMostPlans = 256;  // of one thread; all are dropped when there are more

const dnnl::engine& engine() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}
const dnnl::stream& stream() {
  static thread_local const dnnl::stream stream(engine());
  return stream;
}

Desc user_desc(const Image& m) {
  return Desc({m.count, m.channels, m.height, m.width}, kFloat,
              Dims{m.batch, m.channel, m.width * m.pixel, m.pixel});
}
Desc user_weights(const Image& w, std::int64_t groups) {
  if (groups == 1) return user_desc(w);
  const std::int64_t each = w.count / groups;
  return Desc({groups, each, w.channels, w.height, w.width}, kFloat,
              Dims{each * w.batch, w.batch, w.channel, w.width * w.pixel, w.pixel});
}

/// The layout to ask for: the caller's own when it is dense channels-last, in which oneDNN computes
/// at full speed, else whatever it likes.
Desc wanted_desc(const Image& m) {
  const bool dense = m.channels_last && m.pixel == m.channels;
  return Desc({m.count, m.channels, m.height, m.width}, kFloat,
              dense ? dnnl::memory::format_tag::nhwc : dnnl::memory::format_tag::any);
}

/// Arguments that the three passes share.
struct Shapes {
  Desc x, w, y, bias;
  Dims stride, padding, dilation;

  explicit Shapes(const ConvProblem& p)
      : x(wanted_desc(p.x)),
        y(wanted_desc(p.y)),
        stride{p.stride[0], p.stride[1]},
        padding{p.padding[0], p.padding[1]},
        dilation{p.dilation[0] - 1, p.dilation[1] - 1} {
    const auto any = dnnl::memory::format_tag::any;
    const Image& m = p.w;
    w = p.groups == 1
            ? Desc({m.count, m.channels, m.height, m.width}, kFloat, any)
            : Desc({p.groups, m.count / p.groups, m.channels, m.height, m.width}, kFloat, any);
    if (p.bias) bias = Desc({p.y.channels}, kFloat, dnnl::memory::format_tag::a);
  }
};

Plan make_plan(ConvPass pass, const ConvProblem& p) {
  const Shapes s(p);
  const dnnl::convolution_forward::primitive_desc forward(
      {dnnl::prop_kind::forward_training, kDirect, s.x, s.w, s.bias, s.y, s.stride, s.dilation,
       s.padding, s.padding},
      engine());
  static thread_local std::uint64_t plans_made = 0;
  const Desc x = user_desc(p.x), w = user_weights(p.w, p.groups), y = user_desc(p.y);
  Plan plan{};
  plan.number = ++plans_made;
  switch (pass) {
    case ConvPass::forward:
      plan.primitive = dnnl::convolution_forward(forward);
      plan.x = {x, forward.src_desc(), Use::input};
      plan.w = {w, forward.weights_desc(), Use::input};
      plan.y = {y, forward.dst_desc(), Use::output};
      if (p.bias) plan.bias = dnnl::memory(forward.bias_desc(), engine(), nullptr);
      break;
    case ConvPass::backward_data: {
      const dnnl::convolution_backward_data::primitive_desc d(
          {kDirect, s.x, s.w, s.y, s.stride, s.dilation, s.padding, s.padding}, engine(), forward);
      plan.primitive = dnnl::convolution_backward_data(d);
      plan.x = {x, d.diff_src_desc(), Use::output};
      plan.w = {w, d.weights_desc(), Use::input};
      plan.y = {y, d.diff_dst_desc(), Use::input};
      break;
    }
    case ConvPass::backward_weight: {
      const dnnl::convolution_backward_weights::primitive_desc d(
          {kDirect, s.x, s.w, s.y, s.stride, s.dilation, s.padding, s.padding}, engine(), forward);
      plan.primitive = dnnl::convolution_backward_weights(d);
      plan.x = {x, d.src_desc(), Use::input};
      plan.w = {w, d.diff_weights_desc(), Use::output};
      plan.y = {y, d.diff_dst_desc(), Use::input};
      break;
    }
  }
  return plan;
}

struct Key {
  std::array<std::int64_t, 31> values{};  // 3 images of 7, 3 pairs, 4 more
  friend bool operator==(const Key&, const Key&) = default;
};
struct HashKey {
  std::size_t operator()(const Key& key) const {
    std::uint64_t h = 0xCBF29CE484222325u;  // FNV-1a
    for (std::int64_t v : key.values) h = (h ^ static_cast<std::uint64_t>(v)) * 0x100000001B3u;
    return static_cast<std::size_t>(h ^ (h >> 32));
  }
};

Key make_key(ConvPass pass, const ConvProblem& p) {
  Key key;
  std::size_t i = 0;
  for (const Image* m : {&p.x, &p.w, &p.y})
    for (std::int64_t v :
         {m->count, m->channels, m->height, m->width, m->batch, m->channel, m->pixel})
      key.values[i++] = v;
  for (const auto& pair : {p.stride, p.padding, p.dilation})
    for (int d = 0; d < 2; ++d) key.values[i++] = pair[d];
  for (std::int64_t v :
       {p.groups, static_cast<std::int64_t>(pass), static_cast<std::int64_t>(p.bias ? 1 : 0),
        static_cast<std::int64_t>(p.activation)})
    key.values[i++] = v;
  return key;
}

}  // namespace

PlanOperand::PlanOperand(const Desc& user, const Desc& inner, Use use)
    : copied_(user != inner), user_(user, engine(), nullptr), inner_(inner, engine(), nullptr) {
  if (!copied_) return;
  reorder_ = use == Use::input ? dnnl::reorder(user_, inner_) : dnnl::reorder(inner_, user_);
}

void PlanOperand::open(void* data, ScratchFrame& frame) {
  if (!copied_) {
    inner_.set_data_handle(data);
    return;
  }
  user_.set_data_handle(data);
  inner_.set_data_handle(
      frame.take<std::byte>(static_cast<std::int64_t>(inner_.get_desc().get_size())));
}

void PlanOperand::read(void* data, ScratchFrame& frame) {
  open(data, frame);
  if (copied_) reorder_.execute(stream(), user_, inner_);
}

void PlanOperand::write() {
  if (copied_) reorder_.execute(stream(), inner_, user_);
}

void Plan::execute(ConvPass pass) const {
  switch (pass) {
    case ConvPass::forward:
      if (bias)
        primitive.execute(stream(), {{DNNL_ARG_SRC, x.memory()},
                                     {DNNL_ARG_WEIGHTS, w.memory()},
                                     {DNNL_ARG_BIAS, bias},
                                     {DNNL_ARG_DST, y.memory()}});
      else
        primitive.execute(stream(), {{DNNL_ARG_SRC, x.memory()},
                                     {DNNL_ARG_WEIGHTS, w.memory()},
                                     {DNNL_ARG_DST, y.memory()}});
      break;
    case ConvPass::backward_data:
      primitive.execute(stream(), {{DNNL_ARG_DIFF_SRC, x.memory()},
                                   {DNNL_ARG_WEIGHTS, w.memory()},
                                   {DNNL_ARG_DIFF_DST, y.memory()}});
      break;
    case ConvPass::backward_weight:
      primitive.execute(stream(), {{DNNL_ARG_SRC, x.memory()},
                                   {DNNL_ARG_DIFF_WEIGHTS, w.memory()},
                                   {DNNL_ARG_DIFF_DST, y.memory()}});
      break;
  }
}

Plan& find_plan(ConvPass pass, const ConvProblem& part) {
  static thread_local std::unordered_map<Key, Plan, HashKey> plans;
  const Key key = make_key(pass, part);
  const auto found = plans.find(key);
  if (found != plans.end()) return found->second;
  if (plans.size() >= kMostPlans) plans.clear();
  return plans.emplace(key, make_plan(pass, part)).first->second;
}

}  // namespace mixtape::kernels::cpu::onednn
#endif
