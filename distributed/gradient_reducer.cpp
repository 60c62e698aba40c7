#include "distributed/gradient_reducer.h"

#include <algorithm>
#include <utility>

#include "engine/backward.h"
#include "engine/determinism.h"
#include "engine/grad_mode.h"
#include "engine/graph_recorder.h"
#include "engine/node.h"
#include "ops/ops.h"

namespace mixtape::distributed {

// ---- the clock ---------------------------------------------------------------------------------

void WaitClock::begin() {
  if (device_.is_cpu())
    began_ = std::chrono::steady_clock::now();
  else if (graph_recorder == nullptr)
    event_began_.emplace(Stream::current(device_), true);
}

void WaitClock::end() {
  if (device_.is_cpu()) {
    last_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count();
    if (!first_) exposed_seconds_ += last_;
  } else if (event_began_) {
    last_events_.emplace(*event_began_, Event(Stream::current(device_), true));
    if (!first_) open_.push_back(*last_events_);
    event_began_.reset();
  }
}

double WaitClock::last() const {
  if (!last_events_) return last_;
  last_events_->second.synchronize();
  return last_events_->first.elapsed_ms(last_events_->second) / 1000;
}

void WaitClock::end_step() {
  if (graph_recorder == nullptr) collect();  // a capture forbids to ask for events
  const Time now = std::chrono::steady_clock::now();
  if (!std::exchange(first_, false)) {
    ++steps_;
    step_seconds_ += std::chrono::duration<double>(now - last_step_).count();
  }
  last_step_ = now;
}

void WaitClock::collect() {
  while (!open_.empty() && open_.front().second.done()) {
    exposed_seconds_ += open_.front().first.elapsed_ms(open_.front().second) / 1000;
    open_.erase(open_.begin());
  }
}

// ---- construction ------------------------------------------------------------------------------

GradientReducer::GradientReducer(std::vector<Tensor> parameters, std::vector<Tensor> buffers,
                                 Communicator group, DataParallelOptions options)
    : buffers_(std::move(buffers)),
      group_(std::move(group)),
      options_(std::move(options)),
      hook_(options_.comm_hook ? options_.comm_hook : make_comm_hook(options_.reduce)),
      active_(group_.size()),
      clock_(parameters.at(0).device()) {
  for (Tensor& p : parameters) parameters_.push_back({std::move(p)});
  set_bucket_sizes(options_.buckets);
  if (!options_.tune_buckets || options_.buckets != BucketSizes{} || group_.size() == 1 ||
      deterministic())
    return;
  std::vector<BucketSizes> candidates = BucketTuner::candidates(tensors(), options_.buckets);
  if (candidates.size() > 1) tuner_.emplace(std::move(candidates));
}

std::vector<Tensor> GradientReducer::tensors() const {
  std::vector<Tensor> all;
  for (const Parameter& p : parameters_) all.push_back(p.tensor);
  return all;
}

bool GradientReducer::holds(const Tensor& t) const {
  return std::any_of(parameters_.begin(), parameters_.end(),
                     [&](const Parameter& p) { return p.tensor.same(t); });
}

void GradientReducer::attach() {
  static std::vector<std::weak_ptr<GradientReducer>> all;
  std::erase_if(all, [](const auto& other) { return other.expired(); });
  for (const auto& entry : all) {
    const std::shared_ptr<GradientReducer> other = entry.lock();
    for (const Parameter& p : parameters_)
      MT_CHECK(!other->holds(p.tensor), "DataParallel: ", p.tensor.name(),
               " is a parameter of another DataParallel already, which would average it twice");
  }
  all.push_back(weak_from_this());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].tensor.register_post_accumulate_hook([self = weak_from_this(), i](Tensor&) {
      if (const auto reducer = self.lock()) reducer->on_gradient(i);
    });
  }
}

void GradientReducer::set_bucket_sizes(const BucketSizes& sizes) {
  MT_CHECK(!in_pass_, "DataParallel: buckets cannot change during a backward pass");
  MT_CHECK(!frozen_, "DataParallel: buckets cannot change after a step was captured");
  buckets_ = make_gradient_buckets(tensors(), sizes);
  clear_padding(buckets_);
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    for (const Tensor& t : buckets_[b].parameters) {
      const auto p = std::find_if(parameters_.begin(), parameters_.end(),
                                  [&](const Parameter& q) { return q.tensor.same(t); });
      p->bucket = b;
    }
  }
}

void GradientReducer::set_check(int every, Function<void()> check) {
  check_every_ = every;
  check_ = std::move(check);
}

void GradientReducer::open_no_sync(bool in_capture) {
  MT_CHECK(!in_pass_, "DataParallel: no_sync() opened during a backward pass");
  ++no_sync_;
  no_sync_outside_ += in_capture ? 0 : 1;
}

void GradientReducer::close_no_sync(bool in_capture) {
  --no_sync_;
  no_sync_outside_ -= in_capture ? 0 : 1;
}

void GradientReducer::set_active(int ranks, int buffer_root) {
  active_ = ranks;
  buffer_root_ = buffer_root;
}

// ---- the pass ----------------------------------------------------------------------------------

void GradientReducer::on_gradient(std::size_t i) {
  if (graph_recorder != nullptr) [[unlikely]]
    note_capture();
  if (no_sync_ > 0) return;
  if (!in_pass_) {
    begin_pass();
    BackwardRun::current()->at_end(
        [self = shared_from_this()](bool whole) { self->end_pass(whole); });
  }
  Parameter& p = parameters_[i];
  MT_CHECK(
      !p.ready, "DataParallel: the gradient of ", p.tensor.name(),
      " became complete twice in one backward; a backward started from a hook of this one needs "
      "no_sync()");
  MT_CHECK(
      p.expected, "DataParallel: ", p.tensor.name(),
      " got a gradient, but not in the first backward on this rank; Unused::fixed expects every "
      "backward to use the same parameters (Unused::find does not)");
  p.ready = true;
  if (--pending_[p.bucket] == 0) start_ready_buckets();
}

/// A graph repeats the all-reduces of this moment, so what the host would decide must not change.
void GradientReducer::note_capture() {
  if (tuner_ && !in_pass_) {  // no time to find the best
    tuner_.reset();
    set_bucket_sizes(options_.buckets);
  }
  frozen_ = true;
  if (std::exchange(recorder_, graph_recorder->id()) == graph_recorder->id()) return;
  MT_CHECK(options_.unused != Unused::find,
           "DataParallel: Unused::find waits for the host in each backward; use Unused::fixed in a "
           "step that is captured");
  MT_CHECK(!joining_, "DataParallel: Join waits for the host in each step; it cannot be captured");
  graph_recorder->before_replay([self = weak_from_this(), no_sync = no_sync_outside_] {
    if (const auto reducer = self.lock()) reducer->before_replay(no_sync);
  });
}

void GradientReducer::before_replay(int no_sync) {
  MT_CHECK(
      no_sync_outside_ == no_sync, "DataParallel: a captured step cannot be replayed ",
      no_sync == 0 ? "under" : "without",
      " no_sync(), which was not so when it was captured; open the guard inside of the step, or "
      "capture two steps");
  MT_CHECK(!joining_, "DataParallel: a captured step cannot be replayed under Join");
  check_every_so_often();
}

void GradientReducer::begin_pass() {
  MT_CHECK(!broken_,
           "DataParallel: an earlier backward failed on this rank, so that it is out of step with "
           "the others; end the run on all ranks");
  in_pass_ = true;
  pending_.assign(buckets_.size(), 0);
  started_.clear();
  for (Parameter& p : parameters_) {
    p.ready = false;
    if (p.expected)
      ++pending_[p.bucket];
    else if (LeafGrad& leaf = leaf_grad(*p.tensor.impl()); leaf.state == GradState::none) {
      const NoGrad no_grad;
      leaf.gradient.zero_();  // other ranks use it
    }
  }
}

void GradientReducer::start_ready_buckets() {
  while (started_.size() < buckets_.size() && pending_[started_.size()] == 0)
    start_bucket(started_.size());
}

void GradientReducer::start_bucket(std::size_t i) {
  const NoGrad no_grad;
  started_.push_back(hook_(buckets_[i], group_));
}

void GradientReducer::end_pass(bool whole) {
  in_pass_ = false;
  if (!whole) {
    broken_ = true;
    return;
  }
  const NoGrad no_grad;
  broken_ = true;  // until all collectives of the pass are done
  complete_pass();
}

void GradientReducer::complete_pass() {
  settle_missing();
  std::string fault;
  clock_.begin();
  while (started_.size() < buckets_.size()) start_bucket(started_.size());
  if (options_.sync_buffers) {
    for (const Tensor& b : buffers_)
      buffer_works_.push_back(group_.broadcast_async(b, buffer_root_));
  }
  if (!agreed_ || options_.unused == Unused::find)
    agree_on_use(fault);
  else if (!empty_pass_)
    fault = unused_text({});
  wait();
  clock_.end();
  clock_.end_step();
  broken_ = false;
  MT_CHECK(fault.empty(), "DataParallel: ", fault);
  make_valid_where_used();
  if (tuner_ && active_ == group_.size()) tune();
  if (graph_recorder == nullptr) check_every_so_often();
}

void GradientReducer::check_every_so_often() {
  if (check_every_ > 0 && ++passes_ % check_every_ == 0) check_();
}

/// Parameters that this pass did not reach: what earlier passes left counts, else zero.
void GradientReducer::settle_missing() {
  for (Parameter& p : parameters_) {
    LeafGrad& leaf = leaf_grad(*p.tensor.impl());
    MT_CHECK(leaf.state != GradState::incomplete, "DataParallel: the gradient of ", p.tensor.name(),
             " is incomplete because an earlier backward failed; call zero_grad() first");
    p.used = p.ready || leaf.state == GradState::valid;
    if (!p.used && p.expected) leaf.gradient.zero_();
  }
}

void GradientReducer::wait() {
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    started_[i].work.wait();
    if (started_[i].finish) started_[i].finish();
    if (active_ < group_.size())
      buckets_[i].gradients.mul_(static_cast<double>(group_.size()) / active_);
  }
  started_.clear();
  for (Work& work : std::exchange(buffer_works_, {})) work.wait();
}

void GradientReducer::tune() {
  if (!tuner_->note(clock_.last())) return;
  if (!tuner_->done()) return set_bucket_sizes(tuner_->current());
  const Device device = parameters_[0].tensor.device();
  const auto n = static_cast<std::int64_t>(tuner_->results().size());
  const Tensor results = from_vector(tuner_->results(), {n}).to(device);
  results.set_name("bucket sizes");
  // The rank that comes last waits for communication alone, the others for it as well.
  group_.all_reduce(results, ReduceOp::min);
  group_.broadcast(results, 0);
  const std::vector<double> seconds = results.to_vector<double>();
  const std::size_t chosen = BucketTuner::choose(seconds);
  tuning_ = tuner_->report(seconds, chosen);
  const BucketSizes sizes = tuner_->candidate(chosen);
  tuner_.reset();
  set_bucket_sizes(sizes);
}

// ---- unused parameters -------------------------------------------------------------------------

void GradientReducer::agree_on_use(std::string& fault) {
  MT_CHECK(
      graph_recorder == nullptr,
      "DataParallel: run the step once before it is captured (CaptureOptions::warmup), so that "
      "ranks can agree on which parameters it uses");
  std::vector<std::int32_t> ranks_using;
  for (const Parameter& p : parameters_) ranks_using.push_back(p.used ? 1 : 0);
  const auto n = static_cast<std::int64_t>(ranks_using.size());
  Tensor counts = from_vector(ranks_using, {n}).to(parameters_[0].tensor.device());
  counts.set_name("use of parameters");
  group_.all_reduce(counts, ReduceOp::sum);
  ranks_using = counts.to_vector<std::int32_t>();
  agreed_ = true;
  if (options_.unused == Unused::error) {
    fault = unused_text(ranks_using);
    return;
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].anywhere = ranks_using[i] > 0;
    if (options_.unused == Unused::fixed) parameters_[i].expected = parameters_[i].used;
  }
}

/// What to say about parameters without a gradient; empty when there is nothing to say. With the
/// ranks' counts, about all ranks; else about this one, against what it has to use.
std::string GradientReducer::unused_text(const std::vector<std::int32_t>& ranks_using) const {
  std::string names;
  int missing = 0;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& p = parameters_[i];
    const int without =
        ranks_using.empty() ? (p.expected && !p.used) : group_.size() - ranks_using[i];
    if (without == 0 || ++missing > 10) continue;
    names += detail::concat(missing == 1 ? "" : ", ", p.tensor.name());
    if (!ranks_using.empty())
      names += detail::concat(" (on ", without, " of ", group_.size(), " ranks)");
  }
  if (missing == 0) return {};
  if (missing > 10) names += detail::concat(" and ", missing - 10, " more");
  return detail::concat("expected backward to reach every parameter, got no gradient for ", names,
                        ranks_using.empty() ? detail::concat(" on rank ", group_.rank()) : "",
                        options_.unused == Unused::fixed
                            ? "; Unused::fixed expects every backward to use what the first one did"
                            : "; freeze parameters that are never used before wrapping the model, "
                              "or pass {.unused = Unused::find}");
}

void GradientReducer::make_valid_where_used() {
  bool scaled = false;
  for (const Parameter& p : parameters_) scaled |= leaf_grad(*p.tensor.impl()).scaled;
  for (const Parameter& p : parameters_) {
    LeafGrad& leaf = leaf_grad(*p.tensor.impl());
    if (leaf.state != GradState::none || !p.anywhere) continue;
    if (graph_recorder != nullptr) [[unlikely]]
      graph_recorder->note_leaf(*p.tensor.impl());
    leaf.state = GradState::valid;
    leaf.scaled = scaled;
  }
}

// ---- uneven inputs -----------------------------------------------------------------------------

void GradientReducer::run_empty_pass() {
  begin_pass();
  const NoGrad no_grad;
  for (Parameter& p : parameters_) {
    LeafGrad& leaf = leaf_grad(*p.tensor.impl());
    if (leaf.state == GradState::none && p.expected) leaf.gradient.zero_();
    // Without data this rank has no say in what is used, and must not be blamed for it.
    if (options_.unused == Unused::error && leaf.state == GradState::none)
      leaf.state = GradState::valid;
  }
  empty_pass_ = true;
  end_pass(true);
  empty_pass_ = false;
}

}  // namespace mixtape::distributed
