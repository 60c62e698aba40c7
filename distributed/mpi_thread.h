// The one thread that calls MPI. It initialises MPI, starts each collective's non-blocking calls,
// tests them in turn, and finalises. So MPI needs to promise no more than MPI_THREAD_FUNNELED, no
// call ever blocks behind another, and groups may be used in different orders on different ranks.
// Internal.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace mixtape::distributed {

/// What the thread works on. step() and fail() are called there only.
class MpiTask {
 public:
  virtual ~MpiTask() = default;
  /// Starts or goes on without blocking; true when done. A throw ends the task through fail().
  virtual bool step() = 0;
  virtual void fail(std::exception_ptr error) noexcept = 0;
  /// False for tasks that may stay open until another rank acts: run_alone() does not wait for
  /// them.
  virtual bool collective() const { return true; }
};

class MpiThread {
 public:
  /// The thread of this process. The first call starts it and initialises MPI; throws if that
  /// fails.
  static MpiThread& instance();
  /// Whether instance() was called and shut_down() was not.
  static bool running();

  void submit(std::shared_ptr<MpiTask> task);
  /// Runs f on the thread while no collective is under way, and returns when it is done. Rethrows.
  /// For MPI's blocking calls on all ranks of a group.
  void run_alone(const std::function<void()>& f);
  /// Waits for open tasks, calls MPI_Finalize if MPI was initialised here, ends the thread.
  void shut_down();
  /// Version of the MPI library, its first line.
  const std::string& library_version() const { return library_version_; }

 private:
  MpiThread();
  void loop();
  void take_submitted(std::unique_lock<std::mutex>& lock);
  bool advance();
  void initialize();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<MpiTask>> submitted_;
  bool stopping_ = false;
  std::vector<std::shared_ptr<MpiTask>> open_;  // of the thread alone
  bool initialized_here_ = false;
  std::string library_version_;
  std::thread thread_;
};

}  // namespace mixtape::distributed
