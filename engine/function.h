// Function<R(Args...)>: any callable behind one type, as std::function. Ours because <functional>
// alone costs every file that includes mixtape.h a seventh of its time. Copies share the callable.
#pragma once

#include <concepts>
#include <cstddef>
#include <type_traits>
#include <utility>

#include "engine/check.h"
#include "engine/ref.h"

namespace mixtape {

template <class Signature>
class Function;

template <class R, class... Args>
class Function<R(Args...)> {
 public:
  Function() = default;
  Function(std::nullptr_t) {}
  template <class F>
  requires(!std::same_as<std::remove_cvref_t<F>, Function> &&
           std::is_invocable_r_v<R, std::remove_cvref_t<F>&, Args...>) Function(F&& f) {
    // A null pointer to a function, or an empty wrapper.
    if constexpr (!std::is_function_v<std::remove_reference_t<F>> && requires { f == nullptr; })
      if (f == nullptr) return;
    target_ = Ref<Target>::adopt(new Holder<std::decay_t<F>>(std::forward<F>(f)));
  }

  explicit operator bool() const { return static_cast<bool>(target_); }
  /// Throws Error when empty.
  R operator()(Args... args) const {
    MT_CHECK(target_, "Function: called while empty");
    return target_->call(std::forward<Args>(args)...);
  }

 private:
  struct Target : RefCounted {
    virtual ~Target() = default;
    virtual R call(Args... args) = 0;
    static void destroy(Target* target) { delete target; }
  };
  template <class F>
  struct Holder final : Target {
    explicit Holder(F&& callable) : f(std::move(callable)) {}
    explicit Holder(const F& callable) : f(callable) {}
    R call(Args... args) override {
      if constexpr (std::is_void_v<R>)
        f(std::forward<Args>(args)...);
      else
        return f(std::forward<Args>(args)...);
    }
    F f;
  };

  Ref<Target> target_;
};

}  // namespace mixtape
