// --profile DIR of the training examples: a few steps are profiled, their table and bottlenecks
// printed, and a trace for ui.perfetto.dev written.
#pragma once

#include <mixtape.h>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>

#include "engine/profile_result.h"

/// Nothing without a folder. Call step() at the end of each training step.
inline std::unique_ptr<mixtape::Profiler> start_profiler(const std::string& folder) {
  if (folder.empty()) return nullptr;
  std::filesystem::create_directories(folder);
  const std::string trace = std::filesystem::path(folder) / "trace.json";
  return std::make_unique<mixtape::Profiler>(mixtape::ProfilerOptions{
      .schedule = {.wait = 5, .warmup = 2, .active = 3, .repeat = 1},
      .on_trace = [trace](const mixtape::ProfileResult& result) {
        result.write_trace(trace);
        std::printf("\n%s\n%sTrace         %s (open it in ui.perfetto.dev)\n",
                    result.table({.rows = 15}).c_str(), result.bottlenecks().text().c_str(),
                    trace.c_str());
      }});
}
