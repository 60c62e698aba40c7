#include "engine/profile_hooks.h"

#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "engine/check.h"
#include "engine/cuda/cupti.h"
#include "engine/cuda/nvtx.h"
#include "engine/env.h"
#include "engine/op_scope.h"
#include "engine/profile_queue.h"
#include "engine/profile_recording.h"

namespace mixtape::profile {

constinit std::atomic<unsigned> current_mode{kUnread};

namespace {

std::atomic<std::uint64_t> lost_events{0};

// ---- threads -----------------------------------------------------------------------------------

struct OpenRange {
  const void* owner = nullptr;
  bool recorded = false, nvtx = false, cupti = false;
  RecordedRange record;
};

struct ThreadProfile {
  std::vector<OpenRange> open;  // of the thread alone, like what follows up to the queues
  std::uint64_t next_id = 0;
  std::string module_path;
  std::uint32_t module_id = 0;  // of module_path
  EventQueue<RecordedRange> ranges;
  EventQueue<MemoryChange> memory;
  std::string name;
  std::atomic<bool> finished{false};
};

struct Registry {
  std::mutex mutex;
  std::vector<std::shared_ptr<ThreadProfile>> threads;
  std::uint64_t threads_made = 0;
  std::vector<std::string> modules{""};  // by module id
  std::unordered_map<std::string, std::uint32_t> module_ids{{"", 0}};
  std::int64_t start_ns = 0;
  int nvtx_users = 0;
};
Registry& registry() {  // never destroyed: threads may outlive static objects
  static Registry& instance = *new Registry;
  return instance;
}

std::string thread_name() {
  if (::getpid() == ::gettid()) return "main thread";
  char name[32] = {};
  pthread_getname_np(pthread_self(), name, sizeof name);
  return "thread " + std::to_string(::gettid()) + " (" + name + ")";
}

thread_local constinit ThreadProfile* this_thread_profile = nullptr;
thread_local constinit bool this_thread_ended = false;

struct ThreadHolder {
  std::shared_ptr<ThreadProfile> profile;
  ~ThreadHolder() {
    this_thread_ended = true;
    this_thread_profile = nullptr;
    if (profile) profile->finished.store(true, std::memory_order_release);
  }
};

/// nullptr once the thread is ending.
ThreadProfile* this_thread() {
  if (this_thread_profile != nullptr || this_thread_ended) return this_thread_profile;
  thread_local ThreadHolder holder;
  auto profile = std::make_shared<ThreadProfile>();
  profile->name = thread_name();
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  r.threads.push_back(profile);
  profile->next_id = (++r.threads_made << 40) + 1;  // distinct without a shared counter
  holder.profile = std::move(profile);
  return this_thread_profile = holder.profile.get();
}

unsigned read_environment() {
  static const bool read = [] {
    if (detail::env_flag("MIXTAPE_NVTX")) count_nvtx(+1);
    return true;
  }();
  static_cast<void>(read);
  return current_mode.fetch_and(~unsigned{kUnread}) & ~unsigned{kUnread};
}

// ---- ranges ------------------------------------------------------------------------------------

RecordedRange* innermost_of(ThreadProfile& t) noexcept {
  for (std::size_t i = t.open.size(); i-- > 0;)
    if (t.open[i].recorded) return &t.open[i].record;
  return nullptr;
}

std::uint32_t module_id_of(ThreadProfile& t) {
  const std::string& path = ModuleScope::path();
  if (path.empty()) {
    const RecordedRange* outer = innermost_of(t);
    return outer == nullptr ? 0 : outer->module_id;
  }
  if (path != t.module_path) {
    Registry& r = registry();
    const std::lock_guard lock(r.mutex);
    const auto next = static_cast<std::uint32_t>(r.modules.size());
    const auto [it, fresh] = r.module_ids.try_emplace(path, next);
    if (fresh) r.modules.push_back(path);
    t.module_path = path;
    t.module_id = it->second;
  }
  return t.module_id;
}

void publish(ThreadProfile& t, RecordedRange&& record) noexcept {
  try {
    t.ranges.push(std::move(record));
  } catch (...) {
    lost_events.fetch_add(1, std::memory_order_relaxed);
  }
}

void close_innermost(ThreadProfile& t, std::int64_t now) noexcept {
  OpenRange& range = t.open.back();
  if (range.nvtx) nvtx::pop();
  if (range.cupti) cupti::pop();
  if (range.recorded) {
    range.record.end_ns = now;
    publish(t, std::move(range.record));
  }
  t.open.pop_back();
}

}  // namespace

std::int64_t now_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

bool open(const void* owner, ProfileKind kind, const char* literal, std::string_view text) {
  unsigned on = mode();
  if (on & kUnread) on = read_environment();
  if ((on & (kRecord | kNvtx)) == 0) return false;
  ThreadProfile* t = this_thread();
  if (t == nullptr) return false;
  OpenRange range;
  range.owner = owner;
  if (literal == nullptr) range.record.name = text;
  if (on & kRecord) {
    const RecordedRange* outer = innermost_of(*t);
    range.recorded = true;
    range.record.id = t->next_id++;
    range.record.kind = kind;
    range.record.literal = literal;
    range.record.backward = outer != nullptr && outer->backward;
    range.record.module_id = module_id_of(*t);
  }
  OpenRange& made = t->open.emplace_back(std::move(range));  // nothing throws from here on
  if (on & kNvtx) {
    made.nvtx = true;
    nvtx::push(literal != nullptr ? literal : made.record.name.c_str());
  }
  if (made.recorded) {
    if (on & kCupti) {
      made.cupti = true;
      cupti::push(made.record.id);
    }
    made.record.begin_ns = now_ns();
  }
  return true;
}

void close(const void* owner) noexcept {
  ThreadProfile* t = this_thread_profile;
  if (t == nullptr) return;
  for (std::size_t i = t->open.size(); i-- > 0;) {
    if (t->open[i].owner != owner) continue;
    const std::int64_t now = now_ns();
    while (t->open.size() > i) close_innermost(*t, now);
    return;
  }
}

RecordedRange* innermost() noexcept {
  return this_thread_profile == nullptr ? nullptr : innermost_of(*this_thread_profile);
}

bool any_open() noexcept {
  return this_thread_profile != nullptr && !this_thread_profile->open.empty();
}

std::uint32_t module_id() {
  if ((mode() & kRecord) == 0) return 0;
  ThreadProfile* t = this_thread();
  return t == nullptr ? 0 : module_id_of(*t);
}

// ---- memory ------------------------------------------------------------------------------------

void note_memory(Device device, bool pinned, std::int64_t bytes, std::size_t allocated,
                 std::size_t reserved) noexcept {
  try {
    ThreadProfile* t = this_thread();
    if (t == nullptr) return;
    if (RecordedRange* range = innermost_of(*t))
      (bytes > 0 ? range->allocated : range->freed) += bytes > 0 ? bytes : -bytes;
    t->memory.push({.time_ns = now_ns(),
                    .device = device,
                    .pinned = pinned,
                    .bytes = bytes,
                    .allocated = static_cast<std::int64_t>(allocated),
                    .reserved = static_cast<std::int64_t>(reserved)});
  } catch (...) {
    lost_events.fetch_add(1, std::memory_order_relaxed);
  }
}

void note_allocator_time(std::int64_t ns) noexcept {
  if (RecordedRange* range = innermost()) range->allocator_ns += ns;
}

// ---- the profiler's side -----------------------------------------------------------------------

void start(unsigned on) {
  if (mode() & kUnread) read_environment();
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  for (const auto& t : r.threads) {
    t->ranges.drain([](RecordedRange&&) {});
    t->memory.drain([](MemoryChange&&) {});
  }
  std::erase_if(r.threads, [](const auto& t) { return t->finished.load(); });
  lost_events = 0;
  r.start_ns = now_ns();
  current_mode.fetch_or(on & ~unsigned{kNvtx});
}

Recording stop() {
  current_mode.fetch_and(kNvtx);
  const std::int64_t now = now_ns();
  ThreadProfile* self = this_thread();
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  Recording all;
  const auto add = [&](RecordedRange&& range, int thread) {
    if (range.begin_ns < r.start_ns) return;
    range.thread = thread;
    if (range.literal != nullptr) range.name = range.literal;
    range.module = r.modules[range.module_id];
    all.ranges.push_back(std::move(range));
  };
  const auto take = [&](ThreadProfile& t) {
    const std::size_t before = all.ranges.size(), changes = all.memory.size();
    const auto thread = static_cast<int>(all.threads.size());
    t.ranges.drain([&](RecordedRange&& range) { add(std::move(range), thread); });
    t.memory.drain([&](MemoryChange&& change) {
      if (change.time_ns >= r.start_ns) all.memory.push_back(change);
    });
    if (&t == self || all.ranges.size() > before || all.memory.size() > changes)
      all.threads.push_back(t.name);
  };
  if (self != nullptr) {
    for (OpenRange& range : self->open) {
      if (!std::exchange(range.recorded, false)) continue;
      range.record.end_ns = now;
      range.record.unfinished = true;
      publish(*self, RecordedRange(range.record));
    }
    take(*self);
  }
  for (const auto& t : r.threads)
    if (t.get() != self) take(*t);
  std::erase_if(r.threads, [](const auto& t) { return t->finished.load(); });
  all.lost = lost_events.exchange(0);
  return all;
}

void count_nvtx(int change) {
  if (change > 0 && !nvtx::available())
    MT_THROW("emit_nvtx: this build has no NVTX; configure it where the CUDA toolkit is installed");
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  r.nvtx_users += change;
  if (r.nvtx_users > 0)
    current_mode.fetch_or(kNvtx);
  else
    current_mode.fetch_and(~unsigned{kNvtx});
}

}  // namespace mixtape::profile
