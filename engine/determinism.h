// Deterministic mode: two runs of the same program on the same device give the same bits. Kernels
// are deterministic by themselves; this switch turns off what chooses between library algorithms
// by measuring (cuBLASLt and cuDNN trials, the algorithm cache on disk) and rules out library
// algorithms that add in an order that may change.
#pragma once

#include <atomic>

namespace mixtape {

namespace detail {
inline std::atomic<bool> deterministic{false};
}

inline bool deterministic() { return detail::deterministic.load(std::memory_order_relaxed); }
/// Process-wide; off by default.
inline void set_deterministic(bool on) { detail::deterministic = on; }

}  // namespace mixtape
