// The recorded dtype conversion. The engine knows it by name because autocast inserts it and
// because backward sees through it to the leaf behind.
#pragma once

#include "engine/op.h"

namespace mixtape {

struct CastOp {
  Dtype to;
  static constexpr OpInfo info{.name = "cast", .higher_order = true};
  Metas infer(Inputs in) const { return {{in[0].shape(), to}}; }
  void forward(Inputs in, Outputs out, Saved& saved) const;
  void backward(const Saved& saved, Inputs dy, Grads dx) const;
};

}  // namespace mixtape
