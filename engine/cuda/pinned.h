// Questions about page-locked host memory that copies ask. Internal.
#pragma once

#include "engine/stream.h"

namespace mixtape::cudart {

/// True if `data` lies in a live block of the pinned allocator; the block is then not reused before
/// the work now queued on `stream` is done.
bool record_pinned_use(const void* data, const Stream& stream);

}  // namespace mixtape::cudart
