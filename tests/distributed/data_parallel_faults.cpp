// Runs that cannot end well, for data_parallel_faults_test.py: each must end on every rank, soon,
// and with a message that says why. data_parallel_faults uneven|unused|drift
#include <cstdio>
#include <string_view>

#include "distributed/data_parallel.h"
#include "tests/distributed/data_parallel_models.h"

namespace mixtape::testing {
namespace {

void train(Branches& net, int steps, bool use_b) {
  optim::Sgd opt(net.parameters(), {.lr = 0.1f});
  for (int step = 0; step < steps; ++step) {
    const Batch b = my_part(batch(step, kRows, 6));
    cross_entropy(net(b.x, true, use_b || step < 2), b.y).backward();
    opt.step();
    opt.zero_grad();
  }
}

void run(std::string_view fault) {
  distributed::init({.device = distributed::DeviceChoice::cpu});  // timeout: MIXTAPE_TIMEOUT_S
  const bool last = world().rank() == world().size() - 1;
  const auto net = make<Branches>(1);
  distributed::DataParallel dp(*net, world(), {.check_sync_every = fault == "drift" ? 4 : 0});
  if (fault == "uneven") return train(*net, last ? 4 : 5, true);  // batches of the last rank
  if (fault == "unused") return train(*net, 5, !last);
  MT_CHECK(fault == "drift", "expected uneven, unused or drift, got ", fault);
  train(*net, 1, true);
  if (last) {
    const NoGrad no_grad;
    net->b.bias.slice(0, 2, 3).add_(1e-3);
  }
  train(*net, 8, true);
}

}  // namespace
}  // namespace mixtape::testing

int main(int argc, char** argv) {
  try {
    mixtape::testing::run(argc == 2 ? argv[1] : "");
    std::puts("ended as if nothing were wrong");
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "data_parallel_faults: %s\n", e.what());
    return 1;
  }
}
