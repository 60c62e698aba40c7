#include "kernels/cuda/conv_graph.h"

#include <iterator>
#include <type_traits>

namespace mixtape::kernels::cuda {
namespace {

static_assert(std::has_unique_object_representations_v<ConvKey>);

GraphTensor tensor(const ConvKey& key, std::int64_t uid, Dtype dtype, std::int64_t a,
                   std::int64_t b, std::int64_t c, std::int64_t d, bool is_virtual = false) {
  GraphTensor t{uid, dtype, {a, b, c, d}, {}, is_virtual ? 16 : key.alignment, is_virtual};
  conv_strides(t.dims, key.channels_last, t.strides);
  return t;
}

CudnnDescriptor describe_geometry(const ConvKey& key) {
  CudnnDescriptor d(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
  const cudnnDataType_t compute = cudnn_data_type(compute_dtype(key.dtype));
  const cudnnConvolutionMode_t mode = CUDNN_CROSS_CORRELATION;
  const std::int64_t dims = 2;
  d.set(CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &compute);
  d.set(CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, 1, &mode);
  d.set(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64, 1, &dims);
  d.set_int64(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, key.padding);
  d.set_int64(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, key.padding);
  d.set_int64(CUDNN_ATTR_CONVOLUTION_DILATIONS, key.dilation);
  d.set_int64(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, key.stride);
  d.finalize();
  return d;
}

/// The attribute names of one direction's operation.
struct Direction {
  cudnnBackendDescriptorType_t type;
  cudnnBackendAttributeName_t geometry, x, w, y, alpha, beta;
};

Direction direction_of(ConvPass pass) {
  switch (pass) {
    case ConvPass::forward:
      return {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA};
    case ConvPass::backward_data:
      return {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA};
    case ConvPass::backward_weight: break;
  }
  return {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA};
}

CudnnDescriptor convolution(const ConvKey& key, const GraphTensor& x, const GraphTensor& w,
                            const GraphTensor& y) {
  const Direction names = direction_of(key.pass);
  CudnnDescriptor d(names.type);
  d.set(names.geometry, describe_geometry(key));
  d.set(names.x, describe_tensor(x));
  d.set(names.w, describe_tensor(w));
  d.set(names.y, describe_tensor(y));
  if (key.dtype == Dtype::f64) {
    const double alpha = 1, beta = 0;
    d.set(names.alpha, CUDNN_TYPE_DOUBLE, 1, &alpha);
    d.set(names.beta, CUDNN_TYPE_DOUBLE, 1, &beta);
  } else {
    const float alpha = 1, beta = 0;
    d.set(names.alpha, CUDNN_TYPE_FLOAT, 1, &alpha);
    d.set(names.beta, CUDNN_TYPE_FLOAT, 1, &beta);
  }
  d.finalize();
  return d;
}

/// y = x + bias, with bias broadcast.
CudnnDescriptor addition(const GraphTensor& x, const GraphTensor& bias, const GraphTensor& y) {
  CudnnDescriptor settings(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
  const cudnnPointwiseMode_t mode = CUDNN_POINTWISE_ADD;
  const cudnnDataType_t precision = CUDNN_DATA_FLOAT;
  settings.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
  settings.set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &precision);
  settings.finalize();
  CudnnDescriptor d(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  d.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, settings);
  d.set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, describe_tensor(x));
  d.set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, describe_tensor(bias));
  d.set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, describe_tensor(y));
  d.finalize();
  return d;
}

std::vector<CudnnDescriptor> operations_of(const ConvKey& key) {
  const GraphTensor x = tensor(key, kConvX, key.dtype, key.n, key.c, key.h, key.w);
  const GraphTensor w = tensor(key, kConvW, key.dtype, key.o, key.c / key.groups, key.r, key.s);
  const GraphTensor y = tensor(key, kConvY, key.dtype, key.n, key.o, key.p, key.q);
  std::vector<CudnnDescriptor> operations;
  if (!key.bias) {
    operations.push_back(convolution(key, x, w, y));
    return operations;
  }
  constexpr std::int64_t kProduct = 5;
  const GraphTensor product =
      tensor(key, kProduct, compute_dtype(key.dtype), key.n, key.o, key.p, key.q, true);
  const GraphTensor bias = tensor(key, kConvBias, key.dtype, 1, key.o, 1, 1);
  operations.push_back(convolution(key, x, w, product));
  operations.push_back(addition(product, bias, y));
  return operations;
}

/// Whether the results of an engine are what kernels/conv.h promises.
bool acceptable(const EngineConfig& config, const ConvKey& key) {
  if (key.deterministic && config.has(CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC)) return false;
  if (config.has(CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION) ||
      config.has(CUDNN_NUMERICAL_NOTE_FFT))
    return false;
  if (is_low_precision(key.dtype) && config.has(CUDNN_NUMERICAL_NOTE_WINOGRAD))
    return false;  // transforms in 16 bits
  if (key.dtype == Dtype::f32) {
    if (config.has(CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS)) return false;
    if (!key.tf32 && config.has(CUDNN_NUMERICAL_NOTE_TENSOR_CORE)) return false;
  }
  return true;
}

}  // namespace

void conv_strides(const std::int64_t (&dims)[4], bool channels_last, std::int64_t (&strides)[4]) {
  if (channels_last) {
    strides[1] = 1;
    strides[3] = dims[1];
    strides[2] = dims[3] * dims[1];
    strides[0] = dims[2] * strides[2];
  } else {
    strides[3] = 1;
    strides[2] = dims[3];
    strides[1] = dims[2] * dims[3];
    strides[0] = dims[1] * strides[1];
  }
}

std::vector<ExecutionPlan> conv_candidates(const ConvKey& key, const CudnnTarget& target,
                                           std::size_t count, std::size_t max_workspace_bytes) {
  std::vector<ExecutionPlan> plans;
  const CudnnDescriptor graph = operation_graph(operations_of(key), target);
  if (graph.get() == nullptr) return plans;
  for (cudnnBackendHeurMode_t mode : {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK}) {
    for (const EngineConfig& config : engine_configs(graph, mode, target)) {
      ExecutionPlan plan;
      if (!acceptable(config, key) || !build_plan(config, target, plan)) continue;
      if (plan.workspace_bytes > max_workspace_bytes) continue;
      plans.push_back(std::move(plan));
      if (plans.size() == count) return plans;
    }
    if (!plans.empty()) return plans;
  }
  return plans;
}

}  // namespace mixtape::kernels::cuda
