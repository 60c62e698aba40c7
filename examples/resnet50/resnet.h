// ResNet-18, -34 and -50 for images of any size (He et al. 2016, "Deep residual learning"), written
// with the public API alone. Parameters have torchvision's names and PyTorch's initialisation; the
// stride of a bottleneck is in its 3x3 convolution, as in torchvision ("ResNet V1.5").
//
// Normalisation, residual addition and ReLU are one pass over memory: BatchNorm2d with relu.
// Legend: N images, C channels, H W pixels, K classes.
#pragma once

#include <mixtape.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

namespace resnet {

namespace mt = mixtape;
using mt::Tensor;

/// A convolution without bias, He-initialised for the values that flow back (fan out).
inline std::unique_ptr<mt::nn::Conv2d> convolution(std::int64_t in, std::int64_t out,
                                                   std::int64_t kernel, std::int64_t stride) {
  auto conv =
      std::make_unique<mt::nn::Conv2d>(in, out,
                                       mt::nn::Conv2dConfig{.kernel = {kernel, kernel},
                                                            .stride = {stride, stride},
                                                            .padding = {kernel / 2, kernel / 2},
                                                            .bias = false});
  const double fan_out = static_cast<double>(mt::nn::init::fans_of(conv->weight).out);
  mt::nn::init::normal(conv->weight, 0, std::sqrt(2 / fan_out));
  return conv;
}

/// Two 3x3 convolutions, or a bottleneck of 1x1, 3x3 and 1x1: (N, in, H, W) -> (N, out, H/stride,
/// W/stride). Where shapes differ, the shortcut is a 1x1 convolution.
class Block : public mt::nn::Module<Block> {
 public:
  Block(std::int64_t in, std::int64_t width, std::int64_t stride, bool bottleneck) {
    const std::int64_t out = bottleneck ? 4 * width : width;
    if (bottleneck) {
      step(in, width, 1, 1);
      step(width, width, 3, stride);
      step(width, out, 1, 1);
    } else {
      step(in, width, 3, stride);
      step(width, out, 3, 1);
    }
    if (stride == 1 && in == out) return;
    shortcut_ = convolution(in, out, 1, stride);
    shortcut_norm_ = std::make_unique<mt::nn::BatchNorm2d>(out);
    downsample_.add("0", *shortcut_);
    downsample_.add("1", *shortcut_norm_);
    add("downsample", downsample_);
  }
  Tensor forward(const Tensor& x) {
    Tensor h = x;
    for (std::size_t i = 0; i + 1 < convs_.size(); ++i) h = (*norms_[i])((*convs_[i])(h));
    const Tensor residual = shortcut_ ? (*shortcut_norm_)((*shortcut_)(x)) : x;
    return (*norms_.back())((*convs_.back())(h), residual);
  }

 private:
  struct Named : mt::nn::Module<Named> {};  // gives its children a name, and is not called

  void step(std::int64_t in, std::int64_t out, std::int64_t kernel, std::int64_t stride) {
    convs_.push_back(convolution(in, out, kernel, stride));
    norms_.push_back(
        std::make_unique<mt::nn::BatchNorm2d>(out, mt::nn::BatchNormConfig{.relu = true}));
    const std::string number = std::to_string(convs_.size());
    add("conv" + number, *convs_.back());
    add("bn" + number, *norms_.back());
  }
  std::vector<std::unique_ptr<mt::nn::Conv2d>> convs_;
  std::vector<std::unique_ptr<mt::nn::BatchNorm2d>> norms_;
  std::unique_ptr<mt::nn::Conv2d> shortcut_;
  std::unique_ptr<mt::nn::BatchNorm2d> shortcut_norm_;
  Named downsample_;
};

struct Config {
  std::int64_t layers = 50;  // 18, 34 or 50
  std::int64_t classes = 1000;
};

/// (N, 3, H, W) -> logits (N, K). ResNet net({.layers = 18, .classes = 10});
class ResNet : public mt::nn::Module<ResNet> {
 public:
  explicit ResNet(Config config = {})
      : bn1_(64, {.relu = true}), fc_(config.layers == 50 ? 2048 : 512, config.classes) {
    MT_CHECK(config.layers == 18 || config.layers == 34 || config.layers == 50,
             "ResNet: expected 18, 34 or 50 layers, got ", config.layers);
    const bool bottleneck = config.layers == 50;
    const std::int64_t deep[] = {3, 4, 6, 3}, shallow[] = {2, 2, 2, 2};
    add("conv1", *conv1_);
    add("bn1", bn1_);
    std::int64_t channels = 64;
    for (int stage = 0; stage < 4; ++stage) {
      const std::int64_t width = std::int64_t{64} << stage;
      const std::int64_t blocks = config.layers == 18 ? shallow[stage] : deep[stage];
      for (std::int64_t i = 0; i < blocks; ++i) {
        stages_[stage].emplace_back(channels, width, i == 0 && stage > 0 ? 2 : 1, bottleneck);
        channels = bottleneck ? 4 * width : width;
      }
      add("layer" + std::to_string(stage + 1), stages_[stage]);
    }
    add("fc", fc_);
  }
  Tensor forward(const Tensor& x) {
    Tensor h = bn1_((*conv1_)(x));  // (N, 64, H/2, W/2)
    h = mt::max_pool2d(h, {.kernel = {3, 3}, .stride = {2, 2}, .padding = {1, 1}});
    for (auto& stage : stages_)
      for (Block& block : stage) h = block(h);
    return fc_(mt::adaptive_avg_pool2d(h, {1, 1}).flatten(1));
  }

 private:
  std::unique_ptr<mt::nn::Conv2d> conv1_ = convolution(3, 64, 7, 2);
  mt::nn::BatchNorm2d bn1_;
  mt::nn::ModuleList<Block> stages_[4];
  mt::nn::Linear fc_;
};

}  // namespace resnet
