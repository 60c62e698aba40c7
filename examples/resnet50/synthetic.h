// Made-up images that a network can tell apart: class k is noise over k + 1 bright bands. They need
// no files, and repeat for a seed.
#pragma once

#include "io/dataset.h"
#include "ops/ops.h"

namespace resnet {

class SyntheticImages : public mixtape::io::Dataset {
 public:
  SyntheticImages(std::int64_t count, std::int64_t size, std::int64_t classes)
      : count_(count), size_(size), classes_(classes) {}
  std::int64_t size() const override { return count_; }
  mixtape::io::Example get(std::int64_t index, mixtape::io::SampleRandom& random) const override {
    const std::int64_t label = index % classes_;
    mixtape::Tensor x =
        mixtape::Tensor::empty({3, size_, size_}, mixtape::Dtype::f32, mixtape::Device::cpu());
    float* at = x.data<float>().data();
    for (std::int64_t row = 0; row < 3 * size_; ++row) {
      const bool bright = row % size_ * 2 * (label + 1) / size_ % 2 == 0;
      for (std::int64_t i = 0; i < size_; ++i) *at++ = random.uniform(-1, 1) + (bright ? 1 : -1);
    }
    return {x, mixtape::scalar_tensor(label, {.dtype = mixtape::Dtype::i64})};
  }

 private:
  std::int64_t count_, size_, classes_;
};

}  // namespace resnet
