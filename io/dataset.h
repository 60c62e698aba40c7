// Data sets: numbered samples, read from several threads at once.
//
// A data set implements size() and get(); one that can fill a whole batch faster (a gather from
// memory) overrides collate() as well. Legend: B samples of a batch.
//
//   struct Squares : io::Dataset {
//     std::int64_t size() const override { return 100; }
//     io::Example get(std::int64_t i, io::SampleRandom& random) const override {
//       return {tensor({float(i) + random.uniform()}), tensor({float(i * i)})};
//     }
//   };
#pragma once

#include <cstdint>
#include <span>
#include <tuple>
#include <vector>

#include "engine/tensor.h"
#include "io/sample_random.h"

namespace mixtape::io {

/// One sample: an input, a target (may be undefined) and whatever else belongs to it.
struct Example {
  Tensor x = {}, y = {};
  std::vector<Tensor> more = {};
};

/// B samples, each tensor with a leading dimension B. Binds as auto& [x, y].
struct Batch {
  Tensor x = {}, y = {};
  std::vector<Tensor> more = {};

  template <std::size_t I>
  Tensor& get() {
    if constexpr (I == 0)
      return x;
    else
      return y;
  }
  template <std::size_t I>
  const Tensor& get() const {
    return const_cast<Batch*>(this)->get<I>();
  }
};

/// What collate() gets from the loader.
struct CollateContext {
  RandomStreams random;  // random.sample(index) is the stream of that sample
  bool pinned = false;   // the batch will be copied to a GPU
  /// Uninitialised CPU memory, page-locked if `pinned`.
  Tensor empty(const Shape& sizes, Dtype dtype) const;
};

class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual std::int64_t size() const = 0;
  /// Sample `index` in [0, size()), on the CPU. Called from several threads at once. All randomness
  /// comes from `random`, so that it repeats.
  virtual Example get(std::int64_t index, SampleRandom& random) const = 0;
  /// The samples as one batch on the CPU; by default get() of each, stacked. Throws if their shapes
  /// or dtypes differ.
  virtual Batch collate(std::span<const std::int64_t> indices, const CollateContext& context) const;
};

/// Samples along the first dimension of tensors on the CPU: x (N, ...), y (N, ...), more.
class TensorDataset : public Dataset {
 public:
  /// Throws unless all have the same first size. The tensors' memory is shared, not copied, if they
  /// are contiguous.
  explicit TensorDataset(const Tensor& x, const Tensor& y = {},
                         const std::vector<Tensor>& more = {});
  std::int64_t size() const override { return x_.size(0); }
  Example get(std::int64_t index, SampleRandom& random) const override;
  Batch collate(std::span<const std::int64_t> indices,
                const CollateContext& context) const override;

 private:
  Tensor x_, y_;
  std::vector<Tensor> more_;
};

}  // namespace mixtape::io

template <>
struct std::tuple_size<mixtape::io::Batch> : std::integral_constant<std::size_t, 2> {};
template <std::size_t I>
struct std::tuple_element<I, mixtape::io::Batch> {
  using type = mixtape::Tensor;
};
