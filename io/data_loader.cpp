#include "io/data_loader.h"

#include <unistd.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "engine/check.h"
#include "engine/profile_hooks.h"
#include "engine/stream.h"
#include "engine/thread_state.h"
#include "io/ordered_prefetch.h"

namespace mixtape::io {
namespace {

/// A batch on its way: for a GPU, with the event after which its copies are done.
struct Loaded {
  Batch batch;
  std::optional<Event> copied = {};
};

template <class F>
void for_each_tensor(Batch& batch, F&& f) {
  if (batch.x) f(batch.x);
  if (batch.y) f(batch.y);
  for (Tensor& t : batch.more)
    if (t) f(t);
}

/// Batches are made outside the tape and under no autocast, on whatever thread.
class PlainThreadState {
 public:
  PlainThreadState() : previous_(thread_state) { thread_state = ThreadState{.grad = false}; }
  ~PlainThreadState() { thread_state = previous_; }
  PlainThreadState(const PlainThreadState&) = delete;
  PlainThreadState& operator=(const PlainThreadState&) = delete;

 private:
  ThreadState previous_;
};

/// The sample order of one epoch, as one shard sees it.
struct Order {
  std::vector<std::int64_t> permutation;  // empty: 0, 1, 2, ...
  std::int64_t dataset_size, samples;     // samples: of this shard
  int shard, shard_count;
  std::int64_t operator[](std::int64_t i) const {
    const std::int64_t k = (i * shard_count + shard) % dataset_size;
    return permutation.empty() ? k : permutation[static_cast<std::size_t>(k)];
  }
};

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return a / b + (a % b != 0); }

/// Samples of one shard.
std::int64_t shard_size(std::int64_t samples, const DataLoaderOptions& o) {
  if (!o.even_shards) return divide_up(std::max<std::int64_t>(samples - o.shard, 0), o.shard_count);
  return o.drop_last ? samples / o.shard_count : divide_up(samples, o.shard_count);
}

DataLoaderOptions checked(DataLoaderOptions o) {
  MT_CHECK(o.batch_size >= 1, "DataLoader: expected a batch size of at least 1, got ",
           o.batch_size);
  MT_CHECK(o.workers >= 0 && o.workers <= 1024, "DataLoader: expected 0 to 1024 workers, got ",
           o.workers);
  MT_CHECK(o.prefetch >= 1, "DataLoader: expected a prefetch of at least 1, got ", o.prefetch);
  MT_CHECK(o.shard_count >= 1 && o.shard >= 0 && o.shard < o.shard_count,
           "DataLoader: expected a shard in [0, shard_count), got ", o.shard, " of ",
           o.shard_count);
  check_device("DataLoader", o.device);
  if (!o.pin_memory) o.pin_memory = o.device.is_cuda();
  return o;
}

}  // namespace

struct DataLoader::Impl {
  std::shared_ptr<const Dataset> dataset;
  const DataLoaderOptions options;
  const std::int64_t dataset_size, shard_samples, batches;
  std::optional<Stream> copy_stream;  // of the workers, for a GPU
  const pid_t process = ::getpid();

  std::int64_t epoch = 0, position = 0;
  bool begun = false;      // a pass of `epoch` has begun
  bool at_end = true;      // of the pass under way
  std::uint64_t pass = 0;  // counts begin()
  Batch batch;             // what the iterator shows
  std::function<Loaded(std::int64_t)> make;
  std::unique_ptr<OrderedPrefetch<Loaded>> prefetch;  // none without workers; last, so that its
                                                      // threads end before what they use

  Impl(std::shared_ptr<const Dataset> d, DataLoaderOptions o)
      : dataset(std::move(d)),
        options(checked(o)),
        dataset_size(dataset ? dataset->size() : 0),
        shard_samples(shard_size(dataset_size, options)),
        batches(options.drop_last ? shard_samples / options.batch_size
                                  : divide_up(shard_samples, options.batch_size)) {
    MT_CHECK(dataset, "DataLoader: expected a data set, got a null pointer");
    MT_CHECK(dataset_size >= 0, "DataLoader: expected a data set of at least 0 samples, got ",
             dataset_size);
    if (options.workers == 0) return;
    if (options.device.is_cuda()) copy_stream = Stream::create(options.device);
    prefetch = std::make_unique<OrderedPrefetch<Loaded>>(
        options.workers, std::max(options.workers, options.workers * options.prefetch));
  }

  void begin() {
    check_process();
    if (begun) ++epoch, position = 0;
    begun = at_end = true;
    ++pass;
    batch = {};
    make = batch_maker();
    if (prefetch) prefetch->start(position, batches, make);
    at_end = false;
    advance();
  }

  /// A function that makes batch k of this epoch; it holds all that it needs besides the data set.
  std::function<Loaded(std::int64_t)> batch_maker() const {
    Order order{{}, dataset_size, shard_samples, options.shard, options.shard_count};
    if (options.shuffle) order.permutation = shuffled_order(dataset_size, options.seed, epoch);
    return [this, order = std::make_shared<const Order>(std::move(order)),
            context = CollateContext{RandomStreams(options.seed, epoch), *options.pin_memory}](
               std::int64_t k) { return load(*order, k, context); };
  }

  Loaded load(const Order& order, std::int64_t k, const CollateContext& context) const {
    const PlainThreadState plain;
    const profile::Range range(ProfileKind::function, "DataLoader::load");
    const std::int64_t first = k * options.batch_size;
    std::vector<std::int64_t> indices(
        static_cast<std::size_t>(std::min(options.batch_size, order.samples - first)));
    for (std::size_t i = 0; i < indices.size(); ++i)
      indices[i] = order[first + static_cast<std::int64_t>(i)];
    Loaded loaded{dataset->collate(indices, context)};
    if (context.pinned)
      for_each_tensor(loaded.batch, [](Tensor& t) {
        if (t.device().is_cpu()) t = t.pin_memory();
      });
    if (options.device.is_cpu()) return loaded;
    const Stream stream = copy_stream ? *copy_stream : Stream::current(options.device);
    const StreamGuard guard(stream);
    for_each_tensor(loaded.batch, [&](Tensor& t) { t = t.to(options.device, true); });
    if (copy_stream) loaded.copied.emplace(stream);
    return loaded;
  }

  void advance() {
    check_process();
    if (at_end) return;
    const profile::Range range(ProfileKind::data, "DataLoader::next");
    std::optional<Loaded> loaded;
    try {
      if (prefetch)
        loaded = prefetch->next();
      else if (position < batches)
        loaded = make(position);
    } catch (...) {
      at_end = true;
      throw;
    }
    at_end = !loaded;
    batch = {};
    if (at_end) return;
    ++position;
    batch = std::move(loaded->batch);
    if (!loaded->copied) return;
    // The consumer's stream waits for the copies, and the memory for the consumer's stream.
    const Stream stream = Stream::current(options.device);
    stream.wait(*loaded->copied);
    for_each_tensor(batch, [&](Tensor& t) { t.record_stream(stream); });
  }

  void check_process() const {
    MT_CHECK(::getpid() == process, "DataLoader: made in process ", process, ", used in ",
             ::getpid(), ": worker threads do not survive a fork; make the loader in the child");
  }
};

DataLoader::DataLoader(std::shared_ptr<const Dataset> dataset, DataLoaderOptions options)
    : impl_(std::make_unique<Impl>(std::move(dataset), options)) {}

DataLoader::DataLoader(const Dataset& dataset, DataLoaderOptions options)
    : DataLoader(std::shared_ptr<const Dataset>(std::shared_ptr<void>(), &dataset), options) {}

DataLoader::~DataLoader() {
  // In a forked child the workers do not exist and their lock may be held for ever.
  if (::getpid() != impl_->process) static_cast<void>(impl_.release());
}

std::int64_t DataLoader::size() const { return impl_->batches; }
std::int64_t DataLoader::epoch() const { return impl_->epoch; }
const DataLoaderOptions& DataLoader::options() const { return impl_->options; }

DataLoader::Iterator DataLoader::begin() {
  impl_->begin();
  return {this, impl_->pass};
}

Batch& DataLoader::current(std::uint64_t pass) {
  MT_CHECK(!finished(pass), "DataLoader: expected a pass that is under way, got one that ended");
  return impl_->batch;
}

void DataLoader::advance(std::uint64_t pass) {
  if (!finished(pass)) impl_->advance();
}

bool DataLoader::finished(std::uint64_t pass) const {
  MT_CHECK(pass == impl_->pass, "DataLoader: this pass was dropped when another began");
  return impl_->at_end;
}

void DataLoader::set_epoch(std::int64_t epoch) {
  MT_CHECK(epoch >= 0, "DataLoader::set_epoch: expected an epoch of at least 0, got ", epoch);
  if (impl_->begun || impl_->epoch != epoch) impl_->position = 0;
  impl_->epoch = epoch;
  impl_->begun = false;
}

DataLoaderState DataLoader::state() const {
  const bool whole = impl_->begun && impl_->position >= impl_->batches;
  return {impl_->epoch + whole, whole ? 0 : impl_->position, impl_->options.seed,
          impl_->dataset_size, impl_->options.batch_size};
}

void DataLoader::load_state(const DataLoaderState& state) {
  constexpr const char* kOp = "DataLoader::load_state";
  MT_CHECK_EQ(state.seed, impl_->options.seed, kOp, ": seed");
  MT_CHECK_EQ(state.dataset_size, impl_->dataset_size, kOp, ": size of the data set");
  MT_CHECK_EQ(state.batch_size, impl_->options.batch_size, kOp, ": batch size");
  MT_CHECK(state.epoch >= 0 && state.position >= 0 && state.position <= impl_->batches, kOp,
           ": expected a position in [0, ", impl_->batches, "] of an epoch of at least 0, got ",
           state.position, " of ", state.epoch);
  const bool whole = state.position == impl_->batches;
  impl_->epoch = state.epoch + whole;
  impl_->position = whole ? 0 : state.position;
  impl_->begun = false;
}

}  // namespace mixtape::io
