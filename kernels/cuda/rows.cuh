// Building blocks of the row kernels (softmax, normalisation, cross-entropy): how lanes and blocks
// share a row of a row-major (N, C) matrix.
//
// A row is worked on in units: 16-byte vectors where every row is 16-byte aligned, else single
// elements. A group of lanes (a power of two, at most a warp) or a whole block takes the units of a
// row in turn, so that neighbouring threads touch neighbouring memory. 16-bit types are kept packed
// until they are used, which halves the registers of a load in flight.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/load_store.cuh"
#include "kernels/kernel.h"

namespace mixtape::kernels::cuda {

// ---- units ---------------------------------------------------------------------------------

template <class T, bool kVector>
inline constexpr int kUnitWidth = kVector ? kPerVector<T> : 1;
template <class T, bool kVector>
using Unit = std::conditional_t<kVector, uint4, T>;

/// Unit `index` of the row that starts at `row`.
template <class T, bool kVector>
__device__ __forceinline__ Unit<T, kVector> load_unit(const T* row, std::int64_t index) {
  return reinterpret_cast<const Unit<T, kVector>*>(row)[index];
}
/// The same of an operand that the kernel does not write, through the read-only path: the compiler
/// may move it across stores.
template <class T, bool kVector>
__device__ __forceinline__ Unit<T, kVector> read_unit(const T* row, std::int64_t index) {
  if constexpr (kVector) {
    return __ldg(reinterpret_cast<const uint4*>(row) + index);
  } else if constexpr (sizeof(T) == 2) {
    return T::from_bits(__ldg(reinterpret_cast<const unsigned short*>(row) + index));
  } else {
    return __ldg(row + index);
  }
}
template <class T, bool kVector>
__device__ __forceinline__ void store_unit(T* row, std::int64_t index, Unit<T, kVector> unit) {
  reinterpret_cast<Unit<T, kVector>*>(row)[index] = unit;
}

template <class T>
__device__ __forceinline__ void unpack(T unit, float (&x)[1]) {
  x[0] = static_cast<float>(unit);
}
template <class T>
__device__ __forceinline__ T pack(const float (&x)[1]) {
  return T(x[0]);
}

/// The sum of two units, rounded to T.
template <class T, bool kVector>
__device__ __forceinline__ Unit<T, kVector> add_units(const Unit<T, kVector>& x,
                                                      const Unit<T, kVector>& y) {
  constexpr int kWidth = kUnitWidth<T, kVector>;
  float a[kWidth], b[kWidth];
  unpack<T>(x, a);
  unpack<T>(y, b);
#pragma unroll
  for (int k = 0; k < kWidth; ++k) a[k] += b[k];
  return pack<T>(a);
}

/// Hides where a unit came from: the compiler then unpacks it again after this point rather than
/// keep the unpacked values (twice or four times the registers) alive across it.
__device__ __forceinline__ void keep_packed(uint4& unit) {
  asm volatile("" : "+r"(unit.x), "+r"(unit.y), "+r"(unit.z), "+r"(unit.w));
}
__device__ __forceinline__ void keep_packed(float& unit) { asm volatile("" : "+f"(unit)); }
template <class T>
__device__ __forceinline__ void keep_packed(T& unit) {
  asm volatile("" : "+h"(unit.bits));
}

/// Elements [first, first + N) of a read-only array of W as floats; kVector: 16-byte aligned.
template <class W, bool kVector, int N>
__device__ __forceinline__ void read_floats(const W* data, std::int64_t first, float (&out)[N]) {
  constexpr int kWidth = kUnitWidth<W, kVector>;
  static_assert(N % kWidth == 0);
#pragma unroll
  for (int i = 0; i < N / kWidth; ++i) {
    float part[kWidth];
    unpack<W>(read_unit<W, kVector>(data + first, i), part);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) out[i * kWidth + k] = part[k];
  }
}

// ---- rows on their way to shared memory ----------------------------------------------------

/// One unit to shared memory: asynchronously where the hardware can (4 or 16 bytes), else at once.
template <class T, bool kVector>
__device__ __forceinline__ void fetch_unit(Unit<T, kVector>* to, const T* from) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  if constexpr (kVector)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
  else if constexpr (sizeof(T) == 4)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(from) : "memory");
  else
    *to = read_unit<T, kVector>(from, 0);
}
/// Ends this thread's group of fetches.
__device__ __forceinline__ void commit_fetches() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/// Waits until at most `pending` (0 to 2) of this thread's groups are under way.
__device__ __forceinline__ void wait_for_fetches(int pending) {
  if (pending == 2)
    asm volatile("cp.async.wait_group 2;" ::: "memory");
  else if (pending == 1)
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  else
    asm volatile("cp.async.wait_group 0;" ::: "memory");
}

// ---- operands of a dtype known only at run time --------------------------------------------

/// An optional vector: element i of a contiguous floating array.
struct AnyVector {
  void* data = nullptr;
  Dtype dtype = Dtype::f32;

  AnyVector() = default;
  explicit AnyVector(const View& view) : data(view ? view.data : nullptr), dtype(view.dtype) {}
  __device__ __forceinline__ explicit operator bool() const { return data != nullptr; }
  template <class C>
  __device__ __forceinline__ C load(std::int64_t i) const {
    return load_as<C>(data, dtype, i);
  }
  template <class C>
  __device__ __forceinline__ void store(std::int64_t i, C value) const {
    store_as(data, dtype, i, value);
  }
};
/// Elements [first, first + N) of an optional vector of float or T as floats; `absent` where there
/// is none. kVector: 16-byte aligned.
template <class T, bool kVector, int N>
__device__ __forceinline__ void read_vector(const AnyVector& vector, int first, float absent,
                                            float (&out)[N]) {
  if (!vector) {
#pragma unroll
    for (int k = 0; k < N; ++k) out[k] = absent;
  } else if (vector.dtype == Dtype::f32) {
    read_floats<float, kVector>(static_cast<const float*>(vector.data), first, out);
  } else {
    read_floats<T, kVector>(static_cast<const T*>(vector.data), first, out);
  }
}
/// An optional matrix with unit column stride.
struct AnyRows {
  void* data = nullptr;
  Dtype dtype = Dtype::f32;
  std::int64_t stride = 0;

  AnyRows() = default;
  explicit AnyRows(const View& view) {
    if (!view) return;
    data = view.data;
    dtype = view.dtype;
    stride = view.stride(0);
  }
  __device__ __forceinline__ explicit operator bool() const { return data != nullptr; }
  template <class C>
  __device__ __forceinline__ C load(std::int64_t row, std::int64_t column) const {
    return load_as<C>(data, dtype, row * stride + column);
  }
  template <class C>
  __device__ __forceinline__ void store(std::int64_t row, std::int64_t column, C value) const {
    store_as(data, dtype, row * stride + column, value);
  }
};

// ---- reductions ----------------------------------------------------------------------------

/// N sums at once over a block of whole warps; `scratch` holds N * kWarp elements.
template <int N, class C>
__device__ __forceinline__ void block_sums(C (&values)[N], C* scratch) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll
  for (int n = 0; n < N; ++n) values[n] = warp_reduce(values[n], Sum{});
  __syncthreads();
  if (lane == 0)
#pragma unroll
    for (int n = 0; n < N; ++n) scratch[n * kWarp + warp] = values[n];
  __syncthreads();
  const bool active = lane < static_cast<int>(blockDim.x) / kWarp;
#pragma unroll
  for (int n = 0; n < N; ++n)
    values[n] = warp_reduce(active ? scratch[n * kWarp + lane] : C(0), Sum{});
}

// ---- exponentials --------------------------------------------------------------------------

/// exp(x) of values that are stored as T: for 16-bit T the hardware's base-2 exponential, whose
/// relative error (2^-22 near 0, 2^-17 at -87; below 2^-126 the result is 0) vanishes in the
/// rounding to T.
template <class T>
__device__ __forceinline__ float exp_for(float x) {
  if constexpr (sizeof(T) == 2) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
    return y;
  } else {
    return expf(x);
  }
}
__device__ __forceinline__ float exp_of(float x) { return expf(x); }
__device__ __forceinline__ double exp_of(double x) { return exp(x); }
__device__ __forceinline__ float log_of(float x) { return logf(x); }
__device__ __forceinline__ double log_of(double x) { return log(x); }

// ---- host side -----------------------------------------------------------------------------

struct RowShape {
  std::int64_t rows = 0, columns = 0;
};
/// The shape of a matrix.
inline RowShape row_shape(const char* op, const View& view) {
  MT_CHECK(view.dim() == 2, op, ": expected 2 dimensions, got ", view.sizes);
  return {view.size(0), view.size(1)};
}
/// A matrix of that shape with unit column stride; rows may be apart.
inline void check_rows(const char* op, const char* operand, const View& view, RowShape shape) {
  MT_CHECK(view.dim() == 2 && view.size(0) == shape.rows && view.size(1) == shape.columns, op,
           ": expected ", operand, " of shape (", shape.rows, ", ", shape.columns, "), got ",
           view.sizes);
  MT_CHECK(shape.columns <= 1 || view.stride(1) == 1, op, ": expected ", operand,
           " row-major, got strides ", view.strides);
}
/// True if all these matrices that are present lie without gaps: the kernels for one type need it.
template <class... Views>
bool all_contiguous(const Views&... views) {
  return ((!views || views.contiguous()) && ...);
}

/// An optional contiguous vector of `numel` elements.
inline void check_vector(const char* op, const char* operand, const View& view,
                         std::int64_t numel) {
  if (!view) return;
  MT_CHECK(view.numel() == numel && view.contiguous(), op, ": expected ", operand,
           " contiguous with ", numel, " elements, got sizes ", view.sizes, " strides ",
           view.strides);
}

inline bool aligned16(const View& view) { return !view || aligned(view.data, 16); }

inline int ceil_pow2(std::int64_t n) {
  int p = 1;
  while (p < n) p *= 2;
  return p;
}

/// Shared memory that one block may use in all.
inline int shared_memory_per_block() {
  int device = 0, bytes = 0;
  MT_CUDA_CHECK(cudaGetDevice(&device));
  MT_CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return bytes;
}

/// Calls f(TypeTag<T>{}) for the types that have kernels of their own; false for the others.
template <class F>
bool dispatch_row_type(Dtype dtype, F&& f) {
  switch (dtype) {
    case Dtype::f32: f(TypeTag<float>{}); return true;
    case Dtype::f16: f(TypeTag<Half>{}); return true;
    case Dtype::bf16: f(TypeTag<BFloat16>{}); return true;
    default: return false;
  }
}

/// Longest row that a group of lanes keeps in registers.
inline constexpr int kWarpColumns = 1024;
/// Threads of a block of the kernels that give a row to a group of lanes.
inline constexpr int kGroupThreads = 128;

/// Calls f(bool_constant vector, integral_constant units) with the units a lane needs so that a
/// warp holds a row of `columns` <= kWarpColumns elements of T.
template <class T, class F>
void dispatch_units(std::int64_t columns, bool aligned, F&& f) {
  constexpr int kWidth = kUnitWidth<T, true>;
  const auto call = [&]<bool kVector, int kUnits>() {
    f(std::bool_constant<kVector>{}, std::integral_constant<int, kUnits>{});
  };
  if (aligned && columns % kWidth == 0) {
    switch (ceil_pow2(ceil_div<std::int64_t>(columns, kWidth * kWarp))) {
      case 1: return call.template operator()<true, 1>();
      case 2: return call.template operator()<true, 2>();
      case 4: return call.template operator()<true, 4>();
      default:
        if constexpr (sizeof(T) == 4) return call.template operator()<true, 8>();
        return;
    }
  }
  switch (ceil_pow2(ceil_div<std::int64_t>(columns, kWarp))) {
    case 1: return call.template operator()<false, 1>();
    case 2: return call.template operator()<false, 2>();
    case 4: return call.template operator()<false, 4>();
    case 8: return call.template operator()<false, 8>();
    case 16: return call.template operator()<false, 16>();
    default: return call.template operator()<false, 32>();
  }
}
/// Lanes that share a row of `units` units.
inline int group_size(int units) { return units >= kWarp ? kWarp : ceil_pow2(units); }

/// True if the kernels for one type can take these rows: sizes fit their 32-bit column index and
/// the grid, and long rows of both operands cross 16-byte boundaries at the same columns.
inline bool fits_row_kernels(RowShape shape, const View& a, const View& b) {
  const auto address = [](const View& v) { return reinterpret_cast<std::uintptr_t>(v.data); };
  return shape.columns <= (std::int64_t{1} << 30) && shape.rows <= 4 * kMaxGridX &&
         (shape.columns <= kWarpColumns || address(a) % 16 == address(b) % 16);
}

/// A block that works on one row and keeps up to `cached_units` units of each of its operands in
/// dynamic shared memory; with `last_in_registers` a thread's last unit needs no room there.
struct BlockShape {
  int threads, cached_units;
  std::size_t shared_bytes;
};
template <class T, bool kVector = true, class KernelFunction>
BlockShape block_shape(KernelFunction* kernel, std::int64_t columns, int operands,
                       bool last_in_registers = false) {
  constexpr int kBytes = static_cast<int>(sizeof(Unit<T, kVector>));
  const std::int64_t units = columns / kUnitWidth<T, kVector>;
  const std::int64_t most = units > 4096 ? 1024 : 512;  // about two to four loads a thread
  const std::int64_t threads =
      std::clamp<std::int64_t>(ceil_div<std::int64_t>(units, 2 * kWarp) * kWarp, 2 * kWarp, most);
  const std::int64_t room = (shared_memory_per_block() - 1024) / (kBytes * operands);
  const std::int64_t wanted =
      std::max<std::int64_t>(last_in_registers ? units - threads : units, 0);
  const std::int64_t cached = std::min(wanted, room);
  const std::size_t bytes = static_cast<std::size_t>(cached * kBytes * operands);
  if (bytes > 47 * 1024)
    MT_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       static_cast<int>(bytes)));
  return {static_cast<int>(threads), static_cast<int>(cached), bytes};
}

/// Grid of the kernels for any dtype: a block takes rows in turn.
struct RowGrid {
  unsigned blocks, threads;
};
inline RowGrid any_dtype_grid(RowShape shape) {
  const std::int64_t most_blocks = std::int64_t{1} << 20;
  return {static_cast<unsigned>(shape.rows < most_blocks ? shape.rows : most_blocks),
          shape.columns >= 512
              ? 512u
              : static_cast<unsigned>(ceil_div<std::int64_t>(shape.columns, kWarp) * kWarp)};
}

}  // namespace mixtape::kernels::cuda
