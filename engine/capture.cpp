#include "engine/capture.h"

#include <optional>
#include <utility>

#include "engine/allocator.h"
#include "engine/cuda/backend.h"
#include "engine/grad_mode.h"
#include "engine/graph_recorder.h"
#include "engine/profile_hooks.h"
#include "kernels/elementwise.h"

namespace mixtape {
namespace {

/// What a graph was recorded for.
struct Key {
  std::vector<Meta> inputs;
  bool grad, autocast;
  Dtype autocast_dtype;

  explicit Key(Inputs in)
      : grad(thread_state.grad),
        autocast(thread_state.autocast),
        autocast_dtype(thread_state.autocast_dtype) {
    for (const Tensor& t : in) inputs.push_back(meta_of(t));
  }
  bool operator==(const Key& o) const {
    if (inputs.size() != o.inputs.size() || grad != o.grad || autocast != o.autocast ||
        autocast_dtype != o.autocast_dtype)
      return false;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].shape != o.inputs[i].shape || inputs[i].dtype != o.inputs[i].dtype)
        return false;
    }
    return true;
  }
};

void copy_input(const Tensor& to, const Tensor& from) {
  if (to.same(from)) return;
  kernels::copy(Stream::current(to.device()), to.view(), from.view());
  to.impl()->storage->bump_version();
}

/// One recorded graph and the memory that it addresses.
class Graph {
 public:
  Graph(const StepFunction& step, Device device, Inputs in) : device_(device) {
    for (const Tensor& t : in) {
      inputs_.push_back(Tensor::empty(t.shape(), t.dtype(), device));
      copy_input(inputs_.back(), t);
    }
    recorder_.emplace(device);
    pool_ = std::make_unique<MemoryPool>(device);
    record(step);
    last_stream_ = Stream::current(device);
  }
  ~Graph() {
    if (graph_.executable != nullptr) {
      cudart::synchronize_device_quietly(device_.index);  // a replay may still be running
      cudart::destroy_graph(device_.index, graph_.executable);
    }
    outputs_.clear();
    recorder_.reset();
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  std::vector<Tensor> replay(Inputs in) {
    const NoGrad no_grad;
    const profile::Range range(ProfileKind::function, "replay captured step");
    const Stream stream = Stream::current(device_);
    if (!(stream == last_stream_)) stream.wait(Event(last_stream_));
    last_stream_ = stream;
    for (std::size_t i = 0; i < inputs_.size(); ++i) copy_input(inputs_[i], in[i]);
    recorder_->prepare_replay();
    cudart::launch_graph(device_.index, graph_.executable, stream.native());
    recorder_->complete_replay();
    return outputs_;
  }
  std::size_t nodes() const { return graph_.nodes; }

 private:
  void record(const StepFunction& step) {
    const Stream stream = make_stream(device_, cudart::capture_stream(device_.index));
    stream.wait(Event(Stream::current(device_)));
    const StreamGuard on_capture_stream(stream);
    const MemoryPoolScope in_pool(*pool_);
    struct Current {
      explicit Current(GraphRecorder* recorder) { graph_recorder = recorder; }
      ~Current() { graph_recorder = nullptr; }
    };
    const auto abandon = [&] {
      cudart::abandon_capture(device_.index, stream.native());
      recorder_->abandon();
    };
    cudart::begin_capture(device_.index, stream.native());
    try {
      const Current current(&*recorder_);
      for (const Tensor& t : step(inputs_)) outputs_.push_back(t ? t.detach() : t);
      recorder_->finish(outputs_);
    } catch (const OutOfMemory&) {
      abandon();
      throw;
    } catch (const std::exception& e) {
      abandon();
      throw Error(detail::concat("capture: the step cannot be captured: ", e.what()));
    } catch (...) {
      abandon();
      throw;
    }
    try {
      graph_ = cudart::end_capture(device_.index, stream.native());
    } catch (...) {
      recorder_->abandon();
      throw;
    }
  }

  Device device_;
  std::unique_ptr<MemoryPool> pool_;  // outlives what was allocated from it
  std::optional<GraphRecorder> recorder_;
  std::vector<Tensor> inputs_, outputs_;
  cudart::CapturedGraph graph_;
  Stream last_stream_;
};

struct Entry {
  Key key;
  int calls = 0;
  std::unique_ptr<Graph> graph;
};

}  // namespace

struct CapturedStep::Impl {
  StepFunction step;
  CaptureOptions options;
  std::vector<Entry> entries;

  Entry& entry_of(const Key& key) {
    for (Entry& e : entries) {
      if (e.key == key) return e;
    }
    return entries.emplace_back(Entry{key, 0, nullptr});
  }
};

CapturedStep::CapturedStep(StepFunction step, CaptureOptions options)
    : impl_(std::make_unique<Impl>(Impl{std::move(step), options, {}})) {
  MT_CHECK(static_cast<bool>(impl_->step), "capture: expected a function, got none");
  MT_CHECK(options.warmup >= 1, "capture: expected a warmup of at least 1, got ", options.warmup);
  check_device("capture", options.device);
}
CapturedStep::~CapturedStep() = default;
CapturedStep::CapturedStep(CapturedStep&&) noexcept = default;
CapturedStep& CapturedStep::operator=(CapturedStep&&) noexcept = default;

std::vector<Tensor> CapturedStep::operator()(Inputs inputs) {
  Impl& self = *impl_;
  const Device device = self.options.device;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    MT_CHECK(inputs[i].defined(), "capture: input ", i, " is undefined");
    MT_CHECK(inputs[i].device() == device, "capture: expected inputs on ", device, ", got ",
             inputs[i].describe());
  }
  if (device.is_cpu()) return self.step(inputs);
  MT_CHECK(graph_recorder == nullptr, "capture: called inside another captured step");
  Entry& entry = self.entry_of(Key(inputs));
  if (entry.calls < self.options.warmup) {
    ++entry.calls;
    return self.step(inputs);
  }
  if (!entry.graph) {
    synchronize(device);
    empty_cache(device);  // what the eager steps used; the graph has memory of its own
    entry.graph = std::make_unique<Graph>(self.step, device, inputs);
  }
  return entry.graph->replay(inputs);
}

int CapturedStep::graphs() const {
  int count = 0;
  for (const Entry& e : impl_->entries) count += e.graph != nullptr;
  return count;
}

std::size_t CapturedStep::nodes() const {
  std::size_t count = 0;
  for (const Entry& e : impl_->entries) count += e.graph ? e.graph->nodes() : 0;
  return count;
}

void CapturedStep::reset() {
  impl_->entries.clear();
  if (impl_->options.device.is_cuda()) empty_cache(impl_->options.device);
}

}  // namespace mixtape
