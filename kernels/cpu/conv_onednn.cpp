// Convolution through oneDNN: our threads share the images out, in parts small enough that oneDNN's
// blocked copies of them stay in the cache, and every primitive runs on one thread.
//
// 16-bit types are computed in f32, converted part by part: on CPUs without AMX that is twice as
// fast as AVX-512's bfloat16 products, and fp16 has none. Where there are fewer images than
// threads, the channels of the output are shared out too.
#if defined(MIXTAPE_WITH_ONEDNN)

#include "engine/thread_pool.h"
#include "kernels/cpu/conv.h"
#include "kernels/cpu/conv_plan.h"
#include "kernels/cpu/onednn.h"
#include "kernels/cpu/scratch.h"

namespace mixtape::kernels::cpu::onednn {
namespace {

constexpr std::int64_t kPartFloats = 1 << 18;        // of x and y together, forward and data passes
constexpr std::int64_t kWeightPartFloats = 1 << 21;  // for weight gradients, which are added up
constexpr std::int64_t kPartialFloats = 1 << 24;     // of all partial weight gradients
constexpr std::int64_t kSliceChannels = 16;          // channels are cut at oneDNN's block size

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// Images [first, first + count), channels [channel, channel + channels).
Image sub_image(const Image& m, std::int64_t first, std::int64_t count, std::int64_t channel,
                std::int64_t channels) {
  Image part = m;
  part.data = m.at(first, channel, 0);
  part.count = count;
  part.channels = channels;
  return part;
}

/// Shape and strides of `part` as f32: its own if it is f32, else dense in the same order.
Image float_layout(const Image& part) {
  if (part.dtype == Dtype::f32) return part;
  Image m = part;
  m.dtype = Dtype::f32;
  m.channel = m.channels_last ? 1 : m.pixels();
  m.pixel = m.channels_last ? m.channels : 1;
  m.batch = m.elements();
  return m;
}
/// `part` as f32, in scratch memory and not yet filled where it has another type.
Image as_float(const Image& part, ScratchFrame& frame) {
  Image m = float_layout(part);
  if (part.dtype != Dtype::f32) m.data = frame.take<float>(part.count * part.elements());
  return m;
}

/// Calls f(a, b, n) for runs of n elements that are contiguous in both of two equal-shaped images.
template <class F>
void for_each_run(const Image& a, const Image& b, F&& f) {
  const bool last = a.channels_last;
  const std::int64_t outer = last ? a.pixels() : a.channels, inner = last ? a.channels : a.pixels();
  for (std::int64_t n = 0; n < a.count; ++n)
    for (std::int64_t i = 0; i < outer; ++i)
      last ? f(a.at(n, 0, i), b.at(n, 0, i), inner) : f(a.at(n, i, 0), b.at(n, i, 0), inner);
}

void convert_to_float(const Image& from, const Image& to) {
  if (from.dtype == Dtype::f32) return;
  for_each_run(from, to, [&](const void* src, void* dst, std::int64_t n) {
    load_elements(from.dtype, src, static_cast<float*>(dst), n);
  });
}
void convert_from_float(const Image& from, const Image& to) {
  if (to.dtype == Dtype::f32) return;
  for_each_run(from, to, [&](const void* src, void* dst, std::int64_t n) {
    store_elements(to.dtype, dst, static_cast<const float*>(src), n);
  });
}

/// How work is shared out: `parts` ranges of images times `slices` ranges of channels.
struct Split {
  std::int64_t parts, slices, images, channels;

  /// `channels` is cut only where groups == 1.
  static Split make(const ConvProblem& p, std::int64_t channels, std::int64_t floats_a_part) {
    const std::int64_t threads = num_threads(), images = p.x.count;
    const std::int64_t each = std::max<std::int64_t>(1, p.x.elements() + p.y.elements());
    const std::int64_t at_once = std::clamp<std::int64_t>(floats_a_part / each, 1, images);
    std::int64_t parts = ceil_div(images, at_once);
    parts = std::min(images, ceil_div(parts, threads) * threads);
    std::int64_t slices = 1;
    if (parts < threads && p.groups == 1)
      slices = std::min(ceil_div(threads, parts), ceil_div(channels, kSliceChannels));
    return {parts, slices, images, channels};
  }
  std::int64_t tasks() const { return parts * slices; }
  std::int64_t first_image(std::int64_t task) const { return images * (task % parts) / parts; }
  std::int64_t last_image(std::int64_t task) const { return images * (task % parts + 1) / parts; }
  std::int64_t slice(std::int64_t task) const { return task / parts; }
  std::int64_t first_channel(std::int64_t s) const {
    return slices == 1 ? 0 : std::min(channels, blocks_before(s) * kSliceChannels);
  }
  std::int64_t last_channel(std::int64_t s) const {
    return slices == 1 ? channels : std::min(channels, blocks_before(s + 1) * kSliceChannels);
  }

 private:
  std::int64_t blocks_before(std::int64_t s) const {
    return ceil_div(channels, kSliceChannels) * s / slices;
  }
};

float* load_bias(const ConvProblem& p, std::int64_t first, std::int64_t count,
                 ScratchFrame& frame) {
  if (!p.bias) return nullptr;
  float* const bias = frame.take<float>(count);
  load_elements(p.bias.dtype, element_address(p.bias.data, p.bias.dtype, first), bias, count);
  return bias;
}

/// One task's share of the problem, in the caller's memory.
ConvProblem part_of(ConvPass pass, const ConvProblem& p, const Split& split, std::int64_t task) {
  const bool forward = pass == ConvPass::forward;
  const std::int64_t first = split.first_image(task), count = split.last_image(task) - first;
  const std::int64_t slice = split.slice(task), channel = split.first_channel(slice);
  const std::int64_t channels = split.last_channel(slice) - channel;
  ConvProblem part = p;
  part.x = sub_image(p.x, first, count, forward ? 0 : channel, forward ? p.x.channels : channels);
  part.y = sub_image(p.y, first, count, forward ? channel : 0, forward ? channels : p.y.channels);
  if (p.groups == 1)
    part.w = forward ? sub_image(p.w, channel, channels, 0, p.w.channels)
                     : sub_image(p.w, 0, p.w.count, channel, channels);
  return part;
}

/// relu that keeps NaN; oneDNN's own makes it 0.
void apply_relu(const Image& y) {
  for_each_run(y, y, [](void* run, void*, std::int64_t n) {
    auto* const v = static_cast<float*>(run);
    for (std::int64_t i = 0; i < n; ++i) v[i] = v[i] <= 0 ? 0 : v[i];
  });
}

/// Reads the input image, executes and writes the output image.
void run_part(ConvPass pass, const ConvProblem& part, const float* bias, Plan& plan) {
  const bool forward = pass == ConvPass::forward;
  const Image &from = forward ? part.x : part.y, &to = forward ? part.y : part.x;
  PlanOperand &input = forward ? plan.x : plan.y, &output = forward ? plan.y : plan.x;
  ScratchFrame frame;
  const Image source = as_float(from, frame), result = as_float(to, frame);
  convert_to_float(from, source);
  input.read(source.data, frame);
  output.open(result.data, frame);
  if (bias != nullptr) plan.bias.set_data_handle(const_cast<float*>(bias));
  plan.execute(pass);
  output.write();
  if (part.activation == Activation::relu) apply_relu(result);
  convert_from_float(result, to);
}

/// Forward or backward data for tasks [begin, end): the slice is of y's or of x's channels. Weights
/// are brought into oneDNN's layout once for each slice and part size.
void run_tasks(ConvPass pass, const ConvProblem& p, const Split& split, std::int64_t begin,
               std::int64_t end) {
  const SingleOpenMpThread single;
  ScratchFrame frame;
  std::uint64_t ready = 0;  // number of the plan that holds the weights of
  std::int64_t ready_slice = -1;
  const float* bias = nullptr;
  for (std::int64_t task = begin; task < end; ++task) {
    const ConvProblem part = part_of(pass, p, split, task);
    const std::int64_t slice = split.slice(task);
    ConvProblem shapes = part;
    for (Image* m : {&shapes.x, &shapes.w, &shapes.y}) *m = float_layout(*m);
    Plan& plan = find_plan(pass, shapes);
    if (plan.number != ready || slice != ready_slice) {
      const Image weights = as_float(part.w, frame);
      convert_to_float(part.w, weights);
      plan.w.read(weights.data, frame);
      bias = load_bias(p, split.first_channel(slice), part.y.channels, frame);
      ready = plan.number;
      ready_slice = slice;
    }
    run_part(pass, part, bias, plan);
  }
}

/// The problem of a backward pass, which has no epilogue.
ConvProblem without_epilogue(ConvProblem p) {
  p.bias = View{};
  p.activation = Activation::none;
  return p;
}

void run(ConvPass pass, const ConvProblem& p) {
  const Split split =
      Split::make(p, pass == ConvPass::forward ? p.y.channels : p.x.channels, kPartFloats);
  parallel_for(0, split.tasks(), 1, [&](std::int64_t begin, std::int64_t end) {
    run_tasks(pass, p, split, begin, end);
  });
}

/// Partial weight gradients: as many ranges of images as there are threads and memory allows, and
/// slices of the output channels for the threads that are left.
Split weight_split(const ConvProblem& p) {
  const std::int64_t threads = num_threads(), all = p.w.count * p.w.elements();
  const std::int64_t affordable = std::max<std::int64_t>(1, kPartialFloats / all);
  Split split{std::min({threads, p.x.count, affordable}), 1, p.x.count, p.y.channels};
  if (split.parts < threads && p.groups == 1)
    split.slices = std::min(ceil_div(threads, split.parts), ceil_div(p.y.channels, kSliceChannels));
  return split;
}

/// dw of output channels [channel, channel + channels) over images [first, last), dense OIHW.
void weight_gradient(const ConvProblem& p, std::int64_t first, std::int64_t last,
                     std::int64_t channel, std::int64_t channels, float* out) {
  const SingleOpenMpThread single;
  const std::int64_t each = std::max<std::int64_t>(1, p.x.elements() + p.y.elements());
  const std::int64_t step = std::max<std::int64_t>(1, kWeightPartFloats / each);
  ConvProblem part = without_epilogue(p);
  Image& w = part.w;
  w = {out,     Dtype::f32,   channels,   w.channels, w.height,
       w.width, w.elements(), w.pixels(), 1,          false};
  const std::int64_t elements = channels * w.elements();
  for (std::int64_t n = first; n < last; n += step) {
    ScratchFrame frame;
    const std::int64_t count = std::min(step, last - n);
    const Image x = sub_image(p.x, n, count, 0, p.x.channels);
    const Image y = sub_image(p.y, n, count, channel, channels);
    part.x = as_float(x, frame);
    part.y = as_float(y, frame);
    convert_to_float(x, part.x);
    convert_to_float(y, part.y);
    float* const sums = n == first ? out : frame.take<float>(elements);
    Plan& plan = find_plan(ConvPass::backward_weight, part);
    plan.x.read(part.x.data, frame);
    plan.y.read(part.y.data, frame);
    plan.w.open(sums, frame);
    plan.execute(ConvPass::backward_weight);
    plan.w.write();
    if (sums != out)
      for (std::int64_t i = 0; i < elements; ++i) out[i] += sums[i];
  }
}

}  // namespace

void forward(const ConvProblem& p) { run(ConvPass::forward, p); }
void backward_data(const ConvProblem& p) { run(ConvPass::backward_data, without_epilogue(p)); }

std::size_t backward_weight_workspace_bytes(const ConvProblem& p) {
  return static_cast<std::size_t>(weight_split(p).parts * p.w.count * p.w.elements()) *
         sizeof(float);
}

void backward_weight(const ConvProblem& p, float beta, Workspace workspace) {
  const std::int64_t all = p.w.count * p.w.elements();
  Split split = weight_split(p);
  split.parts =
      std::min(split.parts, static_cast<std::int64_t>(workspace.bytes / sizeof(float)) / all);
  MT_CHECK(split.parts > 0, "conv2d_backward_weight: expected a workspace of at least ",
           all * sizeof(float), " bytes, got ", workspace.bytes);
  float* const partial = static_cast<float*>(workspace.data);
  parallel_for(0, split.tasks(), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t task = begin; task < end; ++task) {
      const std::int64_t slice = split.slice(task), channel = split.first_channel(slice);
      weight_gradient(p, split.first_image(task), split.last_image(task), channel,
                      split.last_channel(slice) - channel,
                      partial + task % split.parts * all + channel * p.w.elements());
    }
  });
  reduce_weight_gradients(p.w, partial, split.parts, p.w.pixels(), 1, beta);
}

}  // namespace mixtape::kernels::cpu::onednn
#endif
