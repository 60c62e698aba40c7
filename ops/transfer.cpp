// Moving tensors between devices and dtypes.
#include "engine/transfer.h"

#include "engine/tensor_detail.h"
#include "kernels/elementwise.h"
#include "ops/op_support.h"

namespace mixtape {
namespace {

void copy_across(const Tensor& to, const Tensor& from,
                 bool non_blocking) {  // both contiguous, one dtype
  const Device on = to.device().is_cuda() ? to.device() : from.device();
  const Stream stream = Stream::current(on);
  if (from.device().is_cuda() && to.device().is_cuda() && !(from.device() == to.device())) {
    stream.wait(Event(Stream::current(from.device())));
    from.record_stream(stream);
  }
  copy_bytes(to.raw_data(), to.device(), from.raw_data(), from.device(),
             static_cast<std::size_t>(from.numel()) * size_of(from.dtype()), stream);
  if (from.is_pinned()) from.record_stream(stream);
  if (to.is_pinned()) to.record_stream(stream);
  // A copy to the host is waited for, so that the value is there to be read; a blocking one from
  // pinned memory, so that the caller may write to that memory.
  if (to.device().is_cpu() || (from.is_pinned() && !non_blocking)) stream.synchronize();
}

struct ToDevice {
  Device device;
  bool non_blocking;
  static constexpr OpInfo info{.name = "to", .higher_order = true};
  Metas infer(Inputs in) const {
    return {{Shape{0}, in[0].dtype()}};
  }  // allocated by forward, elsewhere
  void forward(Inputs in, Outputs out, Saved&) const {
    const Tensor from = in[0].contiguous();
    out[0] = Tensor::empty(from.shape(), from.dtype(), device);
    copy_across(out[0], from, non_blocking);
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    dx[0].set(dy[0].to(saved.device()));
  }
};

}  // namespace

Tensor Tensor::to(Dtype dtype) const { return cast(*this, dtype); }

Tensor Tensor::to(Device device, bool non_blocking) const {
  check_device("to", device);
  if (device == this->device()) return *this;
  return apply(ToDevice{device, non_blocking}, {*this});
}

Tensor Tensor::to(Device device, Dtype dtype, bool non_blocking) const {
  // Convert on the side where fewer bytes then travel.
  if (size_of(dtype) < size_of(this->dtype())) return to(dtype).to(device, non_blocking);
  return to(device, non_blocking).to(dtype);
}

Tensor Tensor::pin_memory() const {
  MT_CHECK(device().is_cpu(), "pin_memory: expected a tensor on the CPU, got ", describe());
  if (is_pinned()) return *this;
  const Tensor pinned = mixtape::empty(shape(), {.dtype = dtype(), .pinned = true});
  detail::copy_into(pinned, *this);
  return pinned;
}

}  // namespace mixtape
