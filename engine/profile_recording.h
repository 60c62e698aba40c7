// What the hooks record, for the profiler and for those that add to an open range.
#pragma once

#include <string>
#include <vector>

#include "engine/profile_events.h"
#include "engine/profile_hooks.h"

namespace mixtape::profile {

/// An open range.
struct RecordedRange : HostRange {
  const char* literal = nullptr;  // the name, where it is one
  std::uint32_t module_id = 0;
};

/// What was recorded since start().
struct Recording {
  std::vector<HostRange> ranges;
  std::vector<MemoryChange> memory;
  std::vector<std::string> threads;  // names, by HostRange::thread; 0 is the caller of stop()
  std::uint64_t lost = 0;            // events that did not fit into memory
};
/// Turns recording on (a Mode without kNvtx), dropping what was recorded before.
void start(unsigned mode);
/// Turns it off and hands over what was recorded; ranges still open on this thread are cut here.
Recording stop();

}  // namespace mixtape::profile
