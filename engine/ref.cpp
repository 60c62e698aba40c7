#include "engine/ref.h"

#include <cstdlib>

namespace mixtape {
namespace {

constexpr std::size_t kClassBytes = 64;
constexpr int kClasses = 16;
constexpr int kMaxFree = 4096;  // objects kept per class and thread

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kPooling = false;  // so that the sanitizer sees every object
#else
constexpr bool kPooling = true;
#endif

struct FreeObject {
  FreeObject* next;
};
thread_local constinit bool thread_ended = false;

struct FreeLists {
  FreeObject* head[kClasses] = {};
  int count[kClasses] = {};
  ~FreeLists() {
    thread_ended = true;
    for (FreeObject* list : head) {
      while (list) ::operator delete(std::exchange(list, list->next));
    }
  }
};
FreeLists& lists() {
  thread_local FreeLists instance;
  return instance;
}
int class_of(std::size_t bytes) { return static_cast<int>((bytes - 1) / kClassBytes); }

}  // namespace

void* pool_allocate(std::size_t bytes) {
  const int c = class_of(bytes);
  if (!kPooling || c >= kClasses || thread_ended) return ::operator new(bytes);
  FreeLists& free = lists();
  if (FreeObject* object = free.head[c]) {
    free.head[c] = object->next;
    --free.count[c];
    return object;
  }
  return ::operator new((static_cast<std::size_t>(c) + 1) * kClassBytes);
}

void pool_free(void* memory, std::size_t bytes) noexcept {
  const int c = class_of(bytes);
  if (!kPooling || c >= kClasses || thread_ended) return ::operator delete(memory);
  FreeLists& free = lists();
  if (free.count[c] >= kMaxFree) return ::operator delete(memory);
  auto* object = static_cast<FreeObject*>(memory);
  object->next = free.head[c];
  free.head[c] = object;
  ++free.count[c];
}

}  // namespace mixtape
