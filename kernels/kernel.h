// Dispatch: a kernel is a pair of functions, one for each backend, chosen by the stream's device.
// No registry and no static initialisers: a contract header declares both functions and one
// constexpr Kernel object.
//
// Contracts. A kernel takes views and a stream, allocates nothing, knows no gradients and no
// Tensor. Operands live on the stream's device. Outputs do not overlap inputs unless the header
// says so ("in place"). Scratch comes as a Workspace sized by x_workspace_bytes(); its content is
// undefined on entry. Accumulation is in float (double for f64) whatever the storage type.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/op_scope.h"
#include "engine/scalar.h"
#include "engine/stream.h"
#include "engine/view.h"

#if defined(MIXTAPE_WITH_CUDA)
#define MT_CUDA(function) function
#else
#define MT_CUDA(function) nullptr
#endif

namespace mixtape {

/// Scratch memory for one kernel call, 256-byte aligned.
struct Workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
};

namespace detail {
[[noreturn]] void throw_no_backend(const char* kernel, Device device);
/// Under MIXTAPE_SYNC=1 waits for the kernel and throws its CUDA error under the kernel's name.
void check_after_kernel(const char* kernel, const Stream& stream);
}  // namespace detail

template <class... Args>
struct Kernel {
  using Function = void (*)(const Stream&, Args...);
  const char* name;
  Function cpu;
  Function cuda;

  void operator()(const Stream& stream, std::type_identity_t<Args>... args) const {
    const Function function = stream.device().is_cpu() ? cpu : cuda;
    if (function == nullptr) [[unlikely]]
      detail::throw_no_backend(name, stream.device());
    function(stream, args...);
    if (stream.device().is_cuda()) detail::check_after_kernel(name, stream);
  }
};
template <class... Args>
Kernel(const char*, void (*)(const Stream&, Args...), void (*)(const Stream&, Args...))
    -> Kernel<Args...>;
template <class... Args>
Kernel(const char*, void (*)(const Stream&, Args...), std::nullptr_t) -> Kernel<Args...>;

}  // namespace mixtape
