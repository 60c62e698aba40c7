// Each collective is one task of the communication thread: for CUDA tensors copy to pinned memory,
// then the plan's MPI calls one after another, then copy back. Nothing on that thread blocks.
#include "distributed/mpi_communicator.h"

#include <atomic>
#include <optional>

#include "distributed/flight_recorder.h"
#include "distributed/mpi_check.h"
#include "distributed/mpi_plan.h"
#include "distributed/mpi_thread.h"
#include "engine/cuda/backend.h"
#include "engine/transfer.h"

namespace mixtape::distributed {
namespace {

/// Host copies of a collective's CUDA tensors and the copies' progress.
class Staging {
 public:
  /// On the caller's thread: what is queued on its stream now comes first.
  Staging(const Collective& c, const Stream& side, int rank)
      : c_(c), side_(side), ready_(Stream::current(side.device())) {
    c.in.record_stream(side);
    c.out.record_stream(side);
    in_ = make_host_copy(c.in);
    out_ = c.out.same(c.in) ? in_ : make_host_copy(c.out);
    const bool root = rank == c.peer;
    reads_ = c.kind != CollectiveKind::recv && (c.kind != CollectiveKind::broadcast || root);
    writes_ = c.kind != CollectiveKind::send && (c.kind != CollectiveKind::reduce || root);
  }
  void* in() const { return in_->data(); }
  void* out() const { return out_->data(); }

  /// True when the host copy of the input is there.
  bool load() {
    if (!ready_.done()) return false;
    if (!copied_) {
      if (reads_)
        copy_bytes(in_->data(), Device::cpu(), c_.in.raw_data(), side_.device(), in_->bytes(),
                   side_);
      copied_.emplace(side_);
    }
    return copied_->done();
  }
  /// Queues the copy of the result to the device.
  Event store() {
    if (writes_)
      copy_bytes(c_.out.raw_data(), side_.device(), out_->data(), Device::cpu(), out_->bytes(),
                 side_);
    return Event(side_);
  }

 private:
  static Ref<Storage> make_host_copy(const Tensor& t) {
    return Storage::create_pinned(static_cast<std::size_t>(t.numel()) * size_of(t.dtype()));
  }
  Collective c_;
  Stream side_;
  Event ready_;
  Ref<Storage> in_, out_;
  bool reads_, writes_;
  std::optional<Event> copied_;
};

class MpiWork final : public WorkState, public MpiTask {
 public:
  MpiWork(const Collective& c, const MpiGroup& group, const Stream& side) : c_(c), group_(group) {
    if (c.kind != CollectiveKind::barrier && c.in.device().is_cuda())
      staging_.emplace(c, side, group.rank);
  }

  ~MpiWork() override {
    if (!error_ || heard_) return;
    try {
      std::rethrow_exception(error_);
    } catch (const std::exception& e) {
      FlightRecorder::instance().note_unheard(e.what());
    }
  }

  // The caller's side.
  void wait() override {
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [this] { return finished_here_; });
    heard_ = true;
    if (error_) std::rethrow_exception(error_);
    if (stored_) Stream::current(device_).wait(*stored_);
  }
  bool done() override {
    const std::lock_guard lock(mutex_);
    return finished_here_ && (!stored_ || stored_->done());
  }

  // The communication thread's side.
  bool step() override {
    if (stored_) return stored_->done() && release();
    if (staging_ && !staging_->load()) return false;
    if (!plan_) make_plan();
    while (test()) {
      if (!plan_->post(request_)) return finish();
    }
    return false;
  }
  void fail(std::exception_ptr error) noexcept override {
    {
      const std::lock_guard lock(mutex_);
      error_ = with_description(error);
      finished_here_ = true;
    }
    finished_.notify_all();
    release();
  }
  bool collective() const override {
    return c_.kind != CollectiveKind::send && c_.kind != CollectiveKind::recv;
  }

 private:
  void make_plan() {
    const bool barrier = c_.kind == CollectiveKind::barrier;
    const void* in = staging_ ? staging_->in() : barrier ? nullptr : c_.in.raw_data();
    void* out = staging_ ? staging_->out() : barrier ? nullptr : c_.out.raw_data();
    plan_ = make_mpi_plan(c_, group_, in, out);
  }
  /// True when no call is under way.
  bool test() {
    if (request_ == MPI_REQUEST_NULL) return true;
    int flag = 0;
    MPI_Status status;
    MT_MPI_CHECK(MPI_Test(&request_, &flag, &status));
    if (flag == 0) return false;
    plan_->complete(status);
    return true;
  }
  bool finish() {
    std::optional<Event> stored;
    if (staging_) stored.emplace(staging_->store());
    {
      const std::lock_guard lock(mutex_);
      if (staging_) device_ = c_.out.device();
      stored_ = std::move(stored);
      finished_here_ = true;
      if (!stored_) release();  // before a waiter can look: the memory is the caller's again
    }
    finished_.notify_all();
    return !stored_;
  }
  bool release() {
    plan_.reset();
    staging_.reset();
    c_.in = c_.out = Tensor();
    return true;
  }
  std::exception_ptr with_description(std::exception_ptr error) const {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& e) {
      return std::make_exception_ptr(Error(c_.describe + ": " + e.what()));
    }
  }

  Collective c_;
  MpiGroup group_;
  std::optional<Staging> staging_;
  std::unique_ptr<MpiPlan> plan_;
  MPI_Request request_ = MPI_REQUEST_NULL;

  std::mutex mutex_;
  std::condition_variable finished_;
  bool finished_here_ = false;  // on the host; stored_ is the end on the device
  Device device_;
  std::optional<Event> stored_;
  std::exception_ptr error_;
  bool heard_ = false;
};

class MpiBackend final : public Backend {
 public:
  MpiBackend(const MpiGroup& group, Device device)
      : thread_(MpiThread::instance()), group_(group), side_(Stream::create(device)) {}
  // Its communicator is left to MPI_Finalize: MPI_Comm_free is collective, and destructors run in
  // no order that ranks share.

  std::shared_ptr<WorkState> start(const Collective& c) override {
    if (c.in && c.in.device().is_cuda()) check_not_captured(c);
    auto work = std::make_shared<MpiWork>(c, group_, side_);
    thread_.submit(work);
    return work;
  }

  std::unique_ptr<Backend> split(int color, int key, const std::string&) override {
    MpiGroup part;
    thread_.run_alone([&] {
      MT_MPI_CHECK(MPI_Comm_split(group_.comm, color < 0 ? MPI_UNDEFINED : color, key, &part.comm));
      if (part.comm == MPI_COMM_NULL) return;
      MT_MPI_CHECK(MPI_Comm_set_errhandler(part.comm, MPI_ERRORS_RETURN));
      MT_MPI_CHECK(MPI_Comm_rank(part.comm, &part.rank));
      MT_MPI_CHECK(MPI_Comm_size(part.comm, &part.size));
    });
    if (part.comm == MPI_COMM_NULL) return nullptr;
    return std::make_unique<MpiBackend>(part, side_.device());
  }

 private:
  static void check_not_captured(const Collective& c) {
    const Device device = c.in.device();
    MT_CHECK(!cudart::is_capturing(device.index, Stream::current(device).native()), c.describe,
             ": goes through MPI (ranks share a GPU, or this build has no NCCL), which cannot be "
             "captured in a CUDA graph; run the step without capture");
  }
  MpiThread& thread_;  // of before finalize(), and nothing may start another after it
  MpiGroup group_;
  Stream side_;
};

}  // namespace

std::unique_ptr<Backend> make_mpi_backend(int rank, int world_size, Device device) {
  MpiGroup world;
  MpiThread::instance().run_alone([&] {
    // A communicator of our own: messages of the program's own MPI calls cannot meet ours.
    MT_MPI_CHECK(MPI_Comm_dup(MPI_COMM_WORLD, &world.comm));
    MT_MPI_CHECK(MPI_Comm_set_errhandler(world.comm, MPI_ERRORS_RETURN));
    MT_MPI_CHECK(MPI_Comm_rank(world.comm, &world.rank));
    MT_MPI_CHECK(MPI_Comm_size(world.comm, &world.size));
  });
  MT_CHECK(world.size == world_size && world.rank == rank,
           "MPI: the launcher's variables say rank ", rank, " of ", world_size, ", MPI says rank ",
           world.rank, " of ", world.size,
           ": this program was built with another MPI than the one whose mpirun started it, or "
           "RANK and WORLD_SIZE are left over in the environment");
  return std::make_unique<MpiBackend>(world, device);
}

std::string mpi_broadcast_text(const std::string& text) {
  std::string result = text;
  MpiThread::instance().run_alone([&] {
    std::int64_t size = static_cast<std::int64_t>(text.size());
    MT_MPI_CHECK(MPI_Bcast(&size, 1, MPI_INT64_T, 0, MPI_COMM_WORLD));
    result.resize(static_cast<std::size_t>(size));
    MT_MPI_CHECK(MPI_Bcast(result.data(), static_cast<int>(size), MPI_BYTE, 0, MPI_COMM_WORLD));
  });
  return result;
}

std::string mpi_library_version() {
  return MpiThread::running() ? MpiThread::instance().library_version() : "";
}

void finalize_mpi() {
  if (MpiThread::running()) MpiThread::instance().shut_down();
}

}  // namespace mixtape::distributed
