// NVTX ranges as a tool sees them, by one linked into this program (NVTX's static injection). Its
// functions return errors, as where no tool listens: pushes and pops balance all the same. CASES
// 115.
#include <gtest/gtest.h>
#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/op_scope.h"
#include "engine/profile_result.h"
#include "engine/profiler.h"
#include "ops/ops.h"

namespace {

std::vector<std::string> calls;  // "+name" of a push, "-" of a pop

int push(nvtxDomainHandle_t, const nvtxEventAttributes_t* attributes) {
  calls.push_back(std::string("+") + attributes->message.ascii);
  return -2;
}
int pop(nvtxDomainHandle_t) {
  calls.emplace_back("-");
  return -2;
}

int attach(NvtxGetExportTableFunc_t get_table) {
  const auto* callbacks =
      static_cast<const NvtxExportTableCallbacks*>(get_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable functions = nullptr;
  unsigned size = 0;
  if (callbacks == nullptr ||
      !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &functions, &size) ||
      size <= NVTX_CBID_CORE2_DomainRangePop)
    return 0;
  *functions[NVTX_CBID_CORE2_DomainRangePushEx] = reinterpret_cast<NvtxFunctionPointer>(push);
  *functions[NVTX_CBID_CORE2_DomainRangePop] = reinterpret_cast<NvtxFunctionPointer>(pop);
  return 1;
}

}  // namespace

namespace mixtape {
namespace {

using Calls = std::vector<std::string>;

struct Nvtx : ::testing::Test {
  void SetUp() override {
    InitializeInjectionNvtx2_fnptr = attach;  // looked at by this process's first NVTX call
    calls.clear();
  }
};

TEST_F(Nvtx, ends_in_the_wrong_order_are_put_right) {
  const EmitNvtx on;
  {
    std::optional<RecordFunction> a, b;
    const RecordFunction around("around");
    a.emplace("a");
    b.emplace("b");
    a.reset();
    const RecordFunction next("next");
    b.reset();
  }
  EXPECT_EQ(calls, (Calls{"+around", "+a", "+b", "-", "-", "+next", "-", "-"}));
}

TEST_F(Nvtx, an_exception_pops_what_it_passes) {
  const EmitNvtx on;
  try {
    const RecordFunction a("a");
    const RecordFunction b("b");
    throw std::runtime_error("in b");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(calls, (Calls{"+a", "+b", "-", "-"}));
}

TEST_F(Nvtx, names_modules_and_ops) {
  const Tensor x = ones({3}).set_requires_grad();
  const EmitNvtx on;
  {
    const ModuleScope module("net");
    sum(x).backward();
  }
  ASSERT_GE(calls.size(), 3u);
  EXPECT_EQ(calls[0], "+net");
  EXPECT_EQ(calls[1], "+sum");
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "+sum"), 2);  // forward and backward
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "+backward"), 1);
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "-") * 2, static_cast<long>(calls.size()));
}

TEST_F(Nvtx, turned_off_half_way_still_pops) {
  {
    std::optional<EmitNvtx> on(std::in_place);
    const RecordFunction a("a");
    on.reset();
    const RecordFunction b("b");
  }
  EXPECT_EQ(calls, (Calls{"+a", "-"}));
}

TEST_F(Nvtx, and_a_profile_work_at_once) {
  const EmitNvtx on;
  Profiler profiler({.cuda = false, .flops = false});
  { const RecordFunction a("a"); }
  profiler.stop();
  { const RecordFunction b("b"); }
  EXPECT_EQ(calls, (Calls{"+a", "-", "+b", "-"}));
  ASSERT_EQ(profiler.result().ranges.size(), 1u);
  EXPECT_EQ(profiler.result().ranges[0].name, "a");
}

}  // namespace
}  // namespace mixtape
