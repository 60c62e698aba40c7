#include "distributed/mpi_thread.h"

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <future>

#include "distributed/mpi_check.h"

namespace mixtape::distributed {
namespace {

MpiThread* the_thread = nullptr;  // never destroyed: exit handlers may still need it
std::mutex the_thread_mutex;

/// A blocking call in its turn.
class AloneTask final : public MpiTask {
 public:
  explicit AloneTask(const std::function<void()>& f) : f_(f) {}
  bool step() override {
    f_();
    finished.set_value();
    return true;
  }
  void fail(std::exception_ptr error) noexcept override { finished.set_exception(error); }
  std::promise<void> finished;

 private:
  const std::function<void()>& f_;
};

/// Waits a little longer each time that nothing moved: an answer over shared memory takes
/// microseconds, and where ranks outnumber cores another rank needs this one's to get there. It
/// sleeps and does not yield: on a busy machine a thread that yields waits for a whole time slice
/// of every other, one that sleeps is woken first.
class Backoff {
 public:
  void moved() { idle_ = 0; }
  void pause() {
    constexpr int kSpins = 100, kSteps = 10;
    constexpr std::chrono::microseconds kStep(10);
    if (++idle_ < kSpins) return;
    std::this_thread::sleep_for(kStep * std::min((idle_ - kSpins) / kSteps + 1, kSteps));
  }

 private:
  int idle_ = 0;
};

}  // namespace

MpiThread& MpiThread::instance() {
  const std::lock_guard lock(the_thread_mutex);
  if (the_thread == nullptr) the_thread = new MpiThread;
  return *the_thread;
}

bool MpiThread::running() {
  const std::lock_guard lock(the_thread_mutex);
  return the_thread != nullptr;
}

MpiThread::MpiThread() {
  std::promise<void> ready;
  thread_ = std::thread([this, &ready] {
    try {
      initialize();
    } catch (...) {
      ready.set_exception(std::current_exception());
      return;
    }
    ready.set_value();
    loop();
  });
  try {
    ready.get_future().get();
  } catch (...) {
    thread_.join();
    throw;
  }
}

void MpiThread::initialize() {
  int initialized = 0, finalized = 0;
  MPI_Finalized(&finalized);
  MT_CHECK(!finalized,
           "MPI: expected MPI not to be finalised yet; it cannot start twice in one "
           "process");
  MPI_Initialized(&initialized);
  if (initialized) {
    int provided = 0, is_main = 0;
    MT_MPI_CHECK(MPI_Query_thread(&provided));
    MT_MPI_CHECK(MPI_Is_thread_main(&is_main));
    MT_CHECK(provided >= MPI_THREAD_SERIALIZED,
             "MPI: the program initialised MPI for one thread, and Mixtape calls it from its own; "
             "expected MPI_Init_thread with MPI_THREAD_SERIALIZED or no call at all");
  } else {
    // Where ranks outnumber cores, Open MPI yields in each MPI_Test, which undoes Backoff: four
    // ranks on two busy cores were eight times slower. A value that the user set stays.
    setenv("OMPI_MCA_mpi_yield_when_idle", "0", 0);
    int provided = 0;
    MT_MPI_CHECK(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided));
    initialized_here_ = true;
    MT_CHECK(provided >= MPI_THREAD_FUNNELED,
             "MPI: expected thread support of at least MPI_THREAD_FUNNELED, got level ", provided);
  }
  MT_MPI_CHECK(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
  MT_MPI_CHECK(MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN));
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  MT_MPI_CHECK(MPI_Get_library_version(text, &length));
  library_version_.assign(text, static_cast<std::size_t>(length));
  library_version_.resize(std::min(library_version_.find_first_of(",\n"), library_version_.size()));
}

void MpiThread::submit(std::shared_ptr<MpiTask> task) {
  {
    const std::lock_guard lock(mutex_);
    MT_CHECK(!stopping_, "MPI: a collective was called after finalize()");
    submitted_.push_back(std::move(task));
  }
  wake_.notify_one();
}

void MpiThread::run_alone(const std::function<void()>& f) {
  auto task = std::make_shared<AloneTask>(f);
  std::future<void> finished = task->finished.get_future();
  submit(task);
  finished.get();
}

void MpiThread::take_submitted(std::unique_lock<std::mutex>& lock) {
  while (!submitted_.empty()) {
    std::shared_ptr<MpiTask> task = submitted_.front();
    if (dynamic_cast<AloneTask*>(task.get()) != nullptr) {
      for (const auto& other : open_)
        if (other->collective()) return;  // its turn comes when they are done
    }
    submitted_.pop_front();
    lock.unlock();
    open_.push_back(std::move(task));
    advance();  // in order: what was submitted first is posted first
    lock.lock();
  }
}

bool MpiThread::advance() {
  bool moved = false;
  for (std::size_t i = 0; i < open_.size();) {
    bool done = true;
    try {
      done = open_[i]->step();
    } catch (...) {
      open_[i]->fail(std::current_exception());
    }
    if (done) {
      open_.erase(open_.begin() + static_cast<std::ptrdiff_t>(i));
      moved = true;
    } else {
      ++i;
    }
  }
  return moved;
}

void MpiThread::loop() {
  prctl(PR_SET_TIMERSLACK, 1000);  // ns: by default short sleeps last 50 us longer
  Backoff backoff;
  std::unique_lock lock(mutex_);
  for (;;) {
    if (open_.empty()) {
      wake_.wait(lock, [this] { return stopping_ || !submitted_.empty(); });
      if (submitted_.empty()) break;  // stopping, and nothing is left
      backoff.moved();
    }
    take_submitted(lock);
    lock.unlock();
    if (advance())
      backoff.moved();
    else
      backoff.pause();
    lock.lock();
  }
  lock.unlock();
  if (initialized_here_) MPI_Finalize();
}

void MpiThread::shut_down() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
  const std::lock_guard lock(the_thread_mutex);
  the_thread = nullptr;  // this object stays: someone may hold a reference
}

}  // namespace mixtape::distributed
