// One model's gradients through a backward pass: counts what is ready, starts each bucket's
// reduction in the order that all ranks share, and at the end of the pass waits for them. Internal;
// distributed/data_parallel.h is its face.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "distributed/bucket_tuner.h"
#include "distributed/data_parallel.h"
#include "engine/stream.h"

namespace mixtape::distributed {

/// Time that the stream of backward spends on waiting for communication: on the CPU by the clock,
/// on a GPU by events, read when they are done.
class WaitClock {
 public:
  explicit WaitClock(Device device) : device_(device) {}
  void begin();
  void end();
  /// After the last end(): a step is over.
  void end_step();
  /// Seconds between the last begin() and end(). Waits for the device.
  double last() const;
  std::int64_t steps() const { return steps_; }
  double step_seconds() const { return step_seconds_; }  // of all steps()
  double exposed_seconds() const { return exposed_seconds_; }

 private:
  using Time = std::chrono::steady_clock::time_point;
  void collect();
  Device device_;
  Time began_, last_step_;
  double last_ = 0;
  std::optional<std::pair<Event, Event>> last_events_;
  std::optional<Event> event_began_;
  std::vector<std::pair<Event, Event>> open_;  // on the device, not read yet
  bool first_ = true;
  std::int64_t steps_ = 0;
  double step_seconds_ = 0, exposed_seconds_ = 0;
};

class GradientReducer : public std::enable_shared_from_this<GradientReducer> {
 public:
  GradientReducer(std::vector<Tensor> parameters, std::vector<Tensor> buffers, Communicator group,
                  DataParallelOptions options);
  /// Registers the hooks that drive it. Throws if another reducer has one of the parameters.
  void attach();

  void end_tuning() { tuner_.reset(); }
  void set_bucket_sizes(const BucketSizes& sizes);
  const std::vector<GradientBucket>& buckets() const { return buckets_; }
  const WaitClock& clock() const { return clock_; }
  /// What the tuner found; empty before it is done, and without one.
  const std::string& tuning() const { return tuning_; }
  /// Run after every check_every-th synchronised pass.
  void set_check(int every, Function<void()> check);

  void open_no_sync(bool in_capture);
  void close_no_sync(bool in_capture);

  /// Uneven inputs: how many ranks contribute to the next pass, and whose buffers are kept.
  void set_active(int ranks, int buffer_root);
  void set_joining(bool on) { joining_ = on; }
  /// A pass without gradients of this rank.
  void run_empty_pass();

 private:
  struct Parameter {
    Tensor tensor;
    std::size_t bucket = 0;
    bool expected = true;  // its bucket waits for it
    bool ready = false;    // in this pass
    bool used = true;      // has a gradient of this rank
    bool anywhere = true;  // of any rank
  };
  bool holds(const Tensor& t) const;
  void on_gradient(std::size_t i);
  void note_capture();
  void before_replay(int no_sync);
  void check_every_so_often();
  void begin_pass();
  void end_pass(bool whole);
  void complete_pass();
  void start_ready_buckets();
  void start_bucket(std::size_t i);
  void settle_missing();
  void agree_on_use(std::string& fault);
  void make_valid_where_used();
  void wait();
  void tune();
  std::vector<Tensor> tensors() const;
  std::string unused_text(const std::vector<std::int32_t>& ranks_using) const;

  std::vector<Parameter> parameters_;
  std::vector<Tensor> buffers_;
  Communicator group_;
  DataParallelOptions options_;
  CommHook hook_;

  std::vector<GradientBucket> buckets_;
  std::vector<int> pending_;  // gradients that a bucket waits for
  std::vector<Reduction> started_;
  std::vector<Work> buffer_works_;

  bool in_pass_ = false, broken_ = false, agreed_ = false, frozen_ = false, joining_ = false;
  bool empty_pass_ = false;                // of a rank without a batch
  int no_sync_ = 0, no_sync_outside_ = 0;  // open guards; of them, opened outside of a capture
  std::uint32_t recorder_ = 0;             // the last capture seen
  int active_, buffer_root_ = 0;
  int check_every_ = 0, passes_ = 0;
  Function<void()> check_;
  std::optional<BucketTuner> tuner_;
  std::string tuning_;
  WaitClock clock_;
};

}  // namespace mixtape::distributed
