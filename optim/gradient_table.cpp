#include "optim/gradient_table.h"

#include <cstring>

#include "engine/graph_recorder.h"
#include "engine/node.h"
#include "engine/transfer.h"

namespace mixtape::optim {

kernels::GradientTable GradientTable::refresh(const std::vector<Tensor>& parameters) {
  ranges_.clear();
  std::int64_t chunk = 0;
  bool first = true;
  for (const Tensor& p : parameters) {
    if (graph_recorder != nullptr) [[unlikely]]
      graph_recorder->note_leaf(*p.impl());
    const Tensor g = p.grad();
    if (!g || g.numel() == 0) continue;
    MT_CHECK(first || g.device() == device_, "gradients: expected all on ", device_, ", got ",
             g.describe());
    MT_CHECK(g.is_contiguous(), "gradients: expected contiguous memory, got ", g.describe());
    device_ = g.device();
    first = false;
    kernels::GradientRange r;
    std::memset(static_cast<void*>(&r), 0, sizeof(r));  // padding too: ranges are compared as bytes
    r.data = g.raw_data();
    r.numel = g.numel();
    r.first_chunk = chunk;
    r.dtype = g.dtype();
    chunk += (r.numel + kernels::kChunk - 1) / kernels::kChunk;
    ranges_.push_back(r);
  }
  const std::size_t bytes = ranges_.size() * sizeof(kernels::GradientRange);
  const bool changed = ranges_.size() != sent_.size() ||
                       (bytes > 0 && std::memcmp(ranges_.data(), sent_.data(), bytes) != 0);
  if (changed) {
    listed_.clear();
    for (const Tensor& p : parameters) {
      const Tensor g = p.grad();
      if (g && g.numel() > 0) listed_.push_back(p);
    }
    if (device_.is_cuda() && bytes > 0) {
      const OutsideCapture outside(device_);
      device_ranges_ = Tensor::empty({static_cast<std::int64_t>(bytes)}, Dtype::u8, device_);
      copy_bytes(device_ranges_.raw_data(), device_, ranges_.data(), Device::cpu(), bytes,
                 Stream::current(device_));
    }
    sent_ = ranges_;
  }
  if (graph_recorder != nullptr) [[unlikely]]
    graph_recorder->keep(device_ranges_);
  kernels::GradientTable table;
  table.host = ranges_.data();
  table.device = device_.is_cuda() && bytes > 0
                     ? static_cast<const kernels::GradientRange*>(device_ranges_.raw_data())
                     : ranges_.data();
  table.count = static_cast<std::int64_t>(ranges_.size());
  table.chunks = chunk;
  return table;
}

}  // namespace mixtape::optim
