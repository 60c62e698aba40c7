// What a thread carries into every op: grad mode, inference mode and autocast. The thread pool
// copies it from the caller into its workers, so that a user's op that runs ops in parallel behaves
// the same.
#pragma once

#include "engine/dtype.h"

namespace mixtape {

struct ThreadState {
  bool grad = true;        // record on the tape
  bool inference = false;  // outputs can never be recorded
  bool autocast = false;
  Dtype autocast_dtype = Dtype::bf16;
  bool autocast_cache = true;
};

extern thread_local constinit ThreadState thread_state;

}  // namespace mixtape
