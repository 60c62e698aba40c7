// Each group has a communicator and a high-priority stream of its own. A collective waits there for
// what the caller's stream has queued, and Work::wait() makes the caller's stream wait for it: the
// host waits for nothing, and a CUDA graph can record it.
//
// Communicators are non-blocking (ncclConfig_t::blocking = 0): a call that needs the other ranks
// returns at once, and the wait for it ends at the timeout.
#include "distributed/nccl_communicator.h"

#include <nccl.h>

#include <algorithm>
#include <mutex>
#include <thread>
#include <vector>

#include "distributed/socket.h"
#include "engine/cuda/cuda_check.h"

namespace mixtape::distributed {
namespace {

/// One order of launches for all groups of the process: two communicators whose kernels are queued
/// in different orders on two ranks can wait for each other for ever.
std::mutex launch_mutex;

/// Communicators that abort_nccl() has to end.
struct Registry {
  std::mutex mutex;
  std::vector<ncclComm_t> live;
};
Registry& registry() {
  static Registry* instance = new Registry;
  return *instance;
}

[[noreturn]] void throw_nccl(ncclResult_t result, const std::string& what, ncclComm_t comm) {
  const char* last = ncclGetLastError(comm);
  MT_THROW(what, ": NCCL: ", ncclGetErrorString(result),
           last != nullptr && *last != '\0' ? std::string(": ") + last : std::string());
}

void check(ncclResult_t result, const std::string& what, ncclComm_t comm = nullptr) {
  if (result != ncclSuccess && result != ncclInProgress) throw_nccl(result, what, comm);
}

/// Waits until a call on a non-blocking communicator has taken effect.
void settle(ncclComm_t comm, double timeout, const std::string& what) {
  ncclResult_t state = ncclInProgress;
  for (const Deadline end = deadline_in(timeout); state == ncclInProgress;) {
    check(ncclCommGetAsyncError(comm, &state), what, comm);
    if (state == ncclInProgress) {
      MT_CHECK(Clock::now() < end, what, ": NCCL: not ready after ", timeout,
               " s; NCCL_DEBUG=INFO says which rank or interface it waits for");
      std::this_thread::yield();
    }
  }
  check(state, what, comm);
}

ncclDataType_t nccl_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32: return ncclFloat32;
    case Dtype::f16: return ncclFloat16;
    case Dtype::bf16: return ncclBfloat16;
    case Dtype::f64: return ncclFloat64;
    case Dtype::i64: return ncclInt64;
    case Dtype::i32: return ncclInt32;
    case Dtype::u8:
    case Dtype::b8: return ncclUint8;
  }
  MT_THROW("NCCL: has no type for ", dtype);
}

ncclRedOp_t nccl_op(ReduceOp op, Dtype dtype) {
  switch (op) {
    case ReduceOp::sum: return dtype == Dtype::b8 ? ncclMax : ncclSum;
    case ReduceOp::avg: return ncclAvg;
    case ReduceOp::min: return ncclMin;
    case ReduceOp::max: return ncclMax;
  }
  MT_THROW("NCCL: invalid ReduceOp ", static_cast<int>(op));
}

ncclConfig_t make_config() {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  return config;
}

/// Ends its communicator with its last user.
class NcclComm {
 public:
  NcclComm(ncclComm_t comm, Device device) : comm_(comm), device_(device) {
    const std::lock_guard lock(registry().mutex);
    registry().live.push_back(comm);
  }
  ~NcclComm() {
    {
      const std::lock_guard lock(registry().mutex);
      if (std::erase(registry().live, comm_) == 0) return;  // aborted
    }
    constexpr double kSeconds = 10;
    try {
      const CudaDeviceGuard guard(device_);
      check(ncclCommFinalize(comm_), "finalize", comm_);
      settle(comm_, kSeconds, "finalize");
      ncclCommDestroy(comm_);
    } catch (const Error&) {  // others are gone
      ncclCommAbort(comm_);
    }
  }
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;
  operator ncclComm_t() const { return comm_; }

 private:
  ncclComm_t comm_;
  Device device_;
};

class NcclWork final : public WorkState {
 public:
  NcclWork(std::shared_ptr<NcclComm> comm, const Stream& stream, bool captured)
      : comm_(std::move(comm)), finished_(stream), device_(stream.device()), captured_(captured) {}
  void wait() override { Stream::current(device_).wait(finished_); }
  /// Of a captured collective the replays are the graph's, which is watched as a whole.
  bool done() override { return captured_ || finished_.done(); }
  std::string failure() override {
    ncclResult_t state = ncclSuccess;
    if (ncclCommGetAsyncError(*comm_, &state) != ncclSuccess) return "NCCL: no state";
    if (state == ncclSuccess || state == ncclInProgress) return "";
    return std::string("NCCL: ") + ncclGetErrorString(state);
  }

 private:
  std::shared_ptr<NcclComm> comm_;
  Event finished_;
  Device device_;
  bool captured_;
};

class NcclBackend final : public Backend {
 public:
  NcclBackend(ncclComm_t comm, const NcclOptions& options)
      : options_(options),
        comm_(std::make_shared<NcclComm>(comm, options.device)),
        stream_(Stream::create(options.device, true)) {}

  std::shared_ptr<WorkState> start(const Collective& c) override {
    const CudaDeviceGuard guard(options_.device);
    const Stream caller = Stream::current(options_.device);
    const bool captured = cudart::is_capturing(options_.device.index, caller.native());
    const std::lock_guard lock(launch_mutex);
    stream_.wait(Event(caller));
    launch(c);
    settle(*comm_, options_.timeout, c.describe);
    c.in.record_stream(stream_);
    c.out.record_stream(stream_);
    return std::make_shared<NcclWork>(comm_, stream_, captured);
  }

  std::unique_ptr<Backend> split(int color, int key, const std::string& name) override {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 18, 0)
    const CudaDeviceGuard guard(options_.device);
    const std::lock_guard lock(launch_mutex);
    ncclComm_t part = nullptr;
    ncclConfig_t config = make_config();
    check(ncclCommSplit(*comm_, color < 0 ? NCCL_SPLIT_NOCOLOR : color, key, &part, &config), name,
          *comm_);
    settle(*comm_, options_.timeout, name);
    if (color < 0) return nullptr;
    settle(part, options_.timeout, name);
    NcclOptions options = options_;
    options.name = name;
    check(ncclCommUserRank(part, &options.rank), name, part);
    check(ncclCommCount(part, &options.size), name, part);
    return std::make_unique<NcclBackend>(part, options);
#else
    MT_THROW(name, ": NCCL 2.18 or later can split a group; this build has ", nccl_version());
#endif
  }

 private:
  void launch(const Collective& c) {
    const Dtype dtype = c.in.dtype();
    const ncclDataType_t type = nccl_type(dtype);
    const ncclRedOp_t op = nccl_op(c.op, dtype);
    const void* in = c.in.raw_data();
    void* out = c.out.raw_data();
    const auto n = static_cast<std::size_t>(c.in.numel());
    const auto n_out = static_cast<std::size_t>(c.out.numel());
    ncclComm_t comm = *comm_;
    cudaStream_t stream = native_stream(stream_);
    switch (c.kind) {
      case CollectiveKind::all_reduce:
        return check(ncclAllReduce(in, out, n, type, op, comm, stream), c.describe, comm);
      case CollectiveKind::reduce:
        return check(ncclReduce(in, out, n, type, op, c.peer, comm, stream), c.describe, comm);
      case CollectiveKind::broadcast:
        return check(ncclBroadcast(in, out, n, type, c.peer, comm, stream), c.describe, comm);
      case CollectiveKind::all_gather:
        return check(ncclAllGather(in, out, n, type, comm, stream), c.describe, comm);
      case CollectiveKind::reduce_scatter:
        return check(ncclReduceScatter(in, out, n_out, type, op, comm, stream), c.describe, comm);
      case CollectiveKind::send:
        return check(ncclSend(in, n, type, c.peer, comm, stream), c.describe, comm);
      case CollectiveKind::recv:
        return check(ncclRecv(out, n, type, c.peer, comm, stream), c.describe, comm);
      case CollectiveKind::all_to_all: return launch_all_to_all(c);
      case CollectiveKind::barrier: break;  // Communicator::barrier() is the host's
    }
    MT_THROW(c.describe, ": not a collective of CUDA tensors");
  }

  void launch_all_to_all(const Collective& c) {
    const auto n = static_cast<std::size_t>(c.in.numel()) / static_cast<std::size_t>(options_.size);
    const std::size_t bytes = n * size_of(c.in.dtype());
    const ncclDataType_t type = nccl_type(c.in.dtype());
    ncclComm_t comm = *comm_;
    check(ncclGroupStart(), c.describe, comm);
    ncclResult_t result = ncclSuccess;
    for (int peer = 0; peer < options_.size && (result == ncclSuccess || result == ncclInProgress);
         ++peer) {
      const std::size_t offset = static_cast<std::size_t>(peer) * bytes;
      result = ncclSend(static_cast<const char*>(c.in.raw_data()) + offset, n, type, peer, comm,
                        native_stream(stream_));
      if (result != ncclSuccess && result != ncclInProgress) break;
      result = ncclRecv(static_cast<char*>(c.out.raw_data()) + offset, n, type, peer, comm,
                        native_stream(stream_));
    }
    const ncclResult_t ended = ncclGroupEnd();
    check(result, c.describe, comm);
    check(ended, c.describe, comm);
  }

  NcclOptions options_;
  std::shared_ptr<NcclComm> comm_;
  Stream stream_;
};

}  // namespace

std::string nccl_version() {
  int version = 0;
  check(ncclGetVersion(&version), "ncclGetVersion");
  return detail::concat(version / 10000, '.', version / 100 % 100, '.', version % 100);
}

std::unique_ptr<Backend> make_nccl_backend(const NcclOptions& options) {
  const CudaDeviceGuard guard(options.device);
  ncclUniqueId id{};
  std::string text;
  if (options.rank == 0) {
    check(ncclGetUniqueId(&id), options.name);
    text.assign(id.internal, sizeof id.internal);
  }
  text = options.share(text);
  MT_CHECK(text.size() == sizeof id.internal, options.name, ": NCCL: expected an id of ",
           sizeof id.internal, " bytes, got ", text.size());
  std::copy(text.begin(), text.end(), id.internal);
  ncclComm_t comm = nullptr;
  ncclConfig_t config = make_config();
  check(ncclCommInitRankConfig(&comm, options.size, id, options.rank, &config), options.name);
  try {
    settle(comm, options.timeout, options.name);
  } catch (...) {
    ncclCommAbort(comm);
    throw;
  }
  return std::make_unique<NcclBackend>(comm, options);
}

void abort_nccl() noexcept {
  std::vector<ncclComm_t> live;
  {
    const std::lock_guard lock(registry().mutex);
    live.swap(registry().live);
  }
  for (ncclComm_t comm : live) ncclCommAbort(comm);
}

}  // namespace mixtape::distributed
