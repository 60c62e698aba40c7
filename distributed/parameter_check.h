// Whether ranks hold the same tensors: by name, shape and dtype, and by a hash of their values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "distributed/process_group.h"
#include "nn/module.h"

namespace mixtape::distributed {

/// 64 bits of every bit of a tensor's values, the same for the same values on any device. Waits for
/// the device.
std::uint64_t hash_of(const Tensor& t);

/// Throws on every rank of `group`, naming the first tensor that differs and which rank has what,
/// unless all ranks pass tensors of the same names, shapes and dtypes in the same order and, with
/// `values`, of the same values. `what` begins the message.
void check_same_tensors(const Communicator& group, const std::string& what,
                        const std::vector<nn::NamedTensor>& tensors, bool values);

}  // namespace mixtape::distributed
