#include "distributed/data_parallel.h"

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "distributed/gradient_reducer.h"
#include "distributed/parameter_check.h"
#include "engine/env.h"
#include "engine/grad_mode.h"
#include "engine/graph_recorder.h"
#include "engine/node.h"
#include "ops/ops.h"

namespace mixtape::distributed {
namespace {

void broadcast_all(Communicator& group, const std::vector<nn::NamedTensor>& tensors) {
  const NoGrad no_grad;
  std::vector<Work> works;
  for (const nn::NamedTensor& n : tensors) {
    MT_CHECK(n.tensor.is_contiguous(),
             "DataParallel: expected contiguous parameters and buffers, "
             "got ",
             n.name, " ", n.tensor.describe(), " with strides ", n.tensor.strides());
    works.push_back(group.broadcast_async(n.tensor, 0));
  }
  for (Work& work : works) work.wait();
}

/// The layout of flat gradients follows from which optimizer was built first and on what, so it is
/// compared like the parameters.
void check_same_buckets(const Communicator& group, const std::vector<GradientBucket>& buckets) {
  std::vector<nn::NamedTensor> ranges;
  for (const GradientBucket& b : buckets)
    ranges.push_back({detail::concat("bucket ", b.index, ", ", b.gradients.name()), b.gradients});
  check_same_tensors(group,
                     "DataParallel: layout of gradients (were optimizers built in the same "
                     "order on all ranks?)",
                     ranges, false);
}

void check_values(const Communicator& group, const std::vector<nn::NamedTensor>& tensors) {
  check_same_tensors(group, "DataParallel: values that began equal", tensors, true);
}

/// Seconds of one all-reduce of `bytes`, by itself: the best of a few.
double time_all_reduce(Communicator& group, Device device, std::int64_t bytes) {
  const Tensor scratch = zeros({std::max<std::int64_t>(bytes / 4, 1)}, {.device = device});
  double best = 0;
  for (int i = 0; i < 4; ++i) {
    synchronize(device);
    group.barrier();
    const auto start = std::chrono::steady_clock::now();
    group.all_reduce(scratch, ReduceOp::sum);
    synchronize(device);
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (i == 1 || (i > 1 && seconds < best)) best = seconds;  // the first one warms up
  }
  return best;
}

template <class... Args>
std::string format(const char* form, Args... args) {
  char text[256];
  const int n = std::snprintf(text, sizeof(text), form, args...);
  return std::string(text, static_cast<std::size_t>(n));
}

}  // namespace

// ---- DataParallel ------------------------------------------------------------------------------

DataParallel::DataParallel(nn::ModuleBase& model, Communicator group, DataParallelOptions options)
    : group_(std::move(group)), compared_(model.named_parameters()) {
  std::vector<Tensor> trainable, buffers;
  std::vector<nn::NamedTensor> all = compared_;
  for (const nn::NamedTensor& n : compared_) {
    if (n.tensor.requires_grad()) trainable.push_back(n.tensor);
  }
  for (const nn::NamedTensor& n : model.named_buffers()) {
    all.push_back(n);
    buffers.push_back(n.tensor);
    if (options.sync_buffers) compared_.push_back(n);
  }
  check_same_tensors(group_, "DataParallel: parameters and buffers", all, false);
  MT_CHECK(!trainable.empty(),
           "DataParallel: expected a model with parameters that require a gradient, got none");
  for (const nn::NamedTensor& n : all) {
    MT_CHECK(n.tensor.device() == trainable[0].device(),
             "DataParallel: expected a model on one "
             "device, got ",
             trainable[0].name(), " on ", trainable[0].device(), " and ", n.name, " on ",
             n.tensor.device());
  }
  broadcast_all(group_, all);
  attach_flat_gradients(trainable);
  const int check_every = options.check_sync_every > 0
                              ? options.check_sync_every
                              : detail::env_positive("MIXTAPE_CHECK_SYNC", 0);
  reducer_ = std::make_shared<GradientReducer>(std::move(trainable), std::move(buffers), group_,
                                               std::move(options));
  check_same_buckets(group_, reducer_->buckets());
  if (check_every > 0)
    reducer_->set_check(check_every,
                        [group = group_, compared = compared_] { check_values(group, compared); });
  reducer_->attach();
}

DataParallel::~DataParallel() = default;

const std::vector<GradientBucket>& DataParallel::buckets() const { return reducer_->buckets(); }

void DataParallel::set_bucket_sizes(const BucketSizes& sizes) {
  reducer_->end_tuning();
  reducer_->set_bucket_sizes(sizes);
}

void DataParallel::check_parameters() { check_values(group_, compared_); }

CommunicationStatistics DataParallel::statistics() const {
  const WaitClock& clock = reducer_->clock();
  const double steps = static_cast<double>(std::max<std::int64_t>(clock.steps(), 1));
  CommunicationStatistics s{.steps = clock.steps(),
                            .step_seconds = clock.step_seconds() / steps,
                            .exposed_seconds = clock.exposed_seconds() / steps,
                            .buckets = static_cast<int>(buckets().size())};
  for (const GradientBucket& b : buckets()) s.gradient_bytes += b.bytes();
  return s;
}

std::string DataParallel::summary() {
  const CommunicationStatistics s = statistics();
  std::int64_t largest = 0;
  for (const GradientBucket& b : buckets()) largest = std::max(largest, b.bytes());
  const double seconds = time_all_reduce(group_, buckets()[0].gradients.device(), largest);
  const double ranks = group_.size();
  const double moved = static_cast<double>(largest) * 2 * (ranks - 1) / ranks;  // NCCL's bus bytes
  constexpr double kMega = 1 << 20;
  std::string text =
      format("Data parallel  %d ranks, %.1f MiB of gradients in %d buckets\n", group_.size(),
             static_cast<double>(s.gradient_bytes) / kMega, s.buckets);
  if (!reducer_->tuning().empty()) text += "Bucket sizes   " + reducer_->tuning() + "\n";
  if (s.steps > 0)
    text +=
        format("Efficiency     %.1f %% (%.2f ms of a step of %.2f ms waited for communication)\n",
               100 * (1 - s.exposed_seconds / s.step_seconds), 1e3 * s.exposed_seconds,
               1e3 * s.step_seconds);
  if (group_.size() > 1)
    text += format("Bus bandwidth  %.2f GB/s (all-reduce of %.1f MiB in %.2f ms)\n",
                   moved / seconds / 1e9, static_cast<double>(largest) / kMega, 1e3 * seconds);
  return text;
}

// ---- guards ------------------------------------------------------------------------------------

DataParallel::NoSync::NoSync(std::shared_ptr<GradientReducer> reducer)
    : reducer_(std::move(reducer)), in_capture_(graph_recorder != nullptr) {
  if (reducer_) reducer_->open_no_sync(in_capture_);
}
DataParallel::NoSync::~NoSync() {
  if (reducer_) reducer_->close_no_sync(in_capture_);
}

Join::Join(DataParallel& dp) : dp_(dp) { dp_.reducer_->set_joining(true); }

Join::~Join() {
  dp_.reducer_->set_joining(false);
  dp_.reducer_->set_active(dp_.group_.size(), 0);
}

bool Join::more(bool here) {
  MT_CHECK(graph_recorder == nullptr, "Join: waits for the host; it cannot be captured");
  const NoGrad no_grad;
  here_ = here;
  const Device device = dp_.buckets()[0].gradients.device();
  const Tensor mine = full({1}, here ? 1 : 0, {.dtype = Dtype::i32, .device = device});
  const Tensor all = empty({dp_.group_.size()}, {.dtype = Dtype::i32, .device = device});
  all.set_name("ranks with a batch");
  dp_.group_.all_gather(all, mine);
  const std::vector<std::int32_t> ranks = all.to_vector<std::int32_t>();
  const auto first = std::find(ranks.begin(), ranks.end(), 1);
  if (first == ranks.end()) return false;
  dp_.reducer_->set_active(static_cast<int>(std::count(first, ranks.end(), 1)),
                           static_cast<int>(first - ranks.begin()));
  return true;
}

void Join::backward() {
  MT_CHECK(!here_, "Join: backward() is for ranks that told more() that they have no batch");
  dp_.reducer_->run_empty_pass();
}

}  // namespace mixtape::distributed
