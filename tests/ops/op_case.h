// One row of the op table, and the inputs made from it. See op_cases.cpp for the table and
// op_harness_test.cpp for what is derived from a row.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "engine/op.h"
#include "tests/ops/reference.h"

namespace mixtape::testing {

struct Arg {
  enum class Kind : std::uint8_t {
    real,   // uniform in [lo, hi)
    apart,  // real, all values at least 1e-2 apart and from 0: away from kinks and ties
    index,  // int64 in [0, bound)
    boolean,
  };
  Shape shape;
  Kind kind = Kind::real;
  double lo = -2, hi = 2;
  std::int64_t bound = 0;
  bool differentiable = true;

  static Arg real(const Shape& s, double lo = -2, double hi = 2) {
    return {s, Kind::real, lo, hi, 0, true};
  }
  static Arg apart(const Shape& s) { return {s, Kind::apart, -2, 2, 0, true}; }
  static Arg index(const Shape& s, std::int64_t bound) {
    return {s, Kind::index, 0, 0, bound, false};
  }
  static Arg boolean(const Shape& s) { return {s, Kind::boolean, 0, 0, 0, false}; }
};

struct OpCase {
  const char* op;  // as in ops.def
  std::string variant;
  std::vector<Arg> args;
  std::function<Tensor(const std::vector<Tensor>&)> run;
  std::function<Array(const Arrays&)> reference;  // on float64 copies of the (rounded) inputs
  Cast cast = Cast::keep;                         // autocast policy
  std::int64_t length = 1;  // additions behind one output element: sets the tolerance
  bool differentiable = true;
  bool second_order = true;           // gradients of gradients are available
  bool exact = false;                 // moves values: equal to the last bit
  double intermediate_roundings = 0;  // results rounded to the inputs' dtype on the way
  double ulps = 4;                    // of the compute type, beyond rounding the result once
};

const std::vector<OpCase>& op_cases();

/// Every op of ops.def.
enum class OpId : std::uint8_t {
#define MT_OP(function) function,
#include "ops/ops.def"
};
/// Adds the rows of one op. Deleted unless op_cases.cpp specialises it, so that an op in ops.def
/// without a row does not compile.
template <OpId>
void add_cases(std::vector<OpCase>& list) = delete;

/// Deterministic values for argument `number` of a case: the same on every machine.
Array make_values(const OpCase& c, std::size_t number, std::uint64_t seed = 1);
Tensor to_tensor(const Array& a, const Arg& arg, Dtype dtype, Device device);
Array to_array(const Tensor& t);

}  // namespace mixtape::testing
