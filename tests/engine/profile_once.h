// Profiles one call, for the profiler's tests.
#pragma once

#include <algorithm>
#include <string_view>
#include <vector>

#include "engine/profile_result.h"
#include "engine/profiler.h"

namespace mixtape::testing {

template <class F>
ProfileResult profile_once(F&& f, ProfilerOptions options = {}) {
  Profiler profiler(std::move(options));
  f();
  profiler.stop();
  return profiler.result();
}

inline std::vector<HostRange> ranges_named(const ProfileResult& result, std::string_view name,
                                           bool backward = false) {
  std::vector<HostRange> found;
  std::copy_if(result.ranges.begin(), result.ranges.end(), std::back_inserter(found),
               [&](const HostRange& r) { return r.name == name && r.backward == backward; });
  return found;
}

inline double flops_of(const ProfileResult& result, std::string_view name, bool backward = false) {
  double total = 0;
  for (const HostRange& r : ranges_named(result, name, backward)) total += r.flops;
  return total;
}

}  // namespace mixtape::testing
