#include "kernels/cuda/cudnn_graph.h"

#include "kernels/cuda/cudnn_check.h"

namespace mixtape::kernels::cuda {
namespace {

/// The statuses by which an engine declines; internal errors cover failed run-time compilation.
bool declined(cudnnStatus_t status) {
  return status >= CUDNN_STATUS_NOT_SUPPORTED && status < CUDNN_STATUS_EXECUTION_FAILED;
}

[[maybe_unused]] void set_device_properties(CudnnDescriptor& d, cudnnBackendAttributeName_t name,
                                            const CudnnTarget& target) {
  if (target.device_properties != nullptr) d.set(name, *target.device_properties);
}

/// Fills in what the engine behind a configuration says about itself.
void read_engine(EngineConfig& config) {
  CudnnDescriptor engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  cudnnBackendDescriptor_t raw = engine.get();
  std::int64_t count = 0;
  MT_CUDNN_CHECK(cudnnBackendGetAttribute(config.config.get(), CUDNN_ATTR_ENGINECFG_ENGINE,
                                          CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &count, &raw));
  MT_CUDNN_CHECK(cudnnBackendGetAttribute(raw, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1,
                                          &count, &config.engine));
  cudnnBackendNumericalNote_t notes[CUDNN_NUMERICAL_NOTE_TYPE_COUNT];
  MT_CUDNN_CHECK(cudnnBackendGetAttribute(raw, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE,
                                          CUDNN_TYPE_NUMERICAL_NOTE,
                                          CUDNN_NUMERICAL_NOTE_TYPE_COUNT, &count, notes));
  for (std::int64_t i = 0; i < count; ++i) config.numerical_notes |= 1u << notes[i];
}

}  // namespace

CudnnDescriptor::CudnnDescriptor(cudnnBackendDescriptorType_t type) {
  MT_CUDNN_CHECK(cudnnBackendCreateDescriptor(type, &value_));
}

void CudnnDescriptor::set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                          std::int64_t count, const void* values) {
  MT_CUDNN_CHECK(cudnnBackendSetAttribute(value_, name, type, count, values));
}

void CudnnDescriptor::finalize() { MT_CUDNN_CHECK(cudnnBackendFinalize(value_)); }

bool CudnnDescriptor::try_finalize() {
  const cudnnStatus_t status = cudnnBackendFinalize(value_);
  if (declined(status)) return false;
  MT_CUDNN_CHECK(status);
  return true;
}

cudnnDataType_t cudnn_data_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32: return CUDNN_DATA_FLOAT;
    case Dtype::f16: return CUDNN_DATA_HALF;
    case Dtype::bf16: return CUDNN_DATA_BFLOAT16;
    case Dtype::f64: return CUDNN_DATA_DOUBLE;
    default: MT_THROW("conv2d: expected a floating dtype, got ", dtype);
  }
}

CudnnDescriptor describe_tensor(const GraphTensor& t) {
  const cudnnDataType_t type = cudnn_data_type(t.dtype);
  CudnnDescriptor d(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  d.set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
  d.set_int64(CUDNN_ATTR_TENSOR_DIMENSIONS, t.dims);
  d.set_int64(CUDNN_ATTR_TENSOR_STRIDES, t.strides);
  d.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &t.uid);
  d.set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &t.alignment);
  if (t.is_virtual) d.set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &t.is_virtual);
  d.finalize();
  return d;
}

CudnnDescriptor operation_graph(std::span<const CudnnDescriptor> operations,
                                const CudnnTarget& target) {
  std::vector<cudnnBackendDescriptor_t> raw;
  for (const CudnnDescriptor& operation : operations) raw.push_back(operation.get());
  CudnnDescriptor graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  if (target.handle != nullptr)
    graph.set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &target.handle);
  graph.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
            static_cast<std::int64_t>(raw.size()), raw.data());
  if (!graph.try_finalize()) return {};
  return graph;
}

std::vector<EngineConfig> engine_configs(const CudnnDescriptor& graph, cudnnBackendHeurMode_t mode,
                                         const CudnnTarget& target) {
  CudnnDescriptor heuristic(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  heuristic.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
  heuristic.set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
#if CUDNN_VERSION >= 90800
  set_device_properties(heuristic, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, target);
#endif
  std::vector<EngineConfig> configs;
  if (!heuristic.try_finalize()) return configs;
  std::int64_t count = 0;
  MT_CUDNN_CHECK(cudnnBackendGetAttribute(heuristic.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                          CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, &count, nullptr));
  std::vector<cudnnBackendDescriptor_t> raw;
  for (std::int64_t i = 0; i < count; ++i) {
    configs.push_back({CudnnDescriptor(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR)});
    raw.push_back(configs.back().config.get());
  }
  if (count == 0) return configs;
  MT_CUDNN_CHECK(cudnnBackendGetAttribute(heuristic.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                          CUDNN_TYPE_BACKEND_DESCRIPTOR, count, &count,
                                          raw.data()));
  configs.resize(static_cast<std::size_t>(count));
  for (EngineConfig& config : configs) read_engine(config);
  return configs;
}

bool build_plan(const EngineConfig& config, const CudnnTarget& target, ExecutionPlan& plan) {
  plan.plan = CudnnDescriptor(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
  plan.engine = config.engine;
  plan.plan.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config.config);
#if CUDNN_VERSION >= 90800
  set_device_properties(plan.plan, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, target);
#endif
  if (target.handle != nullptr)
    plan.plan.set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &target.handle);
  if (!plan.plan.try_finalize()) return false;
  std::int64_t bytes = 0, count = 0;
  MT_CUDNN_CHECK(cudnnBackendGetAttribute(plan.plan.get(), CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                          CUDNN_TYPE_INT64, 1, &count, &bytes));
  plan.workspace_bytes = static_cast<std::size_t>(bytes);
  return true;
}

cudnnStatus_t execute_plan(cudnnHandle_t handle, const ExecutionPlan& plan,
                           std::span<const std::int64_t> uids, std::span<void* const> pointers,
                           void* workspace) {
  CudnnDescriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  pack.set_int64(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, uids);
  pack.set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR,
           static_cast<std::int64_t>(pointers.size()), pointers.data());
  pack.set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace);
  pack.finalize();
  return cudnnBackendExecute(handle, plan.plan.get(), pack.get());
}

}  // namespace mixtape::kernels::cuda
