#include "optim/clip.h"

#include "engine/grad_mode.h"
#include "engine/node.h"
#include "engine/profile_hooks.h"
#include "ops/ops.h"
#include "optim/gradient_table.h"

namespace mixtape::optim {

Tensor clip_grad_norm(const std::vector<Tensor>& parameters, float max_norm,
                      const Function<void(Tensor&)>& reduce_squares) {
  const OpScope scope("clip_grad_norm");
  const profile::Range range(ProfileKind::function, "clip_grad_norm");
  const NoGrad no_grad;
  MT_CHECK(max_norm > 0, "clip_grad_norm: expected a max_norm above 0, got ", max_norm);
  MT_CHECK(!parameters.empty(), "clip_grad_norm: expected at least one parameter, got none");
  for (const Tensor& p : parameters) {
    MT_CHECK(!p.grad() || !leaf_grad(*p.impl()).scaled, "clip_grad_norm: the gradient of ",
             p.name().empty() ? p.describe() : p.name(),
             " is still multiplied by the loss scale; call scaler.unscale(optimizer) first");
  }
  GradientTable gradients;
  const kernels::GradientTable table = gradients.refresh(parameters);
  const Device device = table.count > 0 ? gradients.device() : parameters[0].device();
  Tensor norm = zeros({}, {.device = device}), factor = empty({1}, {.device = device});
  const Stream stream = Stream::current(device);
  const Scratch scratch(kernels::gradient_norm_workspace_bytes(device, table.chunks), device);
  auto* norm_value = static_cast<float*>(norm.raw_data());
  kernels::gradient_norm(stream, table, norm_value, nullptr, {scratch.data(), scratch.bytes()});
  if (reduce_squares) {
    Tensor squares = (norm * norm).reshape({1});
    reduce_squares(squares);
    norm.copy_(sqrt(squares.reshape({})));
  }
  kernels::clip_factor(stream, static_cast<float*>(factor.raw_data()), norm_value, max_norm);
  kernels::gradient_scale(stream, table, static_cast<const float*>(factor.raw_data()));
  for (const Tensor& p : gradients.listed()) p.grad().impl()->storage->bump_version();
  return norm;
}

}  // namespace mixtape::optim
