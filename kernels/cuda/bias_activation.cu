// Two layouts: rows of 16-byte vectors (not f64), where each thread keeps its columns' bias in
// registers and walks down the rows; and any strides, one element a thread.
#include "kernels/cuda/bias_activation.h"

#include <algorithm>

#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/load_store.cuh"

namespace mixtape::kernels::cuda {
namespace {

struct Strides3 {
  std::int64_t batch, row, column;
};

Strides3 strides_of(const View& v) {
  return {v.dim() == 3 ? v.stride(0) : 0, v.stride(-2), v.stride(-1)};
}

struct Epilogue {
  void* out;
  void* pre;         // or null
  const void* bias;  // or null
  Strides3 out_strides, pre_strides;
  std::int64_t bias_stride;
  std::int64_t rows, columns, batch;
  Dtype bias_dtype;
  float scale;
};

constexpr int kLanes = 32, kRows = 8;

template <class T, Activation kActivation>
__global__ void __launch_bounds__(kLanes* kRows) bias_activation_rows_kernel(Epilogue e) {
  constexpr int kWidth = kPerVector<T>;
  const std::int64_t column = (std::int64_t{blockIdx.x} * kLanes + threadIdx.x) * kWidth;
  if (column >= e.columns) return;
  float bias[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i)
    bias[i] = e.bias ? load_as<float>(e.bias, e.bias_dtype, (column + i) * e.bias_stride) : 0.0f;
  const std::int64_t step = std::int64_t{gridDim.y} * kRows;
  for (std::int64_t r = std::int64_t{blockIdx.y} * kRows + threadIdx.y; r < e.rows * e.batch;
       r += step) {
    const std::int64_t b = e.batch > 1 ? r / e.rows : 0, row = r - b * e.rows;
    T* out = static_cast<T*>(e.out) + b * e.out_strides.batch + row * e.out_strides.row + column;
    float z[kWidth] = {}, y[kWidth];
    if (e.scale != 0) unpack<T>(*reinterpret_cast<const uint4*>(out), z);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      z[i] = (e.scale != 0 ? e.scale * z[i] : 0.0f) + bias[i];
      y[i] = ActivationFunctor<kActivation, T>::value(z[i]);
    }
    store_vector(out, pack<T>(y));
    if (e.pre != nullptr) {
      T* pre = static_cast<T*>(e.pre) + b * e.pre_strides.batch + row * e.pre_strides.row + column;
      store_vector(pre, pack<T>(z));
    }
  }
}

template <class T, Activation kActivation>
__global__ void bias_activation_strided_kernel(Epilogue e) {
  using C = compute_t<T>;
  const std::int64_t count = e.batch * e.rows * e.columns;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    const std::int64_t column = i % e.columns, r = i / e.columns;
    const std::int64_t row = r % e.rows, b = r / e.rows;
    T* out = static_cast<T*>(e.out) + b * e.out_strides.batch + row * e.out_strides.row +
             column * e.out_strides.column;
    C z = e.bias ? load_as<C>(e.bias, e.bias_dtype, column * e.bias_stride) : C(0);
    if (e.scale != 0) z += static_cast<C>(e.scale) * convert<C>(*out);
    *out = convert<T>(ActivationFunctor<kActivation, T>::value(z));
    if (e.pre != nullptr)
      static_cast<T*>(e.pre)[b * e.pre_strides.batch + row * e.pre_strides.row +
                             column * e.pre_strides.column] = convert<T>(z);
  }
}

bool vectors(const void* p, const Strides3& s, std::int64_t width) {
  return aligned(p, 16) && s.column == 1 && s.row % width == 0 && s.batch % width == 0;
}

template <class T, Activation kActivation>
void launch_epilogue(const Epilogue& e, cudaStream_t stream) {
  const std::int64_t rows = e.rows * e.batch;
  if constexpr (!std::is_same_v<T, double>) {
    constexpr int kWidth = kPerVector<T>;
    if (e.columns % kWidth == 0 && vectors(e.out, e.out_strides, kWidth) &&
        (e.pre == nullptr || vectors(e.pre, e.pre_strides, kWidth))) {
      const unsigned strips = blocks_for(e.columns / kWidth, kLanes);
      const auto chunks = static_cast<unsigned>(
          std::clamp<std::int64_t>(4096 / strips, 1, ceil_div<std::int64_t>(rows, kRows)));
      return launch(bias_activation_rows_kernel<T, kActivation>, dim3(strips, chunks),
                    dim3(kLanes, kRows), 0, stream, e);
    }
  }
  const unsigned blocks = std::min(blocks_for(rows * e.columns, 256), 65535u);
  launch(bias_activation_strided_kernel<T, kActivation>, blocks, 256, 0, stream, e);
}

}  // namespace

void bias_activation(const Stream& stream, View out, float scale, View bias, Activation activation,
                     View pre_activation) {
  if (out.numel() == 0) return;
  Epilogue e{};
  e.out = out.data;
  e.out_strides = strides_of(out);
  e.rows = out.size(-2);
  e.columns = out.size(-1);
  e.batch = out.dim() == 3 ? out.size(0) : 1;
  e.scale = scale;
  if (bias) {
    e.bias = bias.data;
    e.bias_stride = bias.stride(0);
    e.bias_dtype = bias.dtype;
  }
  if (pre_activation) {
    e.pre = pre_activation.data;
    e.pre_strides = strides_of(pre_activation);
  }
  dispatch_floating("matmul", out.dtype, [&](auto tag) {
    dispatch_activation(activation, [&](auto which) {
      launch_epilogue<typename decltype(tag)::type, decltype(which)::value>(e,
                                                                            native_stream(stream));
    });
  });
}

}  // namespace mixtape::kernels::cuda
