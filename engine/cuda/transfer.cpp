// Copies with a CUDA side. Pinned host memory is copied asynchronously; other host memory goes
// through two pinned staging blocks in turn, so that the copy to the staging block and the transfer
// overlap and the caller's memory is free (or filled) on return.
#include "engine/transfer.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "engine/allocator.h"
#include "engine/cuda/capture_mode.h"
#include "engine/cuda/cuda_check.h"
#include "engine/cuda/pinned.h"
#include "engine/op_scope.h"

namespace mixtape::cudart {
namespace {

constexpr std::size_t kStage = std::size_t{4} << 20;

class StagingBlock {
 public:
  StagingBlock(std::size_t bytes, const Stream& stream)
      : block_(mixtape::pinned_allocator().allocate(bytes, stream)) {
    mixtape::pinned_allocator().record_stream(block_, stream);
  }
  ~StagingBlock() { mixtape::pinned_allocator().release(block_); }
  StagingBlock(const StagingBlock&) = delete;
  StagingBlock& operator=(const StagingBlock&) = delete;

  void* data() const { return block_.data; }
  std::optional<Event> queued;  // the end of the transfer that uses the block

 private:
  Block block_;
};

void enqueue(void* dst, const void* src, std::size_t n, cudaMemcpyKind kind, const Stream& stream) {
  MT_CUDA_CHECK(cudaMemcpyAsync(dst, src, n, kind, native_stream(stream)));
}

void upload(char* dst, const char* src, std::size_t n, const Stream& stream) {
  StagingBlock first(std::min(n, kStage), stream);
  std::optional<StagingBlock> second;
  if (n > kStage) second.emplace(kStage, stream);
  for (std::size_t done = 0; done < n; done += kStage) {
    StagingBlock& stage = done / kStage % 2 ? *second : first;
    const std::size_t part = std::min(kStage, n - done);
    if (stage.queued) stage.queued->synchronize();
    std::memcpy(stage.data(), src + done, part);
    enqueue(dst + done, stage.data(), part, cudaMemcpyHostToDevice, stream);
    if (n - done > 2 * kStage) stage.queued.emplace(stream);
  }
}

void download(char* dst, const char* src, std::size_t n, const Stream& stream) {
  StagingBlock first(std::min(n, kStage), stream);
  std::optional<StagingBlock> second;
  if (n > kStage) second.emplace(kStage, stream);
  const auto stage_of = [&](std::size_t at) -> StagingBlock& {
    return at / kStage % 2 ? *second : first;
  };
  const auto start = [&](std::size_t at) {
    StagingBlock& stage = stage_of(at);
    enqueue(stage.data(), src + at, std::min(kStage, n - at), cudaMemcpyDeviceToHost, stream);
    stage.queued.emplace(stream);
  };
  start(0);
  for (std::size_t done = 0; done < n; done += kStage) {
    if (done + kStage < n) start(done + kStage);
    StagingBlock& stage = stage_of(done);
    stage.queued->synchronize();
    std::memcpy(dst + done, stage.data(), std::min(kStage, n - done));
  }
}

// Memory that someone else pinned or manages is as good as ours.
bool is_pinned(const void* data, const Stream& stream) {
  if (record_pinned_use(data, stream)) return true;
  const RelaxedCapture relaxed;
  cudaPointerAttributes attributes{};
  MT_CUDA_CHECK(cudaPointerGetAttributes(&attributes, data));
  return attributes.type == cudaMemoryTypeHost || attributes.type == cudaMemoryTypeManaged;
}

// The destination's stream waits for what produces the source, and the source's stream for the
// copy, so that both sides can go on as if it were their own work.
void copy_between_devices(void* dst, Device dst_device, const void* src, Device src_device,
                          std::size_t n, const Stream& stream) {
  const Stream source = Stream::current(src_device);
  stream.wait(Event(source));
  MT_CUDA_CHECK(
      cudaMemcpyPeerAsync(dst, dst_device.index, src, src_device.index, n, native_stream(stream)));
  source.wait(Event(stream));
}

}  // namespace

void copy(void* dst, Device dst_device, const void* src, Device src_device, std::size_t n,
          const Stream& stream) {
  const CudaDeviceGuard guard(stream.device());
  if (dst_device.is_cuda() && src_device.is_cuda()) {
    if (dst_device == src_device)
      enqueue(dst, src, n, cudaMemcpyDeviceToDevice, stream);
    else
      copy_between_devices(dst, dst_device, src, src_device, n, stream);
    return;
  }
  const bool to_device = dst_device.is_cuda();
  const void* host = to_device ? src : dst;
  if (is_pinned(host, stream)) {
    enqueue(dst, src, n, to_device ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost, stream);
    return;
  }
  MT_CHECK(!is_capturing(stream.device().index, stream.native()),
           OpScope::current() ? OpScope::current() : "copy_bytes",
           ": expected pinned host memory in a captured step, got memory that a replay could not "
           "read or write");
  if (to_device) {
    upload(static_cast<char*>(dst), static_cast<const char*>(src), n, stream);
  } else {
    download(static_cast<char*>(dst), static_cast<const char*>(src), n, stream);
    throw_device_error(stream.device());  // the host has just synchronised with the stream
  }
}

void set(int device, void* dst, int value, std::size_t n, void* stream) {
  const CudaDeviceGuard guard(Device::cuda(device));
  MT_CUDA_CHECK(cudaMemsetAsync(dst, value, n, static_cast<cudaStream_t>(stream)));
}

}  // namespace mixtape::cudart
