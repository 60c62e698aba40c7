// cuDNN's graph API, as far as convolutions need it, over its C interface (the backend API).
//
// The C++ frontend offers the same at the price of two minutes of compilation and a link to nvrtc;
// its filter by numerical notes (1.32) also takes every engine that has a note for a tensor-core
// engine. A graph of one or two operations needs none of the rest of it.
// Source: NVIDIA cuDNN 9, "Graph API" and "cudnn_graph Library".
#pragma once

#include <cudnn.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/dtype.h"

namespace mixtape::kernels::cuda {

/// Owns one backend descriptor.
class CudnnDescriptor {
 public:
  CudnnDescriptor() = default;
  explicit CudnnDescriptor(cudnnBackendDescriptorType_t type);
  CudnnDescriptor(CudnnDescriptor&& other) noexcept : value_(other.value_) {
    other.value_ = nullptr;
  }
  CudnnDescriptor& operator=(CudnnDescriptor&& other) noexcept {
    std::swap(value_, other.value_);
    return *this;
  }
  ~CudnnDescriptor() {
    if (value_ != nullptr) cudnnBackendDestroyDescriptor(value_);
  }

  cudnnBackendDescriptor_t get() const { return value_; }
  void set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, std::int64_t count,
           const void* values);
  void set(cudnnBackendAttributeName_t name, const CudnnDescriptor& other) {
    set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &other.value_);
  }
  void set_int64(cudnnBackendAttributeName_t name, std::span<const std::int64_t> values) {
    set(name, CUDNN_TYPE_INT64, static_cast<std::int64_t>(values.size()), values.data());
  }
  void finalize();
  /// As finalize; false instead of an exception where cuDNN does not support what it describes.
  bool try_finalize();

 private:
  cudnnBackendDescriptor_t value_ = nullptr;
};

/// Where plans are built for: a handle, or the properties of a device that need not be present.
struct CudnnTarget {
  cudnnHandle_t handle = nullptr;
  const CudnnDescriptor* device_properties = nullptr;
};

struct GraphTensor {
  std::int64_t uid;
  Dtype dtype;
  std::int64_t dims[4], strides[4];  // N C H W order
  std::int64_t alignment = 16;       // bytes, promised for its address
  bool is_virtual = false;           // an intermediate that never reaches memory
};

cudnnDataType_t cudnn_data_type(Dtype dtype);
CudnnDescriptor describe_tensor(const GraphTensor& tensor);

/// An engine with its settings, as the heuristic proposed it.
struct EngineConfig {
  CudnnDescriptor config;
  std::int64_t engine = 0;            // the engine's number, for reports
  std::uint32_t numerical_notes = 0;  // bit i: cudnnBackendNumericalNote_t i

  bool has(cudnnBackendNumericalNote_t note) const { return numerical_notes >> note & 1u; }
};

/// The graph of `operations`, finalised; an empty descriptor if cuDNN rejects the combination.
CudnnDescriptor operation_graph(std::span<const CudnnDescriptor> operations,
                                const CudnnTarget& target);
/// Proposals for the graph, best first. Empty if the mode knows none.
std::vector<EngineConfig> engine_configs(const CudnnDescriptor& graph, cudnnBackendHeurMode_t mode,
                                         const CudnnTarget& target);

struct ExecutionPlan {
  CudnnDescriptor plan;
  std::size_t workspace_bytes = 0;
  std::int64_t engine = 0;
};

/// False if the engine turns out not to support the graph.
bool build_plan(const EngineConfig& config, const CudnnTarget& target, ExecutionPlan& plan);

/// Queues the plan on the handle's stream. Returns cuDNN's status.
cudnnStatus_t execute_plan(cudnnHandle_t handle, const ExecutionPlan& plan,
                           std::span<const std::int64_t> uids, std::span<void* const> pointers,
                           void* workspace);

}  // namespace mixtape::kernels::cuda
