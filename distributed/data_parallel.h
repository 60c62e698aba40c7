// Data-parallel training: every rank holds the whole model and a part of each batch; gradients are
// averaged over the ranks while backward computes them.
//
//   mt::distributed::init();
//   mt::distributed::Communicator world = mt::distributed::world();
//   Mlp net;  net.to(world.device());
//   mt::distributed::DataParallel dp(net, world);            // ranks now hold rank 0's parameters
//   mt::optim::AdamW opt(net.parameters());                  // after the wrap
//   for (auto& [x, y] : loader) {                            // io/data_loader.h: shard,
//   shard_count
//     mt::cross_entropy(net(x), y).backward();               // gradients are averages when it
//     returns opt.step();  opt.zero_grad();
//   }
//
// The model is used as before; nothing of it changes but its gradients. Each bucket of gradients
// (distributed/gradient_buckets.h) starts its all-reduce when its last gradient is in, and backward
// returns when the stream that it was called on waits for them all. Every rank must run backward
// equally often and reach the model in each: see Unused and Join for what differs between ranks.
// Clipping, GradScaler and optimizers then see the same gradients on every rank and need no further
// communication: inf and NaN of one rank are in the averages of all.
//
// Under mt::capture() the all-reduces are part of the graph (NCCL). The buckets then stay as they
// are, and what depends on the host throws: a no_sync() opened around some replays and not around
// the capture, Join, Unused::find.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "distributed/gradient_reduction.h"
#include "nn/module.h"

namespace mixtape::distributed {

class GradientReducer;

/// What becomes of parameters that a synchronised backward does not reach on some rank.
enum class Unused : std::uint8_t {
  /// backward throws and names them: in its first call on every rank, later on the ranks where it
  /// happens. Costs nothing.
  error,
  /// Ranks agree after each backward which parameters any of them used: those count as zero where
  /// they were not, others have no gradient. One more small all-reduce, for which the host waits.
  find,
  /// As find, agreed once: every backward must reach what the first one did on that rank.
  fixed,
};

struct DataParallelOptions {
  BucketSizes buckets = {};
  /// The first synchronised passes try other sizes, and all ranks keep those for which backward
  /// waits least. Not where `buckets` is given or makes no difference, alone, in deterministic mode
  /// or once a step is captured.
  bool tune_buckets = true;
  Reduce reduce = Reduce::full;
  CommHook comm_hook = {};  // in place of `reduce`
  Unused unused = Unused::error;
  /// Buffers (running statistics) become rank 0's at the end of each synchronised backward.
  bool sync_buffers = true;
  /// Every so many synchronised backward passes all ranks compare hashes of parameters, and throw
  /// with the first that differs. Waits for the device. A replay of a captured step counts as one
  /// pass. 0: MIXTAPE_CHECK_SYNC, or never.
  int check_sync_every = 0;
};

/// Seconds and bytes a step, averaged over the steps after the first. Replays of a captured step do
/// not count: their communication is inside of the graph.
struct CommunicationStatistics {
  std::int64_t steps = 0;  // that the averages are of
  double step_seconds = 0;
  double exposed_seconds = 0;  // of it, what backward waited for communication at its end
  std::int64_t gradient_bytes = 0;
  int buckets = 0;
};

class DataParallel {
 public:
  /// Every rank of `group` calls it with the same model. Compares names, shapes and dtypes of all
  /// parameters and buffers over the ranks and throws on all of them if one differs; then gives
  /// every rank the values of rank 0, and the parameters flat gradients. Parameters that do not
  /// require a gradient now take no part later. Build optimizers afterwards: those of 16-bit
  /// parameters copy the values.
  DataParallel(nn::ModuleBase& model, Communicator group, DataParallelOptions options = {});
  /// Backward is local from then on.
  ~DataParallel();
  DataParallel(const DataParallel&) = delete;
  DataParallel& operator=(const DataParallel&) = delete;

  /// Until the guard's end backward adds to this rank's gradients only. The next backward without
  /// it averages the sums, of parameters that only earlier passes used too. no_sync(false) does
  /// nothing, for loops over micro-batches:
  ///   const auto local = dp.no_sync(i + 1 < micro_batches);
  ///   loss(net(x[i]), y[i]).backward();
  class [[nodiscard]] NoSync {
   public:
    explicit NoSync(std::shared_ptr<GradientReducer> reducer = nullptr);  // none: does nothing
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    std::shared_ptr<GradientReducer> reducer_;
    bool in_capture_;
  };
  NoSync no_sync(bool on = true) { return NoSync(on ? reducer_ : nullptr); }

  const Communicator& group() const { return group_; }
  const std::vector<GradientBucket>& buckets() const;
  /// Other buckets over the same gradients, on every rank, between backward passes; ends tuning.
  /// Throws once a step was captured.
  void set_bucket_sizes(const BucketSizes& sizes);

  /// Throws on every rank, with the first difference and who has what, unless all ranks hold the
  /// same parameters and, if they are kept equal, buffers. Every rank calls it; waits for the
  /// device.
  void check_parameters();

  CommunicationStatistics statistics() const;
  /// Lines for the end of a run: ranks and buckets, sizes that were tried, scaling efficiency (the
  /// share of a step not spent on waiting for communication) and the bus bandwidth of an all-reduce
  /// of the largest bucket by itself, measured now. Every rank calls it.
  std::string summary();

 private:
  friend class Join;
  Communicator group_;
  std::vector<nn::NamedTensor> compared_;  // what check_parameters() compares
  std::shared_ptr<GradientReducer> reducer_;
};

/// Uneven inputs: ranks that have run out of batches stay in step with those that have not. They
/// contribute nothing, averages are over the ranks with a batch, and they take the same optimizer
/// steps, so that parameters and optimizer state stay equal everywhere.
///
///   mt::distributed::Join join(dp);
///   auto batch = loader.begin();
///   while (join.more(batch != loader.end())) {
///     if (batch != loader.end()) { loss(net(batch->x), batch->y).backward();  ++batch; }
///     else join.backward();
///     opt.step();  opt.zero_grad();
///   }
class Join {
 public:
  explicit Join(DataParallel& dp);
  ~Join();
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;
  /// Once a synchronised backward, on every rank, with whether this rank has a batch for it. False
  /// when none has. The host waits for all ranks.
  bool more(bool here);
  /// The part of a rank without a batch in the others' backward.
  void backward();

 private:
  DataParallel& dp_;
  bool here_ = true;
};

}  // namespace mixtape::distributed
