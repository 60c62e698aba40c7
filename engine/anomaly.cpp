#include "engine/anomaly.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <string_view>

#include "engine/op_scope.h"

namespace mixtape {
namespace {

std::atomic<bool> enabled{false};

std::string demangle(const char* symbol) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(
      abi::__cxa_demangle(symbol, nullptr, nullptr, &status), std::free);
  return status == 0 ? text.get() : symbol;
}

}  // namespace

AnomalyMode::AnomalyMode(bool on) : previous_(enabled.exchange(on)) {}
AnomalyMode::~AnomalyMode() { enabled = previous_; }
bool anomaly_enabled() { return enabled.load(std::memory_order_relaxed); }

std::string describe_call_site() {
  std::ostringstream out;
  if (!ModuleScope::path().empty()) out << "in module " << ModuleScope::path() << "\n";
  void* frames[48];
  const int count = backtrace(frames, 48);
  int shown = 0;
  for (int i = 1; i < count && shown < 12; ++i) {
    Dl_info info{};
    if (!dladdr(frames[i], &info)) continue;
    const std::string name = info.dli_sname ? demangle(info.dli_sname) : "";
    if (name.starts_with("mixtape::") && !name.starts_with("mixtape::nn")) continue;
    const auto base = reinterpret_cast<std::uintptr_t>(info.dli_fbase);
    out << "  at " << (name.empty() ? "?" : name) << " (" << (info.dli_fname ? info.dli_fname : "?")
        << "+0x" << std::hex << reinterpret_cast<std::uintptr_t>(frames[i]) - base << std::dec
        << ")\n";
    ++shown;
  }
  return out.str();
}

}  // namespace mixtape
