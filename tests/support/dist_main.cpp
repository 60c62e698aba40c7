// main() of tests that run on every rank (mixtape_mpi_test). All ranks agree on the result, so that
// one that fails fails the run, and only rank 0 reports what went well.
#include <gtest/gtest.h>

#include <cstdio>

#include "distributed/process_group.h"
#include "tests/support/devices.h"

namespace {

using mixtape::distributed::Communicator;

/// Failures with the rank they happened on.
class FailurePrinter : public testing::EmptyTestEventListener {
 public:
  explicit FailurePrinter(int rank) : rank_(rank) {}
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::fprintf(stderr, "[rank %d] %s:%d: %s\n", rank_,
                 result.file_name() == nullptr ? "?" : result.file_name(), result.line_number(),
                 result.message());
  }

 private:
  int rank_;
};

int run() {
  namespace dist = mixtape::distributed;
  const bool cuda = mixtape::testing::chosen_device() == "cuda";
  constexpr double kTimeout = 30;  // seconds: longer than any pause of a busy machine
  dist::init({.timeout = kTimeout,
              .device = cuda ? dist::DeviceChoice::cuda : dist::DeviceChoice::cpu,
              .force_comm = true,
              .share_devices = true});
  Communicator world = dist::world();
  if (world.rank() != 0) {
    testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new FailurePrinter(world.rank()));
  }
  const int status = RUN_ALL_TESTS();
  mixtape::Tensor failed = mixtape::Tensor::empty({1}, mixtape::Dtype::i64, {});
  failed.data<std::int64_t>()[0] = status;
  world.all_reduce(failed, dist::ReduceOp::max);
  const bool none = testing::UnitTest::GetInstance()->test_to_run_count() == 0;
  if (none && world.rank() == 0) std::puts("[  FAILED  ] no test matched the filter");
  dist::finalize();
  return failed.data<std::int64_t>()[0] != 0 || none ? 1 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (mixtape::testing::chosen_device() == "cuda" && mixtape::cuda_device_count() == 0) {
    std::puts("NOT RUN: no usable CUDA device on this machine");
    return 0;
  }
  return run();
}
