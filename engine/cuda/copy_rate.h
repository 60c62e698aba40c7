// The CUDA side of engine/copy_rate.h. Internal.
#pragma once

namespace mixtape::cudart {

double copy_rate(int device);

}  // namespace mixtape::cudart
