// cuDNN's fused attention. Its graph is some twenty operations with rules that change by version
// and GPU, which the frontend writes and checks; hence the header here, where convolution does
// without (cudnn_graph.h). Source: NVIDIA cuDNN frontend, docs/operations/Attention.md.
//
// Legend: see kernels/attention.h. cuDNN calls the log-sum-exp "stats", (B, H, T, 1).
#include "kernels/cuda/attention_cudnn.h"

#include <cudnn_frontend.h>

#include <bit>
#include <map>
#include <mutex>
#include <unordered_map>

#include "engine/cuda/backend.h"
#include "engine/determinism.h"
#include "kernels/cuda/byte_key.h"
#include "kernels/cuda/cudnn_check.h"

namespace mixtape::kernels::cuda {
namespace {

namespace fe = cudnn_frontend;

constexpr std::int64_t kElementsPerVector = 8;  // of 16 bytes: cuDNN's unit of access
constexpr std::int64_t kMaxColumns = 128;
constexpr std::size_t kAlignment = 256;

enum Uid : std::int64_t { kQ = 1, kK, kV, kOut, kStats, kDout, kDq, kDk, kDv };

struct Strides {
  std::int64_t batch, head, row;
};

/// All that a plan depends on.
struct AttentionKey {
  std::int64_t device, backward, dtype, b, h, g, t, s, d;
  std::int64_t causal, deterministic, stats, scale_bits;
  Strides q, k, v, out, dout, dq, dk, dv;
};

struct AttentionPlan {
  std::shared_ptr<fe::graph::Graph> graph;  // null where cuDNN has none
  std::string obstacle;
  std::size_t workspace_bytes = 0;
};

struct Handle {
  cudnnHandle_t handle = nullptr;
  cudaStream_t stream = nullptr;  // what the handle queues on
};

/// Handles and plans of the process, used under the mutex. Never destroyed: a captured graph may
/// still launch a plan's kernels, and the driver may be gone before static destructors run.
struct State {
  std::mutex mutex;
  std::map<int, Handle> handles;  // by device
  std::unordered_map<AttentionKey, AttentionPlan, ByteHash, ByteEqual> plans;
};
State& state() {
  static State& instance = *new State;
  return instance;
}

/// The device's handle, queueing on `stream`. The device is current.
cudnnHandle_t handle_for(int device, cudaStream_t stream) {
  Handle& h = state().handles[device];
  if (h.handle == nullptr) MT_CUDNN_CHECK(cudnnCreate(&h.handle));
  if (h.stream != stream) {
    MT_CUDNN_CHECK(cudnnSetStream(h.handle, stream));
    h.stream = stream;
  }
  return h.handle;
}

Strides strides_of(const View& v) { return {v.stride(0), v.stride(1), v.stride(2)}; }

AttentionKey key_of(const AttentionArgs& a) {
  AttentionKey key{};
  key.device = a.q.device.index;
  key.dtype = static_cast<std::int64_t>(a.q.dtype);
  key.b = a.q.size(0);
  key.h = a.q.size(1);
  key.g = a.k.size(1);
  key.t = a.q.size(2);
  key.s = a.k.size(2);
  key.d = a.q.size(3);
  key.causal = a.causal;
  key.scale_bits = std::bit_cast<std::int32_t>(static_cast<float>(a.scale));
  key.q = strides_of(a.q);
  key.k = strides_of(a.k);
  key.v = strides_of(a.v);
  return key;
}
AttentionKey key_of(const AttentionForward& f) {
  AttentionKey key = key_of(f.args);
  key.stats = f.lse.defined;
  key.out = strides_of(f.out);
  return key;
}

/// The view itself or, where that gradient is not wanted, room for it in the workspace.
View gradient_or_scratch(const View& wanted, const View& like, char*& scratch) {
  if (wanted) return wanted;
  View v = like;
  v.strides = contiguous_strides(v.sizes);
  v.data = scratch;
  const std::size_t bytes = static_cast<std::size_t>(v.numel()) * size_of(v.dtype);
  scratch += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  return v;
}

/// A backward call with all three gradients, and the bytes of scratch that this took.
struct FullBackward {
  AttentionBackward args;
  std::size_t scratch_bytes;

  FullBackward(const AttentionBackward& b, void* scratch) : args(b) {
    char* const start = static_cast<char*>(scratch);
    char* at = start;
    args.dq = gradient_or_scratch(b.dq, b.args.q, at);
    args.dk = gradient_or_scratch(b.dk, b.args.k, at);
    args.dv = gradient_or_scratch(b.dv, b.args.v, at);
    scratch_bytes = static_cast<std::size_t>(at - start);
  }
};

AttentionKey key_of(const FullBackward& full) {
  const AttentionBackward& b = full.args;
  AttentionKey key = key_of(b.args);
  key.backward = 1;
  key.deterministic = deterministic();
  key.out = strides_of(b.out);
  key.dout = strides_of(b.dout);
  key.dq = strides_of(b.dq);
  key.dk = strides_of(b.dk);
  key.dv = strides_of(b.dv);
  return key;
}

// ---- building a plan

using TensorPtr = std::shared_ptr<fe::graph::Tensor_attributes>;

class GraphBuilder {
 public:
  explicit GraphBuilder(const AttentionKey& key)
      : key_(key), graph_(std::make_shared<fe::graph::Graph>()) {
    graph_->set_io_data_type(static_cast<Dtype>(key.dtype) == Dtype::f16
                                 ? fe::DataType_t::HALF
                                 : fe::DataType_t::BFLOAT16);
    graph_->set_intermediate_data_type(fe::DataType_t::FLOAT);
    graph_->set_compute_data_type(fe::DataType_t::FLOAT);
  }

  std::shared_ptr<fe::graph::Graph> build() {
    const TensorPtr q = input("q", kQ, key_.q, true), k = input("k", kK, key_.k, false),
                    v = input("v", kV, key_.v, false);
    if (key_.backward)
      add_backward(q, k, v);
    else
      add_forward(q, k, v);
    return graph_;
  }

 private:
  std::vector<std::int64_t> dims(bool queries) const {
    return {key_.b, queries ? key_.h : key_.g, queries ? key_.t : key_.s, key_.d};
  }
  static std::vector<std::int64_t> strides(const Strides& s) { return {s.batch, s.head, s.row, 1}; }
  TensorPtr input(const char* name, Uid uid, const Strides& s, bool queries) {
    return graph_->tensor(fe::graph::Tensor_attributes()
                              .set_name(name)
                              .set_uid(uid)
                              .set_dim(dims(queries))
                              .set_stride(strides(s)));
  }
  void output(const TensorPtr& t, Uid uid, const Strides& s, bool queries) const {
    t->set_output(true).set_uid(uid).set_dim(dims(queries)).set_stride(strides(s));
  }
  float scale() const { return std::bit_cast<float>(static_cast<std::int32_t>(key_.scale_bits)); }
  void add_forward(const TensorPtr& q, const TensorPtr& k, const TensorPtr& v) {
    auto options = fe::graph::SDPA_attributes()
                       .set_name("attention")
                       .set_generate_stats(key_.stats != 0)
                       .set_attn_scale(scale());
    if (key_.causal) options.set_causal_mask(true);
    const auto [out, stats] = graph_->sdpa(q, k, v, options);
    output(out, kOut, key_.out, true);
    if (!key_.stats) return;
    stats->set_output(true)
        .set_uid(kStats)
        .set_data_type(fe::DataType_t::FLOAT)
        .set_dim({key_.b, key_.h, key_.t, 1})
        .set_stride({key_.h * key_.t, key_.t, 1, 1});
  }
  void add_backward(const TensorPtr& q, const TensorPtr& k, const TensorPtr& v) {
    const TensorPtr out = input("out", kOut, key_.out, true),
                    dout = input("dout", kDout, key_.dout, true);
    const TensorPtr stats = graph_->tensor(fe::graph::Tensor_attributes()
                                               .set_name("stats")
                                               .set_uid(kStats)
                                               .set_data_type(fe::DataType_t::FLOAT)
                                               .set_dim({key_.b, key_.h, key_.t, 1})
                                               .set_stride({key_.h * key_.t, key_.t, 1, 1}));
    auto options = fe::graph::SDPA_backward_attributes()
                       .set_name("attention_backward")
                       .set_attn_scale(scale())
                       .set_deterministic_algorithm(key_.deterministic != 0);
    if (key_.causal) options.set_causal_mask(true);
    const auto [dq, dk, dv] = graph_->sdpa_backward(q, k, v, out, dout, stats, options);
    output(dq, kDq, key_.dq, true);
    output(dk, kDk, key_.dk, false);
    output(dv, kDv, key_.dv, false);
  }

  const AttentionKey& key_;
  std::shared_ptr<fe::graph::Graph> graph_;
};

AttentionPlan build_plan(const AttentionKey& key) {
  AttentionPlan plan;
  const cudnnHandle_t handle = handle_for(static_cast<int>(key.device), nullptr);
  const auto graph = GraphBuilder(key).build();
  fe::error_t status = graph->build(handle, {fe::HeurMode_t::A});
  std::int64_t bytes = 0;
  if (status.is_good() && graph->get_workspace_size(bytes).is_good()) {
    plan.graph = graph;
    plan.workspace_bytes = static_cast<std::size_t>(bytes);
  } else {
    plan.obstacle = "it has no plan: " + status.get_message();
  }
  return plan;
}

/// The plan for a key; the caller holds the mutex.
const AttentionPlan& plan_of(const AttentionKey& key) {
  auto& plans = state().plans;
  const auto found = plans.find(key);
  if (found != plans.end()) return found->second;
  MT_CHECK(!cudart::is_capturing(
               static_cast<int>(key.device),
               native_stream(Stream::current(Device::cuda(static_cast<int>(key.device))))),
           "attention: expected a shape whose cuDNN plan exists when a stream is captured, got q (",
           key.b, ", ", key.h, ", ", key.t, ", ", key.d,
           "); run the step once before capturing it");
  return plans.emplace(key, build_plan(key)).first->second;
}

// ---- what cuDNN takes

/// Whether every row starts at a multiple of 16 bytes and no dimension is repeated.
bool vector_aligned(const View& v) {
  if (reinterpret_cast<std::uintptr_t>(v.data) % (2 * kElementsPerVector) != 0) return false;
  for (int i = 0; i < 3; ++i)
    if (v.size(i) > 1 && (v.stride(i) <= 0 || v.stride(i) % kElementsPerVector != 0)) return false;
  return true;
}

std::string alignment_obstacle(std::initializer_list<View> views) {
  for (const View& v : views)
    if (v && !vector_aligned(v)) return "rows are not 16-byte aligned";
  return {};
}

std::string operand_obstacle(const AttentionArgs& a) {
  if (!is_low_precision(a.q.dtype)) return "it takes float16 and bfloat16";
  if (a.q.size(3) % kElementsPerVector != 0 || a.q.size(3) > kMaxColumns || a.q.size(3) == 0)
    return "it takes heads of a multiple of 8 elements, up to 128";
  if (a.mask) return "a mask was given";
  if (a.dropout != 0) return "dropout was asked for";
  if (!(a.scale > 0)) return "it takes a positive scale";
  if (a.q.numel() == 0 || a.k.numel() == 0) return "an operand is empty";
  return alignment_obstacle({a.q, a.k, a.v});
}

using Pointers = std::unordered_map<fe::graph::Tensor_attributes::uid_t, void*>;

void execute(const AttentionKey& key, Pointers pointers, Workspace workspace,
             const Stream& stream) {
  const std::lock_guard lock(state().mutex);
  const AttentionPlan& plan = plan_of(key);
  MT_CHECK(plan.graph != nullptr, "attention: cuDNN cannot: ", plan.obstacle);
  MT_CHECK(workspace.bytes >= plan.workspace_bytes, "attention: expected a workspace of ",
           plan.workspace_bytes, " bytes, got ", workspace.bytes);
  const cudnnHandle_t handle = handle_for(static_cast<int>(key.device), native_stream(stream));
  fe::error_t status = plan.graph->execute(handle, pointers, workspace.data);
  MT_CHECK(status.is_good(), "attention: cuDNN failed on cuda:", key.device, ": ",
           status.get_message(), ": ", cudnn_reason());
}

}  // namespace

std::string cudnn_attention_obstacle(const AttentionForward& f) {
  std::string obstacle = operand_obstacle(f.args);
  if (obstacle.empty()) obstacle = alignment_obstacle({f.out});
  if (!obstacle.empty()) return obstacle;
  const std::lock_guard lock(state().mutex);
  return plan_of(key_of(f)).obstacle;
}

std::string cudnn_attention_obstacle(const AttentionBackward& b) {
  std::string obstacle = operand_obstacle(b.args);
  if (obstacle.empty()) obstacle = alignment_obstacle({b.out, b.dout, b.dq, b.dk, b.dv});
  if (!obstacle.empty()) return obstacle;
  const std::lock_guard lock(state().mutex);
  return plan_of(key_of(FullBackward(b, nullptr))).obstacle;
}

std::size_t cudnn_attention_workspace_bytes(const AttentionForward& f) {
  const std::lock_guard lock(state().mutex);
  return plan_of(key_of(f)).workspace_bytes;
}

std::size_t cudnn_attention_workspace_bytes(const AttentionBackward& b) {
  const FullBackward full(b, nullptr);
  const std::lock_guard lock(state().mutex);
  return full.scratch_bytes + plan_of(key_of(full)).workspace_bytes;
}

void cudnn_attention_forward(const Stream& stream, const AttentionForward& f, Workspace workspace) {
  Pointers pointers = {
      {kQ, f.args.q.data}, {kK, f.args.k.data}, {kV, f.args.v.data}, {kOut, f.out.data}};
  if (f.lse) pointers[kStats] = f.lse.data;
  execute(key_of(f), std::move(pointers), workspace, stream);
}

void cudnn_attention_backward(const Stream& stream, const AttentionBackward& b,
                              Workspace workspace) {
  const FullBackward full(b, workspace.data);
  MT_CHECK(workspace.bytes >= full.scratch_bytes, "attention: expected a workspace of at least ",
           full.scratch_bytes, " bytes, got ", workspace.bytes);
  const AttentionBackward& a = full.args;
  execute(key_of(full),
          {{kQ, a.args.q.data},
           {kK, a.args.k.data},
           {kV, a.args.v.data},
           {kOut, a.out.data},
           {kDout, a.dout.data},
           {kStats, a.lse.data},
           {kDq, a.dq.data},
           {kDk, a.dk.data},
           {kDv, a.dv.data}},
          {static_cast<char*>(workspace.data) + full.scratch_bytes,
           workspace.bytes - full.scratch_bytes},
          stream);
}

}  // namespace mixtape::kernels::cuda
