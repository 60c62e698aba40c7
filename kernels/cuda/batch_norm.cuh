// What the passes of batch normalisation share on the device: a channel's numbers, wherever they
// come from.
#pragma once

#include "kernels/batch_norm.h"
#include "kernels/cuda/channel_walk.cuh"

namespace mixtape::kernels::cuda {

/// A vector over channels of any floating dtype, or absent.
struct ChannelVector {
  void* data = nullptr;
  Dtype dtype = Dtype::f32;

  ChannelVector() = default;
  explicit ChannelVector(const View& v) : data(v ? v.data : nullptr), dtype(v.dtype) {}
  template <class C>
  __device__ C at(std::int64_t c, C absent) const {
    return data != nullptr ? load_as<C>(data, dtype, c) : absent;
  }
  template <class C>
  __device__ void accumulate(std::int64_t c, double value, float beta) const {
    if (data == nullptr) return;
    if (beta != 0) value += static_cast<double>(beta) * load_as<double>(data, dtype, c);
    store_as(data, dtype, c, static_cast<C>(value));
  }
};

/// Where a channel's mean and 1 / sqrt(var + eps) are: in `statistics` (3, C), or running.
template <class C>
struct ChannelStatistics {
  const C* statistics;  // null: the running ones
  ChannelVector running_mean, running_var;
  std::int64_t channels;
  double eps;

  __device__ void get(std::int64_t c, C& mean, C& correction, C& rstd) const {
    if (statistics != nullptr) {
      mean = statistics[c];
      correction = statistics[channels + c];
      rstd = statistics[2 * channels + c];
    } else {
      const double exact = running_mean.at<double>(c, 0);
      mean = static_cast<C>(exact);
      correction = static_cast<C>(exact - static_cast<double>(mean));
      rstd = static_cast<C>(1 / sqrt(running_var.at<double>(c, 1) + eps));
    }
  }
};

}  // namespace mixtape::kernels::cuda
