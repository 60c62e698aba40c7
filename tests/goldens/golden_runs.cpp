#include "tests/goldens/golden_runs.h"

#include "ops/ops.h"

namespace mixtape::testing {
namespace {

enum class OpId : std::uint8_t {
#define MT_OP(function) function,
#include "ops/ops.def"
};
/// Deleted unless specialised below, so that an op in ops.def without a golden does not compile.
template <OpId>
Results run_op(const Call& call) = delete;

#define MT_RUN(function) \
  template <>            \
  Results run_op<OpId::function>([[maybe_unused]] const Call& call)

// ---- elementwise -------------------------------------------------------------------------------

#define MT_UNARY(function, Functor) \
  MT_RUN(function) { return {mixtape::function(call.in[0])}; }
#define MT_BINARY(function, Functor)                                         \
  MT_RUN(function) {                                                         \
    if (call.c.has_attr("number_left"))                                      \
      return {mixtape::function(call.c.number("number_left"), call.in[0])};  \
    if (call.c.has_attr("number_right"))                                     \
      return {mixtape::function(call.in[0], call.c.number("number_right"))}; \
    return {mixtape::function(call.in[0], call.in[1])};                      \
  }
#include "kernels/elementwise.def"

MT_RUN(clamp) {
  const auto bound = [&](const char* name) {
    return call.c.word(name) == "none" ? std::nullopt : std::optional(call.c.number(name));
  };
  return {clamp(call.in[0], bound("lo"), bound("hi"))};
}
MT_RUN(where) {
  if (call.c.has_attr("number_left"))
    return {where(call.in[0], call.c.number("number_left"), call.in[1])};
  if (call.c.has_attr("number_right"))
    return {where(call.in[0], call.in[1], call.c.number("number_right"))};
  return {where(call.in[0], call.in[1], call.in[2])};
}
MT_RUN(cast) {
  const std::string& to = call.c.word("to");
  return {cast(call.in[0], to == "f16"    ? Dtype::f16
                           : to == "bf16" ? Dtype::bf16
                           : to == "f64"  ? Dtype::f64
                                          : Dtype::f32)};
}

// ---- reductions --------------------------------------------------------------------------------

bool keepdim(const Call& call) { return call.c.integer("keepdim") != 0; }
int dim(const Call& call) { return static_cast<int>(call.c.integer("dim")); }

MT_RUN(sum) { return {sum(call.in[0], call.c.list("dims"), keepdim(call))}; }
MT_RUN(mean) { return {mean(call.in[0], call.c.list("dims"), keepdim(call))}; }
MT_RUN(var) {
  return {var(call.in[0], call.c.list("dims"), call.c.number("correction"), keepdim(call))};
}
MT_RUN(max) {
  if (!call.c.has_attr("dim")) return {max(call.in[0])};
  const MaxResult r = max(call.in[0], dim(call), keepdim(call));
  return {r.values, r.indices};
}
MT_RUN(argmax) { return {argmax(call.in[0], dim(call), keepdim(call))}; }
MT_RUN(sum_to) { return {sum_to(call.in[0], call.c.list("sizes"))}; }

// ---- products ----------------------------------------------------------------------------------

Act act(const Call& call) {
  const std::pair<const char*, Act> names[] = {{"none", Act::none},
                                               {"relu", Act::relu},
                                               {"gelu_tanh", Act::gelu_tanh},
                                               {"gelu", Act::gelu},
                                               {"silu", Act::silu}};
  for (const auto& [name, value] : names) {
    if (call.c.word("act") == name) return value;
  }
  MT_THROW("golden case ", call.c.name, ": expected an activation, got ", call.c.word("act"));
}

MT_RUN(matmul) { return {matmul(call.in[0], call.in[1])}; }
MT_RUN(linear) { return {linear(call.in[0], call.in[1], call.optional(2), {.act = act(call)})}; }

MT_RUN(mlp) {
  return {mlp(call.in[0], call.in[1], call.optional(3), call.in[2], call.optional(4),
              {.act = act(call)})};
}

// ---- shape -------------------------------------------------------------------------------------

MT_RUN(reshape) { return {reshape(call.in[0], call.c.list("sizes"))}; }
MT_RUN(permute) { return {permute(call.in[0], call.c.list("dims"))}; }
MT_RUN(transpose) {
  const Shape d = call.c.list("dims");
  return {transpose(call.in[0], static_cast<int>(d[0]), static_cast<int>(d[1]))};
}
MT_RUN(expand) { return {expand(call.in[0], call.c.list("sizes"))}; }
MT_RUN(slice) {
  return {slice(call.in[0], dim(call), call.c.integer("start"), call.c.integer("stop"),
                call.c.integer("step"))};
}
MT_RUN(cat) { return {cat(call.in, dim(call))}; }
MT_RUN(stack) { return {stack(call.in, dim(call))}; }

// ---- indexing ----------------------------------------------------------------------------------

MT_RUN(index_select) { return {index_select(call.in[0], dim(call), call.in[1])}; }
MT_RUN(gather) { return {gather(call.in[0], dim(call), call.in[1])}; }
MT_RUN(scatter_add) { return {scatter_add(call.in[0], dim(call), call.in[1], call.in[2])}; }
MT_RUN(embedding) { return {embedding(call.in[0], call.in[1], call.c.integer("padding"))}; }

// ---- softmax, losses, norms --------------------------------------------------------------------

Reduction reduction(const Call& call) {
  const std::string& name = call.c.word("reduction");
  return name == "mean" ? Reduction::mean : name == "sum" ? Reduction::sum : Reduction::none;
}

MT_RUN(softmax) { return {softmax(call.in[0], dim(call))}; }
MT_RUN(log_softmax) { return {log_softmax(call.in[0], dim(call))}; }
MT_RUN(cross_entropy) {
  return {cross_entropy(call.in[0], call.in[1],
                        {.ignore_index = call.c.integer("ignore_index"),
                         .label_smoothing = static_cast<float>(call.c.number("label_smoothing")),
                         .reduction = reduction(call)})};
}
MT_RUN(linear_cross_entropy) {
  return {
      linear_cross_entropy(call.in[0], call.in[1], call.in[2],
                           {.ignore_index = call.c.integer("ignore_index"),
                            .label_smoothing = static_cast<float>(call.c.number("label_smoothing")),
                            .reduction = reduction(call),
                            .chunk_rows = call.c.integer("chunk_rows")})};
}
MT_RUN(mse_loss) { return {mse_loss(call.in[0], call.in[1], reduction(call))}; }
MT_RUN(layer_norm) {
  return {layer_norm(call.in[0], call.c.list("normalized"), call.optional(1), call.optional(2),
                     call.c.number("eps"))};
}
MT_RUN(add_layer_norm) {
  const AddLayerNormResult r =
      add_layer_norm(call.in[0], call.in[1], call.optional(2), call.optional(3));
  return {r.normalized, r.sum};
}
MT_RUN(rms_norm) {
  return {rms_norm(call.in[0], call.c.list("normalized"), call.optional(1), call.c.number("eps"))};
}
MT_RUN(add_rms_norm) {
  const AddRmsNormResult r = add_rms_norm(call.in[0], call.in[1], call.optional(2));
  return {r.normalized, r.sum};
}
MT_RUN(batch_norm) {
  const Tensor& x = call.in[0];
  const bool residual = call.c.integer("residual") != 0;
  Tensor mean, var;  // 0, 1/4, 2/4, .. and 1, 3/2, 4/2, ..
  if (call.c.integer("tracked") != 0) {
    const Tensor steps = arange(0, x.size(1), 1, {.dtype = Dtype::f32, .device = x.device()});
    mean = mul(steps, 0.25);
    var = add(mul(steps, 0.5), 1);
  }
  return {batch_norm(x, call.in[1], call.in[2], mean, var,
                     {.training = call.c.integer("training") != 0,
                      .eps = call.c.number("eps"),
                      .relu = residual,
                      .residual = residual ? call.in[3] : Tensor()})};
}
MT_RUN(group_norm) {
  return {group_norm(call.in[0], call.c.integer("groups"), call.optional(1), call.optional(2),
                     call.c.number("eps"))};
}
MT_RUN(swiglu) { return {swiglu(call.in[0])}; }
MT_RUN(dropout) {
  return {dropout(call.in[0], call.c.number("p"), call.c.integer("training") != 0)};
}

// ---- attention --------------------------------------------------------------------------------

bool causal(const Call& call) { return call.c.integer("causal") != 0; }
MT_RUN(scaled_dot_product_attention) {
  return {scaled_dot_product_attention(
      call.in[0], call.in[1], call.in[2],
      {.causal = causal(call), .mask = call.optional(3), .scale = call.c.number("scale")})};
}
MT_RUN(self_attention) {
  return {self_attention(call.in[0], {.heads = call.c.integer("heads"),
                                      .kv_heads = call.c.integer("kv_heads"),
                                      .causal = causal(call)})};
}
MT_RUN(rotary_embedding) {
  return {rotary_embedding(call.in[0], {.positions = call.optional(1),
                                        .offset = call.c.integer("offset"),
                                        .heads = call.c.integer("heads"),
                                        .base = call.c.number("base")})};
}

// ---- convolution and pooling -------------------------------------------------------------------

MT_RUN(conv2d) {
  return {conv2d(call.in[0], call.in[1], call.optional(2),
                 {.stride = call.c.list("stride"),
                  .padding = call.c.list("padding"),
                  .dilation = call.c.list("dilation"),
                  .groups = call.c.integer("groups"),
                  .act = act(call)})};
}
Pool2dOptions pool_options(const Call& call) {
  return {.kernel = call.c.list("kernel"),
          .stride = call.c.list("stride"),
          .padding = call.c.list("padding"),
          .count_include_pad = call.c.integer("count_include_pad") != 0};
}
MT_RUN(max_pool2d) { return {max_pool2d(call.in[0], pool_options(call))}; }
MT_RUN(avg_pool2d) { return {avg_pool2d(call.in[0], pool_options(call))}; }
MT_RUN(adaptive_max_pool2d) { return {adaptive_max_pool2d(call.in[0], call.c.list("size"))}; }
MT_RUN(adaptive_avg_pool2d) { return {adaptive_avg_pool2d(call.in[0], call.c.list("size"))}; }

}  // namespace

const std::vector<GoldenOp>& golden_ops() {
  static const std::vector<GoldenOp> all = {
#define MT_OP(function) {#function, run_op<OpId::function>},
#include "ops/ops.def"
  };
  return all;
}

}  // namespace mixtape::testing
