// CUPTI hands out buffers of records from a thread of its own, in no order across kinds: they are
// turned into plain data as they arrive, and a kernel finds its range when they are taken, through
// the correlation number of the call that launched it. GPU times come out on our clock because
// CUPTI is given it (cuptiActivityRegisterTimestampCallback).
#include "engine/cuda/cupti.h"

#include <cupti.h>
#include <cxxabi.h>
#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "engine/check.h"
#include "engine/cuda/backend.h"
#include "engine/profile_hooks.h"

namespace mixtape::cupti {
namespace {

// The newest records of the library that belongs to this header.
#if CUPTI_API_VERSION >= 130000
using KernelRecord = CUpti_ActivityKernel10;
using CopyRecord = CUpti_ActivityMemcpy6;
#else
using KernelRecord = CUpti_ActivityKernel9;
using CopyRecord = CUpti_ActivityMemcpy5;
#endif
using FillRecord = CUpti_ActivityMemset4;

constexpr std::size_t kBufferBytes = std::size_t{4} << 20;
constexpr auto kExternalKind = CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0;
constexpr CUpti_ActivityKind kKinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
                                         CUPTI_ACTIVITY_KIND_MEMCPY,
                                         CUPTI_ACTIVITY_KIND_MEMCPY2,
                                         CUPTI_ACTIVITY_KIND_MEMSET,
                                         CUPTI_ACTIVITY_KIND_RUNTIME,
                                         CUPTI_ACTIVITY_KIND_DRIVER,
                                         CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION};
// Called for every op, launch nothing, and would be half of all records.
constexpr CUpti_CallbackId kQuietCalls[] = {CUPTI_RUNTIME_TRACE_CBID_cudaGetDevice_v3020,
                                            CUPTI_RUNTIME_TRACE_CBID_cudaSetDevice_v3020,
                                            CUPTI_RUNTIME_TRACE_CBID_cudaGetLastError_v3020,
                                            CUPTI_RUNTIME_TRACE_CBID_cudaPeekAtLastError_v3020,
                                            CUPTI_RUNTIME_TRACE_CBID_cudaEventQuery_v3020,
                                            CUPTI_RUNTIME_TRACE_CBID_cudaStreamIsCapturing_v10000};

// ---- the library -------------------------------------------------------------------------------

#define MT_CUPTI_FUNCTIONS(F)               \
  F(cuptiActivityRegisterCallbacks)         \
  F(cuptiActivityRegisterTimestampCallback) \
  F(cuptiActivityEnable)                    \
  F(cuptiActivityDisable)                   \
  F(cuptiActivityFlushAll)                  \
  F(cuptiActivityGetNextRecord)             \
  F(cuptiActivityGetNumDroppedRecords)      \
  F(cuptiActivityPushExternalCorrelationId) \
  F(cuptiActivityPopExternalCorrelationId)  \
  F(cuptiGetCallbackName)                   \
  F(cuptiGetResultString)

struct Library {
#define MT_CUPTI_MEMBER(name) decltype(&::name) name = nullptr;
  MT_CUPTI_FUNCTIONS(MT_CUPTI_MEMBER)
#undef MT_CUPTI_MEMBER
  decltype(&::cuptiActivityEnableRuntimeApi) cuptiActivityEnableRuntimeApi = nullptr;  // optional
};

void* load_symbol(void* handle, const char* name) {
  void* symbol = dlsym(handle, name);
  MT_CHECK(symbol != nullptr, "cupti: expected libcupti to have ", name, ", got one without");
  return symbol;
}

std::unique_ptr<Library> load() {
  // By its name of this CUDA version, where the loader finds it; else from the toolkit.
  void* handle = nullptr;
  std::string failures;
  for (const char* name : {MIXTAPE_CUPTI_SONAME, MIXTAPE_CUPTI_LIBRARY}) {
    handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (handle != nullptr) break;
    failures += std::string(failures.empty() ? "" : "; ") + dlerror();
  }
  MT_CHECK(handle != nullptr, "cupti: expected the library ", MIXTAPE_CUPTI_SONAME,
           " (of the CUDA toolkit; LD_LIBRARY_PATH says where), got none: ", failures);
  auto made = std::make_unique<Library>();
#define MT_CUPTI_LOAD(name) \
  made->name = reinterpret_cast<decltype(&::name)>(load_symbol(handle, #name));
  MT_CUPTI_FUNCTIONS(MT_CUPTI_LOAD)
#undef MT_CUPTI_LOAD
  made->cuptiActivityEnableRuntimeApi =
      reinterpret_cast<decltype(&::cuptiActivityEnableRuntimeApi)>(
          dlsym(handle, "cuptiActivityEnableRuntimeApi"));
  return made;
}

// Set once and never unloaded: CUPTI may call back until the process ends.
std::atomic<Library*> loaded{nullptr};

[[noreturn]] void throw_cupti_error(CUptiResult result, const char* expression) {
  const char* text = nullptr;
  loaded.load()->cuptiGetResultString(result, &text);
  const char* hint = "";
  if (result == CUPTI_ERROR_INSUFFICIENT_PRIVILEGES)
    hint = "; the driver lets only administrators profile on this machine";
  if (result == CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED)
    hint = "; another profiler (Nsight, ncu) is attached to this process";
  MT_THROW("cupti: ", expression, " failed: ", text != nullptr ? text : "unknown error", " (",
           static_cast<int>(result), ")", hint);
}

#define MT_CUPTI_CHECK(expression)                                             \
  do {                                                                         \
    const CUptiResult mt_result = (expression);                                \
    if (mt_result != CUPTI_SUCCESS) throw_cupti_error(mt_result, #expression); \
  } while (false)

// ---- records -----------------------------------------------------------------------------------

struct Records {
  std::mutex mutex;
  Activities all;
  std::unordered_map<std::uint64_t, std::uint64_t> ranges;  // correlation -> innermost range
};
Records& records() {
  static Records& instance = *new Records;
  return instance;
}
std::atomic<std::uint64_t> lost{0};

DeviceActivity activity(ActivityKind kind, std::string name, std::uint32_t device,
                        std::uint32_t stream, std::uint64_t begin, std::uint64_t end,
                        std::uint32_t correlation, std::uint64_t bytes) {
  return {.kind = kind,
          .name = std::move(name),
          .device = static_cast<int>(device),
          .stream = stream,
          .begin_ns = static_cast<std::int64_t>(begin),
          .end_ns = static_cast<std::int64_t>(end),
          .correlation = correlation,
          .bytes = static_cast<double>(bytes)};
}

const char* copy_name(std::uint8_t kind) {
  switch (kind) {
    case CUPTI_ACTIVITY_MEMCPY_KIND_HTOD: return "copy host to device";
    case CUPTI_ACTIVITY_MEMCPY_KIND_DTOH: return "copy device to host";
    case CUPTI_ACTIVITY_MEMCPY_KIND_DTOD: return "copy on device";
    case CUPTI_ACTIVITY_MEMCPY_KIND_PTOP: return "copy between devices";
    default: return "copy";
  }
}

template <class Record>
const Record& as(const CUpti_Activity* record) {
  return *reinterpret_cast<const Record*>(record);
}

void add_call(Records& r, const CUpti_ActivityAPI& call, CUpti_CallbackDomain domain) {
  const char* name = nullptr;
  if (loaded.load()->cuptiGetCallbackName(domain, call.cbid, &name) != CUPTI_SUCCESS) name = "call";
  r.all.calls.push_back({.name = name,
                         .correlation = call.correlationId,
                         .begin_ns = static_cast<std::int64_t>(call.start),
                         .end_ns = static_cast<std::int64_t>(call.end)});
}

void add_record(Records& r, const CUpti_Activity* record) {
  switch (record->kind) {
    case CUPTI_ACTIVITY_KIND_KERNEL:
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: {
      const auto& k = as<KernelRecord>(record);
      r.all.device.push_back(activity(ActivityKind::kernel, k.name != nullptr ? k.name : "kernel",
                                      k.deviceId, k.streamId, k.start, k.end, k.correlationId, 0));
      break;
    }
    case CUPTI_ACTIVITY_KIND_MEMCPY: {
      const auto& c = as<CopyRecord>(record);
      r.all.device.push_back(activity(ActivityKind::copy, copy_name(c.copyKind), c.deviceId,
                                      c.streamId, c.start, c.end, c.correlationId, c.bytes));
      break;
    }
    case CUPTI_ACTIVITY_KIND_MEMCPY2: {
      const auto& c = as<CUpti_ActivityMemcpyPtoP4>(record);
      r.all.device.push_back(activity(ActivityKind::copy, copy_name(c.copyKind), c.deviceId,
                                      c.streamId, c.start, c.end, c.correlationId, c.bytes));
      break;
    }
    case CUPTI_ACTIVITY_KIND_MEMSET: {
      const auto& f = as<FillRecord>(record);
      r.all.device.push_back(activity(ActivityKind::fill, "fill", f.deviceId, f.streamId, f.start,
                                      f.end, f.correlationId, f.bytes));
      break;
    }
    case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION: {
      const auto& e = as<CUpti_ActivityExternalCorrelation>(record);
      if (e.externalKind == kExternalKind) r.ranges[e.correlationId] = e.externalId;
      break;
    }
    case CUPTI_ACTIVITY_KIND_RUNTIME:
      add_call(r, as<CUpti_ActivityAPI>(record), CUPTI_CB_DOMAIN_RUNTIME_API);
      break;
    case CUPTI_ACTIVITY_KIND_DRIVER:
      add_call(r, as<CUpti_ActivityAPI>(record), CUPTI_CB_DOMAIN_DRIVER_API);
      break;
    default: break;
  }
}

void CUPTIAPI provide_buffer(std::uint8_t** buffer, std::size_t* size, std::size_t* max_records) {
  *buffer = static_cast<std::uint8_t*>(std::aligned_alloc(ACTIVITY_RECORD_ALIGNMENT, kBufferBytes));
  *size = *buffer != nullptr ? kBufferBytes : 0;  // none: CUPTI drops records and counts them
  *max_records = 0;                               // as many as fit
}

void CUPTIAPI take_buffer(CUcontext context, std::uint32_t stream, std::uint8_t* buffer,
                          std::size_t, std::size_t valid) {
  const Library& api = *loaded.load();
  try {
    Records& r = records();
    const std::lock_guard lock(r.mutex);
    CUpti_Activity* record = nullptr;
    while (valid > 0 && api.cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS)
      add_record(r, record);
  } catch (...) {  // no memory for the rest of the buffer
    lost.fetch_add(1);
  }
  std::size_t dropped = 0;
  if (api.cuptiActivityGetNumDroppedRecords(context, stream, &dropped) == CUPTI_SUCCESS)
    lost.fetch_add(dropped);
  std::free(buffer);
}

std::string demangled(const std::string& name) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(
      abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status), std::free);
  return status == 0 ? text.get() : name;
}

void flush() {
  const Library& api = *loaded.load();
  MT_CUPTI_CHECK(api.cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED));
}

void enable() {
  const Library& api = *loaded.load();
  MT_CUPTI_CHECK(api.cuptiActivityRegisterTimestampCallback(
      [] { return static_cast<std::uint64_t>(profile::now_ns()); }));
  MT_CUPTI_CHECK(api.cuptiActivityRegisterCallbacks(provide_buffer, take_buffer));
  for (const CUpti_ActivityKind kind : kKinds) MT_CUPTI_CHECK(api.cuptiActivityEnable(kind));
  if (api.cuptiActivityEnableRuntimeApi == nullptr) return;
  for (const CUpti_CallbackId call : kQuietCalls)
    MT_CUPTI_CHECK(api.cuptiActivityEnableRuntimeApi(call, 0));
}

}  // namespace

void start() {
  MT_CHECK(cudart::device_count() > 0, "cupti: ", cudart::unavailable_reason());
  if (loaded.load() == nullptr) {
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    if (loaded.load() == nullptr) loaded.store(load().release());
  }
  try {
    enable();
    discard();
  } catch (...) {
    stop();
    throw;
  }
}

void discard() {
  flush();
  Records& r = records();
  const std::lock_guard lock(r.mutex);
  r.all = {};
  r.ranges.clear();
  lost = 0;
}

Activities take() {
  flush();
  Records& r = records();
  const std::lock_guard lock(r.mutex);
  Activities taken = std::exchange(r.all, {});
  const auto ranges = std::exchange(r.ranges, {});
  const auto range_of = [&](std::uint64_t correlation) {
    const auto it = ranges.find(correlation);
    return it == ranges.end() ? 0 : it->second;
  };
  std::unordered_map<std::string, std::string> names;
  for (DeviceActivity& a : taken.device) {
    a.range = range_of(a.correlation);
    if (a.kind != ActivityKind::kernel) continue;
    const auto [it, fresh] = names.try_emplace(a.name);
    if (fresh) it->second = demangled(a.name);
    a.name = it->second;
  }
  // A runtime call and the driver call within have one correlation number: the first is kept.
  std::unordered_set<std::uint64_t> seen;
  std::erase_if(taken.calls, [&](ApiCall& c) {
    c.range = range_of(c.correlation);
    return c.range == 0 || !seen.insert(c.correlation).second;
  });
  taken.lost = lost.exchange(0);
  return taken;
}

void stop() noexcept {
  const Library* api = loaded.load();
  if (api == nullptr) return;
  for (const CUpti_ActivityKind kind : kKinds) api->cuptiActivityDisable(kind);
  api->cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
  Records& r = records();
  const std::lock_guard lock(r.mutex);
  r.all = {};
  r.ranges.clear();
}

// A failing push or pop leaves a kernel without its op, which is no reason to stop a training step.
void push(std::uint64_t range) noexcept {
  if (const Library* api = loaded.load(std::memory_order_relaxed))
    api->cuptiActivityPushExternalCorrelationId(kExternalKind, range);
}

void pop() noexcept {
  std::uint64_t last = 0;
  if (const Library* api = loaded.load(std::memory_order_relaxed))
    api->cuptiActivityPopExternalCorrelationId(kExternalKind, &last);
}

}  // namespace mixtape::cupti
