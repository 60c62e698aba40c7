// Apart from the rest of the profile's types, so that a hook costs a file nothing to include.
#pragma once

#include <cstdint>

namespace mixtape {

/// What a range of host time is.
enum class ProfileKind : std::uint8_t {
  op,           // one op, forward or backward
  function,     // an engine function: backward pass, optimizer step, graph replay, item()
  module,       // a module's forward
  user,         // RecordFunction
  data,         // waiting for the next batch
  synchronize,  // the host waits for a device
};

}  // namespace mixtape
