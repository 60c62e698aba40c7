// NVTX ranges of this thread, for Nsight Systems. Without a tool attached each costs a few
// nanoseconds. Internal: engine/profile_hooks.h keeps pushes and pops balanced.
#pragma once

namespace mixtape::nvtx {

bool available() noexcept;
void push(const char* name) noexcept;
void pop() noexcept;

}  // namespace mixtape::nvtx
