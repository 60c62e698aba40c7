// Activation recomputation: a part of the network keeps its inputs and results only, and runs again
// in backward. It trades about a third more arithmetic for the memory of what lies between.
//
//   for (Block& block : blocks) x = nn::checkpoint(block, x);
//   Tensor y = nn::checkpoint([&](const Tensor& a, const Tensor& b) { return f(a, b); }, a, b);
//
// Losses and gradients are the same bits as without: the second run sees the same inputs, the same
// random numbers (dropout masks) and the same autocast state, and its gradients go where those of
// the whole graph would, to inputs and to parameters and other tensors that the function uses.
//
// The function runs twice, so it must do the same both times, and side effects (running statistics,
// counters) happen twice. Writing an input or a parameter in place between forward and backward is
// an error. Second derivatives are an error. Calls nest, and work in captured steps. Ops that the
// function runs on other threads are not seen.
#pragma once

#include <concepts>
#include <type_traits>
#include <utility>

#include "engine/recompute.h"
#include "nn/module.h"

namespace mixtape::nn {

namespace detail {

template <class F>
auto kept(F&& function) {
  if constexpr (std::is_base_of_v<ModuleBase, std::remove_cvref_t<F>>) {
    static_assert(std::is_lvalue_reference_v<F>, "checkpoint: the module must outlive backward");
    return [module = &function](const auto&... x) { return (*module)(x...); };
  } else {
    return std::decay_t<F>(std::forward<F>(function));
  }
}

template <std::size_t... I>
auto call(auto& function, Inputs in, std::index_sequence<I...>) {
  return function(in[I]...);
}

}  // namespace detail

/// function(inputs...), which gives a Tensor or a vector of them. A module is kept by address and
/// must live until backward, as must what a lambda captures by reference; other functions are
/// copied.
template <class F, std::same_as<Tensor>... X>
auto checkpoint(F&& function, const X&... inputs) {
  using Result = std::remove_cvref_t<std::invoke_result_t<F&, const X&...>>;
  constexpr bool kOne = std::is_same_v<Result, Tensor>;
  static_assert(kOne || std::is_same_v<Result, std::vector<Tensor>>,
                "checkpoint: expected a function that gives a Tensor or a std::vector<Tensor>");
  auto run =
      [f = detail::kept(std::forward<F>(function))](Inputs in) mutable -> std::vector<Tensor> {
    constexpr auto kIndices = std::index_sequence_for<X...>{};
    if constexpr (kOne)
      return {detail::call(f, in, kIndices)};
    else
      return detail::call(f, in, kIndices);
  };
  const std::vector<Tensor> in{inputs...};
  std::vector<Tensor> results = apply_recomputed(std::move(run), in);
  if constexpr (kOne)
    return results[0];
  else
    return results;
}

}  // namespace mixtape::nn
