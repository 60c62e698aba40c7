// DataLoader: batches of a data set in a reproducible order, made ahead of time by threads and, for
// a GPU, copied there on a stream of their own while the step before computes.
//
//   io::FashionMnist data("/usr/share/datasets/fashion-mnist", io::Split::train);
//   io::DataLoader loader(data, {.batch_size = 128, .shuffle = true, .seed = 1, .device = device});
//   for (int epoch = 0; epoch < 5; ++epoch)
//     for (auto& [x, y] : loader) ...                    // x (B, 1, 28, 28), y (B)
//
// Order and randomness follow from (seed, epoch, sample index) alone: not from the number of
// workers, the machine or what ran before. Workers are threads; a process is never forked.
#pragma once

#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>

#include "io/dataset.h"

namespace mixtape::io {

struct DataLoaderOptions {
  std::int64_t batch_size = 1;
  bool shuffle = false;    // a new order in every epoch
  std::uint64_t seed = 0;  // of the order and of the samples' random streams
  int workers = 1;         // threads; 0 makes each batch when it is asked for, on the caller
  bool drop_last = false;  // leave out a last batch that is not full
  int prefetch = 2;        // batches each worker is ahead
  /// Batches in page-locked memory; by default if `device` is a GPU.
  std::optional<bool> pin_memory = {};
  Device device = {};  // where batches are delivered
  /// For data-parallel ranks: this loader takes every shard_count-th sample of the common order,
  /// starting at shard. All shards have the same number of batches: samples at the front are
  /// repeated to fill up or, with drop_last, samples at the end left out.
  int shard = 0, shard_count = 1;
  /// false: no sample is repeated or left out for the shards' sake, and some shards have one more
  /// than others: for evaluation, or training that copes with it (distributed::Join).
  bool even_shards = true;
};

/// Where a loader stands; plain data for checkpoints.
struct DataLoaderState {
  std::int64_t epoch = 0, position = 0;  // batches of that epoch already delivered
  std::uint64_t seed = 0;
  std::int64_t dataset_size = 0, batch_size = 0;
  friend bool operator==(const DataLoaderState&, const DataLoaderState&) = default;
};

class DataLoader {
 public:
  /// Borrows the data set, which must outlive the loader. Throws on options out of range and on a
  /// device that cannot be used here.
  explicit DataLoader(const Dataset& dataset, DataLoaderOptions options = {});
  explicit DataLoader(const Dataset&& dataset, DataLoaderOptions options = {}) = delete;
  /// Shares the data set.
  explicit DataLoader(std::shared_ptr<const Dataset> dataset, DataLoaderOptions options = {});
  /// Waits for batches in the making (get() of a data set cannot be interrupted), for no others.
  ~DataLoader();
  DataLoader(const DataLoader&) = delete;
  DataLoader& operator=(const DataLoader&) = delete;

  /// Batches of an epoch.
  std::int64_t size() const;
  const DataLoaderOptions& options() const;

  class Iterator {
   public:
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;
    Batch& operator*() const { return loader_->current(pass_); }
    Batch* operator->() const { return &**this; }
    Iterator& operator++() {
      loader_->advance(pass_);
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const { return loader_->finished(pass_); }

   private:
    friend class DataLoader;
    Iterator(DataLoader* loader, std::uint64_t pass) : loader_(loader), pass_(pass) {}
    DataLoader* loader_;
    std::uint64_t pass_;
  };
  /// Begins a pass and drops the one before, wherever it was: the epoch named by set_epoch() or
  /// load_state(), else the one after the last pass's (0 at first). What a data set throws comes
  /// out of begin() or ++ when it is that batch's turn, and ends the pass. Each batch is yours to
  /// change; the reference is good until the next ++. Its tensors are ready on the stream that was
  /// current then.
  Iterator begin();
  std::default_sentinel_t end() const { return {}; }

  /// The next pass is epoch `epoch` from its first batch (or, right after load_state() of that
  /// epoch, from its position).
  void set_epoch(std::int64_t epoch);
  /// The epoch under way; between passes the last one or what set_epoch() or load_state() chose.
  std::int64_t epoch() const;
  /// Counts the batch now held as delivered; after the last batch it names the next epoch. Resuming
  /// from it repeats no sample and skips none.
  DataLoaderState state() const;
  /// The next pass continues from `state`. Throws if that is of another seed, batch size or size of
  /// data set.
  void load_state(const DataLoaderState& state);

 private:
  struct Impl;
  Batch& current(std::uint64_t pass);
  void advance(std::uint64_t pass);
  bool finished(std::uint64_t pass) const;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mixtape::io
