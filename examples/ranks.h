// The run that an example is part of: alone, or with --dp one rank of mpirun, srun or torchrun.
#pragma once

#include <mixtape.h>

#include <string>

#include "distributed/process_group.h"

namespace examples {

namespace mt = mixtape;

class Ranks {
 public:
  /// `device`: "cpu" or "cuda". Throws when several ranks were launched without --dp: each would
  /// train the same model.
  Ranks(const char* program, bool dp, const std::string& device) {
    const mt::distributed::Launch launch = mt::distributed::detect_launch();
    MT_CHECK(dp || launch.world_size == 1, program, ": launched with ", launch.world_size,
             " ranks; pass --dp to train one model on all of them");
    device_ = mt::Device::parse(device);
    if (dp) {
      using mt::distributed::DeviceChoice;
      mt::distributed::init({.device = device_.is_cpu() ? DeviceChoice::cpu : DeviceChoice::cuda});
      world_ = mt::distributed::world();
      device_ = world_.device();
    }
    mt::check_device(program, device_);
  }

  int rank() const { return world_ ? world_.rank() : 0; }
  int size() const { return world_ ? world_.size() : 1; }
  /// The one that prints and writes.
  bool first() const { return rank() == 0; }
  mt::Device device() const { return device_; }
  const mt::distributed::Communicator& world() const { return world_; }

  /// `count` things of all ranks, divided among them.
  std::int64_t share(const char* what, std::int64_t count) const {
    MT_CHECK(count % size() == 0, "expected ", what, " that ", size(), " ranks can share, got ",
             count);
    return count / size();
  }
  /// The sum of the ranks' tensors, on each of them.
  mt::Tensor sum(const mt::Tensor& t) const { return reduce(t, mt::distributed::ReduceOp::sum); }
  mt::Tensor mean(const mt::Tensor& t) const { return reduce(t, mt::distributed::ReduceOp::avg); }
  /// What rank 0 passes, on every rank.
  std::int64_t agree(std::int64_t value) const {
    const mt::NoGrad no_grad;
    const mt::Tensor t = mt::full({1}, value, {.dtype = mt::Dtype::i64, .device = device_});
    if (world_) mt::distributed::Communicator(world_).broadcast(t, 0);
    return t.item<std::int64_t>();
  }

 private:
  mt::Tensor reduce(const mt::Tensor& t, mt::distributed::ReduceOp op) const {
    if (!world_) return t;
    const mt::NoGrad no_grad;
    const mt::Tensor total = t.detach().clone();
    mt::distributed::Communicator(world_).all_reduce(total, op);
    return total;
  }

  mt::Device device_;
  mt::distributed::Communicator world_;
};

}  // namespace examples
