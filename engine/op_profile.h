// What the profiler notes about ops. These are called only while a range of this thread is open;
// the engine's hot paths ask Range::on() first.
#pragma once

#include "engine/node.h"
#include "engine/profile_hooks.h"

namespace mixtape::profile {

/// Shapes, FLOPs and bytes of a forward call that is about to run (after autocast).
void note_forward(const OpTable& table, const void* op, Inputs in, Inputs out);
void note_view(const Tensor& in);
/// Ties the innermost op to the node it records, and the node to the module it is in.
void note_node(Node& node);
/// The innermost range is a whole backward pass.
void note_backward_pass();
/// The innermost range is the backward of `node`, which belongs to the module of its forward. Where
/// it is recorded itself, the ops that it consists of count the work.
void note_backward(const Node& node, Inputs dy, std::span<const GradDst> dx, bool recorded);

}  // namespace mixtape::profile
