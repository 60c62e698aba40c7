// What a profile consists of, as plain data: ranges of host time, work of devices, calls of the
// CUDA runtime that launched it, and changes of memory. Times are nanoseconds of the steady clock.
// The recorder (engine/profile_hooks.h) and CUPTI (engine/cuda/cupti.h) make these; the table, the
// bottleneck report and the trace read them, and so can a program of its own.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/device.h"
#include "engine/dtype.h"
#include "engine/profile_kind.h"
#include "engine/shape.h"

namespace mixtape {

struct TypedShape {
  Shape shape = {};
  Dtype dtype = Dtype::f32;
  friend bool operator==(const TypedShape&, const TypedShape&) = default;
};

struct HostRange {
  std::uint64_t id = 0;        // of this process, from 1; DeviceActivity::range names it
  std::uint64_t sequence = 0;  // of the tape's node: a forward and its backward share it; 0: none
  ProfileKind kind = ProfileKind::op;
  bool backward = false;    // of the backward pass, ops that an op's backward runs included
  bool unfinished = false;  // still open when the recording ended, and cut there
  int thread = 0;           // index into ProfileResult::threads
  std::int64_t begin_ns = 0, end_ns = 0;
  std::string name = {};
  std::string module = {};      // dotted path; of a backward op where its forward was recorded
  double flops = 0, bytes = 0;  // of this op alone, as computed from its shapes
  std::int64_t allocated = 0, freed = 0;  // bytes, outside of ranges within
  std::int64_t allocator_ns = 0;          // spent in allocators, outside of ranges within
  std::vector<TypedShape> inputs = {};

  std::int64_t duration_ns() const { return end_ns - begin_ns; }
};

enum class ActivityKind : std::uint8_t { kernel, copy, fill };

/// A kernel, copy or fill on a device.
struct DeviceActivity {
  ActivityKind kind = ActivityKind::kernel;
  std::string name = {};
  int device = 0;
  std::uint32_t stream = 0;
  std::int64_t begin_ns = 0, end_ns = 0;
  std::uint64_t range = 0;        // innermost HostRange that launched it; 0: unknown
  std::uint64_t correlation = 0;  // of its ApiCall
  double bytes = 0;               // of a copy or fill

  std::int64_t duration_ns() const { return end_ns - begin_ns; }
};

/// A call of the CUDA runtime or driver from within a range.
struct ApiCall {
  std::string name = {};
  std::uint64_t range = 0;
  std::uint64_t correlation = 0;
  std::int64_t begin_ns = 0, end_ns = 0;
};

/// An allocation or a release by a caching allocator.
struct MemoryChange {
  std::int64_t time_ns = 0;
  Device device = {};
  bool pinned = false;                       // page-locked host memory
  std::int64_t bytes = 0;                    // negative for a release
  std::int64_t allocated = 0, reserved = 0;  // of that allocator, afterwards
};

}  // namespace mixtape
