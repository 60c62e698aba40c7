#include "kernels/cuda/reduction_plan.h"

#include <algorithm>
#include <bit>

namespace mixtape::kernels::cuda {

namespace {

/// As many for each of the 132 multiprocessors of an H100 or H200, and of an A100's 108.
constexpr std::int64_t kTargetBlocks = 18 * 132;
static_assert(kTargetBlocks % 108 == 0);
constexpr std::int64_t kMaxSplits = 4096;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

int power_of_two(std::int64_t n, int most) {
  return static_cast<int>(
      std::bit_ceil(static_cast<std::uint64_t>(std::clamp<std::int64_t>(n, 1, most))));
}

/// Cuts each output into parts of at least `least` steps until there are enough blocks.
void split(ReductionPlan& plan, std::int64_t blocks, std::int64_t least, bool may_split) {
  std::int64_t splits = 1;
  if (may_split && blocks > 0)
    splits = std::min({ceil_div(plan.steps, least), ceil_div(kTargetBlocks, blocks), kMaxSplits});
  plan.splits = std::max<std::int64_t>(1, splits);
  plan.chunk = ceil_div(plan.steps, plan.splits);
  if (plan.chunk > 0) plan.splits = std::max<std::int64_t>(1, ceil_div(plan.steps, plan.chunk));
}

void plan_rows(ReductionPlan& plan, bool may_split) {
  const std::int64_t inner = plan.reduced.sizes[0];
  const std::int64_t vectors = ceil_div(inner, plan.width);
  plan.steps = plan.length / inner * vectors;
  plan.group = plan.steps <= 128 ? power_of_two(ceil_div(plan.steps, 2), 32)
                                 : power_of_two(ceil_div(plan.steps, 4), kReduceThreads);
  split(plan, plan.outputs, 8 * kReduceThreads, may_split && plan.group == kReduceThreads);
}

void plan_columns(ReductionPlan& plan, bool may_split) {
  const std::int64_t inner = plan.kept.sizes[0];
  plan.group = power_of_two(ceil_div(inner, plan.width), 32);
  plan.steps = plan.length;
  const std::int64_t tiles =
      ceil_div(inner, static_cast<std::int64_t>(plan.group) * plan.width) * (plan.outputs / inner);
  split(plan, tiles, 16 * (kReduceThreads / plan.group), may_split);
}

void plan_strided(ReductionPlan& plan, bool may_split) {
  plan.width = 1;
  plan.steps = plan.length;
  plan.along_reduced =
      plan.kept.dims == 0 ||
      (plan.reduced.dims > 0 && plan.reduced.strides[0][0] <= plan.kept.strides[0][0]);
  plan.group = plan.along_reduced ? power_of_two(ceil_div(plan.length, 4), kReduceThreads)
                                  : kReduceThreads / 32;
  const std::int64_t blocks = ceil_div(plan.outputs, kReduceThreads / plan.group);
  split(plan, blocks, 16 * plan.group, may_split);
}

}  // namespace

ReductionPlan plan_reduction(const char* name, const View& out, const View& second, const View& x,
                             PlanOptions options) {
  MT_CHECK_EQ(out.dim(), x.dim(), name, ": dimensions of the output");
  ReductionPlan plan;
  for (int d = x.dim() - 1; d >= 0; --d) {
    const std::int64_t size = x.sizes[d];
    const bool kept = out.sizes[d] == size;
    MT_CHECK(kept || out.sizes[d] == 1, name, ": expected an output of size 1 or ", size,
             " in dimension ", d, ", got ", out.sizes);
    if (second) MT_CHECK_EQ(second.sizes, out.sizes, name, ": sizes of the second output");
    if (size == 1) continue;
    if (kept)
      plan.kept.append(size, {x.strides[d], out.strides[d], second ? second.strides[d] : 0});
    else
      plan.reduced.append(size, {x.strides[d], 0, 0});
  }
  for (DimMap* map : {&plan.kept, &plan.reduced}) {
    map->sort_and_merge();
    map->prepare();
  }
  plan.outputs = plan.kept.count();
  plan.length = plan.reduced.count();
  if (plan.outputs == 0) return plan;
  const bool vectors = options.vectors && (x.dtype == Dtype::f32 || is_low_precision(x.dtype));
  plan.width = vectors ? 16 / static_cast<int>(size_of(x.dtype)) : 1;
  if (vectors && plan.length > 0 && plan.reduced.dims > 0 && plan.reduced.strides[0][0] == 1) {
    plan.layout = ReductionLayout::rows;
    plan_rows(plan, options.may_split);
  } else if (vectors && plan.kept.dims > 0 && plan.kept.strides[0][0] == 1) {
    plan.layout = ReductionLayout::columns;
    plan_columns(plan, options.may_split);
  } else {
    plan_strided(plan, options.may_split);
  }
  return plan;
}

bool vectors_aligned(const ReductionPlan& plan, const View& x) {
  const bool rows = plan.layout == ReductionLayout::rows;
  const DimMap& inner = rows ? plan.reduced : plan.kept;
  if (reinterpret_cast<std::uintptr_t>(x.data) % 16 != 0) return false;
  if (inner.sizes[0] % plan.width != 0) return false;
  for (const DimMap* map : {&plan.kept, &plan.reduced})
    for (int d = map == &inner ? 1 : 0; d < map->dims; ++d)
      if (map->strides[0][d] % plan.width != 0) return false;
  return true;
}

std::size_t reduce_workspace_bytes(const View& out, const View& x) {
  std::size_t bytes = 0;
  for (const bool vectors : {true, false}) {
    const ReductionPlan plan = plan_reduction("reduce", out, View(), x, {.vectors = vectors});
    if (plan.splits > 1)
      bytes =
          std::max(bytes, static_cast<std::size_t>(plan.outputs * plan.splits) * kMaxStateBytes);
  }
  return bytes;
}

}  // namespace mixtape::kernels::cuda
