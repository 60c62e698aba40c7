// Stream capture and CUDA graphs.
#include <mutex>

#include "engine/cuda/capture_mode.h"
#include "engine/cuda/cuda_check.h"

namespace mixtape::cudart {
namespace {
cudaStream_t native(void* stream) { return static_cast<cudaStream_t>(stream); }
}  // namespace

void* capture_stream(int device) {
  static std::mutex mutex;
  static cudaStream_t streams[kMaxDevices] = {};
  const std::lock_guard lock(mutex);
  cudaStream_t& stream = streams[device];
  if (stream == nullptr) {
    const CudaDeviceGuard guard(Device::cuda(device));
    MT_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  return stream;
}

// Thread-local: loaders and other threads go on with work of their own meanwhile.
void begin_capture(int device, void* stream) {
  const CudaDeviceGuard guard(Device::cuda(device));
  MT_CHECK(!is_capturing(device, stream),
           "capture: expected one capture at a time on a device, and another is under way");
  MT_CUDA_CHECK(cudaStreamBeginCapture(native(stream), cudaStreamCaptureModeThreadLocal));
}

CapturedGraph end_capture(int device, void* stream) {
  const CudaDeviceGuard guard(Device::cuda(device));
  cudaGraph_t graph = nullptr;
  MT_CUDA_CHECK(cudaStreamEndCapture(native(stream), &graph));
  struct Destroy {
    cudaGraph_t graph;
    ~Destroy() { cudaGraphDestroy(graph); }
  } destroy{graph};
  CapturedGraph result;
  MT_CUDA_CHECK(cudaGraphGetNodes(graph, nullptr, &result.nodes));
  cudaGraphExec_t executable = nullptr;
  MT_CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
  result.executable = executable;
  return result;
}

void abandon_capture(int device, void* stream) noexcept {
  try {
    const CudaDeviceGuard guard(Device::cuda(device));
    cudaGraph_t graph = nullptr;
    cudaStreamEndCapture(native(stream), &graph);  // an invalidated capture returns an error
    if (graph != nullptr) cudaGraphDestroy(graph);
    cudaGetLastError();
  } catch (...) {
  }
}

void launch_graph(int device, void* executable, void* stream) {
  const CudaDeviceGuard guard(Device::cuda(device));
  MT_CUDA_CHECK(cudaGraphLaunch(static_cast<cudaGraphExec_t>(executable), native(stream)));
  check_kernel("captured step", device, stream, sync_mode());
}

void destroy_graph(int, void* executable) noexcept {
  if (in_forked_child()) return;
  cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(executable));
}

void synchronize_device_quietly(int device) noexcept {
  if (in_forked_child()) return;
  try {
    const CudaDeviceGuard guard(Device::cuda(device));
    cudaDeviceSynchronize();
  } catch (...) {
  }
}

}  // namespace mixtape::cudart
