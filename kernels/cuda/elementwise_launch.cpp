#include "kernels/cuda/elementwise_launch.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <limits>

#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/iteration_space.h"

namespace mixtape::kernels::cuda {

namespace {

/// Below this many elements the rows kernel is not worth a second launch for the elements that do
/// not fill a group.
constexpr std::int64_t kSmall = 8192;

bool aligned_to(const void* p, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(p) % bytes == 0;
}

/// A number as arithmetic type C; real numbers saturate to int64.
template <class C>
C scalar_as(const Scalar& s) {
  if constexpr (std::is_same_v<C, std::int64_t>) {
    if (s.kind() == Dtype::f64) {
      const double v = s.to<double>();
      if (v >= 0x1p63) return std::numeric_limits<std::int64_t>::max();
      if (v <= -0x1p63) return std::numeric_limits<std::int64_t>::min();
    }
  }
  return s.to<C>();
}

void launch_kernel(const void* kernel, std::int64_t blocks, const void* formula, const void* args,
                   const Stream& stream) {
  void* params[2] = {const_cast<void*>(formula), const_cast<void*>(args)};
  MT_CUDA_CHECK(cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)),
                                 dim3(kElementwiseThreads), params, 0, native_stream(stream)));
}

template <int N>
using Space = IterationSpace<N + 1>;

template <int N>
struct Call {
  const Stream& stream;
  const ElementwiseKernels& kernels;
  const Operand (&in)[N];
};

// ---- contiguous

/// The contiguous kernel for these operands, or nullptr.
template <int N>
const void* contiguous_kernel(const ElementwiseKernels& kernels, const Space<N>& space) {
  if (!space.contiguous()) return nullptr;
  for (int k = 0; k <= N; ++k)
    if (space.data[k] != nullptr &&
        (space.dtypes[k] != space.dtypes[0] || !aligned_to(space.data[k], 16)))
      return nullptr;
  switch (space.dtypes[0]) {
    case Dtype::f32: return kernels.f32;
    case Dtype::f16: return kernels.f16;
    case Dtype::bf16: return kernels.bf16;
    default: return nullptr;
  }
}

template <int N>
void launch_contiguous(const Call<N>& call, const void* kernel, const Space<N>& space) {
  const std::int64_t n = space.inner_size();
  const int per_vector = 16 / static_cast<int>(size_of(space.dtypes[0]));
  ContiguousArgs<N> args;
  args.out = space.data[0];
  for (int k = 0; k < N; ++k) {
    args.in[k] = space.data[k + 1];
    args.scalar[k] = scalar_as<float>(call.in[k].scalar);
  }
  args.vectors = n / per_vector;
  args.tail = static_cast<std::int32_t>(n % per_vector);
  // Several vectors a thread only where there is work enough for every multiprocessor.
  const std::int64_t wanted = args.vectors / (1024 * kElementwiseThreads);
  args.block_vectors = kElementwiseThreads * static_cast<std::int32_t>(std::clamp<std::int64_t>(
                                                 wanted, 1, call.kernels.vectors_per_thread));
  const std::int64_t blocks =
      std::max<std::int64_t>(1, (args.vectors + args.block_vectors - 1) / args.block_vectors);
  launch_kernel(kernel, blocks, call.kernels.formula, &args, call.stream);
}

// ---- rows

/// Whether the rows kernel can take the operands: the innermost dimension in whole groups, every
/// group of every operand aligned.
template <int N>
bool rows_fit(const Space<N>& space, std::int64_t inner) {
  if (space.dims == 0 || inner % kRowsWidth != 0) return false;
  for (int k = 0; k <= N; ++k) {
    if (space.data[k] == nullptr || space.strides[k][0] == 0) continue;
    if (space.strides[k][0] != 1) return false;
    const std::size_t bytes = kRowsWidth * size_of(space.dtypes[k]);
    if (!aligned_to(space.data[k], std::min<std::size_t>(bytes, 16))) return false;
    for (int d = 1; d < space.dims; ++d)
      if (space.strides[k][d] % kRowsWidth != 0) return false;
  }
  return space.strides[0][0] == 1;
}

template <int N>
void launch_rows(const Call<N>& call, const Space<N>& space) {
  RowsArgs<N> args;
  for (int k = 0; k <= N; ++k) {
    args.data[k] = space.data[k];
    args.scalar[k] = k > 0 ? scalar_as<float>(call.in[k - 1].scalar) : 0.0f;
    args.dense[k] = space.strides[k][0] == 1;
    args.dtypes[k] = space.dtypes[k];
    for (int d = 0; d < space.dims; ++d)
      args.strides[k][d] = static_cast<std::int32_t>(space.strides[k][d]);
  }
  args.dims = space.dims;
  for (int d = 0; d < space.dims; ++d)
    args.sizes[d] = FastDivide(d == 0 ? space.sizes[0] / kRowsWidth : space.sizes[d]);
  args.groups = static_cast<std::uint32_t>(space.numel() / kRowsWidth);
  const std::int64_t blocks = (args.groups + kElementwiseThreads - 1) / kElementwiseThreads;
  launch_kernel(call.kernels.rows, blocks, call.kernels.formula, &args, call.stream);
}

// ---- strided

template <class C, int N>
void launch_strided(const Call<N>& call, const void* kernel, const Space<N>& space) {
  StridedArgs<N, C> args;
  for (int k = 0; k <= N; ++k) {
    args.data[k] = space.data[k];
    args.scalar[k] = k > 0 ? scalar_as<C>(call.in[k - 1].scalar) : C(0);
    args.dtypes[k] = space.dtypes[k];
    for (int d = 0; d < space.dims; ++d)
      args.strides[k][d] = static_cast<std::int32_t>(space.strides[k][d]);
  }
  args.dims = space.dims;
  for (int d = 0; d < space.dims; ++d) args.sizes[d] = FastDivide(space.sizes[d]);
  args.numel = static_cast<std::uint32_t>(space.numel());
  constexpr std::int64_t kPerBlock = kElementwiseThreads * kStridedItems;
  launch_kernel(kernel, (args.numel + kPerBlock - 1) / kPerBlock, call.kernels.formula, &args,
                call.stream);
}

template <int N>
void launch_float_piece(const Call<N>& call, const Space<N>& piece) {
  if (call.kernels.rows != nullptr) {
    if (rows_fit<N>(piece, piece.inner_size())) return launch_rows(call, piece);
    const std::int64_t n = piece.inner_size(), whole = n - n % kRowsWidth;
    if (piece.dims == 1 && n >= kSmall && rows_fit<N>(piece, whole)) {
      launch_rows(call, piece.slice(0, 0, whole));
      return launch_strided<float>(call, call.kernels.strided_f32,
                                   piece.slice(0, whole, n - whole));
    }
  }
  launch_strided<float>(call, call.kernels.strided_f32, piece);
}

}  // namespace

template <int N>
void launch_elementwise(const Stream& stream, const char* name, Dtype compute,
                        const ElementwiseKernels& kernels, const View& out,
                        const Operand (&in)[N]) {
  const View* views[N + 1] = {&out};
  for (int k = 0; k < N; ++k) views[k + 1] = in[k].view ? &in[k].view : nullptr;
  const Space<N> space = make_iteration_space(name, views);
  if (space.numel() == 0) return;
  const CudaDeviceGuard guard(stream.device());
  const Call<N> call{stream, kernels, in};
  if (compute == Dtype::f32) {
    if (const void* kernel = contiguous_kernel<N>(kernels, space))
      return launch_contiguous(call, kernel, space);
    for_each_piece(space, [&](const Space<N>& piece) { launch_float_piece(call, piece); });
  } else if (compute == Dtype::f64) {
    for_each_piece(space, [&](const Space<N>& piece) {
      launch_strided<double>(call, kernels.strided_f64, piece);
    });
  } else {
    MT_CHECK(compute == Dtype::i64 && kernels.strided_i64 != nullptr, name,
             ": expected a floating arithmetic type, got ", compute);
    for_each_piece(space, [&](const Space<N>& piece) {
      launch_strided<std::int64_t>(call, kernels.strided_i64, piece);
    });
  }
}

template void launch_elementwise<1>(const Stream&, const char*, Dtype, const ElementwiseKernels&,
                                    const View&, const Operand (&)[1]);
template void launch_elementwise<2>(const Stream&, const char*, Dtype, const ElementwiseKernels&,
                                    const View&, const Operand (&)[2]);
template void launch_elementwise<3>(const Stream&, const char*, Dtype, const ElementwiseKernels&,
                                    const View&, const Operand (&)[3]);

}  // namespace mixtape::kernels::cuda
