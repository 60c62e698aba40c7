// Initialisers: fill a parameter in place, outside the tape, from its device's generator.
#pragma once

#include "engine/tensor.h"

namespace mixtape::nn::init {

/// Inputs and outputs of one unit: (out, in) for linear weights, (O, C, R, S) for convolutions.
struct Fans {
  std::int64_t in, out;
};
Fans fans_of(const Tensor& weight);

void constant(Tensor& t, double value);
void normal(Tensor& t, double mean = 0, double std = 1);
void uniform(Tensor& t, double lo, double hi);
/// Normal, redrawn (clamped) beyond two standard deviations.
void truncated_normal(Tensor& t, double mean = 0, double std = 1);
/// Glorot and Bengio 2010: variance 2 / (in + out).
void xavier_uniform(Tensor& t, double gain = 1);
void xavier_normal(Tensor& t, double gain = 1);
/// He et al. 2015: variance gain^2 / in; gain sqrt(2) suits ReLU.
void kaiming_uniform(Tensor& t, double gain = 1.4142135623730951);
void kaiming_normal(Tensor& t, double gain = 1.4142135623730951);

}  // namespace mixtape::nn::init
