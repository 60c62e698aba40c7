// How each op of ops.def is called on the inputs and attributes of a golden case.
#pragma once

#include <ostream>
#include <vector>

#include "engine/tensor.h"
#include "tests/goldens/golden_file.h"

namespace mixtape::testing {

using Results = std::vector<Tensor>;

struct Call {
  const GoldenCase& c;
  std::vector<Tensor> in;
  /// Input i, or undefined where the case has fewer.
  Tensor optional(std::size_t i) const { return i < in.size() ? in[i] : Tensor(); }
};

struct GoldenOp {
  const char* name;  // as in ops.def
  Results (*run)(const Call& call);
  friend std::ostream& operator<<(std::ostream& out, const GoldenOp& op) { return out << op.name; }
};
const std::vector<GoldenOp>& golden_ops();

}  // namespace mixtape::testing
