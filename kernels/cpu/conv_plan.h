// oneDNN convolution primitives with the reorders between the caller's layout and theirs, one cache
// a thread. Included only where MIXTAPE_WITH_ONEDNN is defined.
#pragma once

#include <dnnl.hpp>

#include "kernels/cpu/conv.h"
#include "kernels/cpu/scratch.h"

namespace mixtape::kernels::cpu::onednn {

/// One tensor of a primitive: the caller's memory and, where oneDNN prefers another layout, a copy.
class PlanOperand {
 public:
  enum class Use { input, output };
  PlanOperand() = default;
  PlanOperand(const dnnl::memory::desc& user, const dnnl::memory::desc& inner, Use use);

  /// Input: binds `data` and brings it into oneDNN's layout.
  void read(void* data, ScratchFrame& frame);
  /// Output: binds `data`; after execution, write() brings the result there.
  void open(void* data, ScratchFrame& frame);
  void write();
  const dnnl::memory& memory() const { return inner_; }

 private:
  bool copied_ = false;
  dnnl::memory user_, inner_;
  dnnl::reorder reorder_;
};

struct Plan {
  std::uint64_t number;  // no other plan of this thread has it
  dnnl::primitive primitive;
  PlanOperand x, w, y;
  dnnl::memory bias;

  void execute(ConvPass pass) const;
};

/// The plan of this thread for images and weights of these shapes and strides, all f32.
Plan& find_plan(ConvPass pass, const ConvProblem& part);

}  // namespace mixtape::kernels::cpu::onednn
