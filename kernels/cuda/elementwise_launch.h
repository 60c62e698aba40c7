// Host side of the elementwise kernels: what a launch passes to the device, and the choice between
// the three layouts. Free of any formula, so it is compiled once and by the host compiler.
#pragma once

#include "kernels/cuda/fast_divide.cuh"
#include "kernels/elementwise.h"

namespace mixtape::kernels::cuda {

/// Threads of a block in every elementwise kernel.
inline constexpr int kElementwiseThreads = 256;
/// Elements of a thread's step in the rows kernel, and elements per thread in the strided one.
inline constexpr int kRowsWidth = 8;
inline constexpr int kStridedItems = 4;

/// Contiguous: all operands one dense run of one dtype (f32, f16 or bf16), 16-byte aligned.
template <int N>
struct ContiguousArgs {
  void* out;
  const void* in[N];  // nullptr: scalar[k]
  float scalar[N];
  std::int64_t vectors;        // whole 16-byte vectors
  std::int32_t block_vectors;  // of one block: a multiple of kElementwiseThreads
  std::int32_t tail;           // elements after the last whole vector
};

/// Rows: every operand's innermost dimension is dense or broadcast, in whole aligned groups of
/// kRowsWidth elements; dtypes are run-time values. Operand 0 is the output. Offsets are below
/// 2^31.
template <int N>
struct RowsArgs {
  void* data[N + 1];  // nullptr: scalar[k]
  float scalar[N + 1];
  bool dense[N + 1];  // innermost stride 1 (else 0)
  Dtype dtypes[N + 1];
  std::int32_t dims;  // 1..kMaxDims
  std::uint32_t groups;
  FastDivide sizes[kMaxDims];             // sizes[0] in groups
  std::int32_t strides[N + 1][kMaxDims];  // [k][0] unused
};

/// Strided: anything, one element at a time. Offsets are below 2^31.
template <int N, class C>
struct StridedArgs {
  void* data[N + 1];  // nullptr: scalar[k]
  C scalar[N + 1];
  Dtype dtypes[N + 1];
  std::int32_t dims;
  std::uint32_t numel;
  FastDivide sizes[kMaxDims];
  std::int32_t strides[N + 1][kMaxDims];
};

/// The instances of one formula; a kernel takes (formula, args). Absent ones are nullptr.
struct ElementwiseKernels {
  const void* f32 = nullptr;  // contiguous, by storage type
  const void* f16 = nullptr;
  const void* bf16 = nullptr;
  const void* rows = nullptr;         // arithmetic in float
  const void* strided_f32 = nullptr;  // strided, by arithmetic type
  const void* strided_f64 = nullptr;
  const void* strided_i64 = nullptr;
  const void* formula = nullptr;  // the formula object, copied at launch
  int vectors_per_thread = 1;     // of the contiguous kernels
};

/// out = formula(in...), computed in `compute`. Throws "name: ..." for an arithmetic type that the
/// formula does not have.
template <int N>
void launch_elementwise(const Stream& stream, const char* name, Dtype compute,
                        const ElementwiseKernels& kernels, const View& out, const Operand (&in)[N]);
extern template void launch_elementwise<1>(const Stream&, const char*, Dtype,
                                           const ElementwiseKernels&, const View&,
                                           const Operand (&)[1]);
extern template void launch_elementwise<2>(const Stream&, const char*, Dtype,
                                           const ElementwiseKernels&, const View&,
                                           const Operand (&)[2]);
extern template void launch_elementwise<3>(const Stream&, const char*, Dtype,
                                           const ElementwiseKernels&, const View&,
                                           const Operand (&)[3]);

}  // namespace mixtape::kernels::cuda
