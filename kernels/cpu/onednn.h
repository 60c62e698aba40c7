// Use of oneDNN beside our own thread pool. Included only where MIXTAPE_WITH_ONEDNN is defined.
//
// Debian's oneDNN runs its primitives on OpenMP threads. Here the pool splits the work, and every
// call into oneDNN, primitive creation included, runs on the calling thread alone: two pools on the
// same cores would fight.
#pragma once

#include <dlfcn.h>

namespace mixtape::kernels::cpu {

/// Sets this thread's OpenMP thread count to one until the scope ends. libgomp comes with libdnnl,
/// so that it is looked up and not linked; a oneDNN without OpenMP has none and needs none.
class SingleOpenMpThread {
 public:
  SingleOpenMpThread() : previous_(api().get != nullptr ? api().get() : 0) { set(1); }
  ~SingleOpenMpThread() { set(previous_); }
  SingleOpenMpThread(const SingleOpenMpThread&) = delete;
  SingleOpenMpThread& operator=(const SingleOpenMpThread&) = delete;

 private:
  struct Api {
    int (*get)() = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_max_threads"));
    void (*set)(int) = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  };
  static const Api& api() {
    static const Api api;
    return api;
  }
  static void set(int n) {
    if (api().set != nullptr && n > 0) api().set(n);
  }
  int previous_;
};

}  // namespace mixtape::kernels::cpu
