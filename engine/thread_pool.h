// The CPU's worker threads. Kernels use parallel_for; nested calls run serially on their worker.
#pragma once

#include <cstdint>
#include <type_traits>

namespace mixtape {

/// A borrowed callable: no allocation, valid during the call it is passed to.
template <class Signature>
class FunctionRef;
template <class R, class... Args>
class FunctionRef<R(Args...)> {
 public:
  template <class F>
  requires(!std::is_same_v<std::remove_cvref_t<F>, FunctionRef>)
      FunctionRef(F&& f)  // NOLINT(google-explicit-constructor): borrowed for one call
      : object_(const_cast<void*>(static_cast<const void*>(&f))),
        call_([](void* o, Args... args) -> R {
          return (*static_cast<std::remove_reference_t<F>*>(o))(static_cast<Args&&>(args)...);
        }) {}
  R operator()(Args... args) const { return call_(object_, static_cast<Args&&>(args)...); }

 private:
  void* object_;
  R (*call_)(void*, Args...);
};

/// Threads used by parallel_for, the caller included: MIXTAPE_NUM_THREADS, else OMP_NUM_THREADS,
/// else the cores this process may run on.
int num_threads();
/// Changes it (n >= 1); waits for running work.
void set_num_threads(int n);

/// Calls body(begin, end) on disjoint ranges that cover [begin, end), each of at least `grain`
/// items except the last, split by count alone: the same (n, grain, threads) gives the same ranges.
/// Runs on the caller when there is one range. The first exception of a range is rethrown here.
/// Workers see the caller's grad mode and autocast state.
void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain,
                  FunctionRef<void(std::int64_t, std::int64_t)> body);

/// True on a pool worker or inside a parallel_for body.
bool in_parallel_region();

}  // namespace mixtape
