// A run in which one rank misbehaves in the way that its argument says (failure_test.py):
//
//   failing_rank WAY VICTIM [launch]
//
// WAY "work" goes on until the run is ended from outside. "launch" takes part without any
// collective of tensors, for a start without MPI.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>

#include "distributed/process_group.h"

namespace dist = mixtape::distributed;
using mixtape::Tensor;

namespace {

Tensor make(std::int64_t n) {
  Tensor t = Tensor::empty({n}, mixtape::Dtype::f32, {});
  for (float& x : t.data<float>()) x = 1;
  t.set_name("fc.weight");
  return t;
}

void misbehave(const std::string& way, dist::Communicator world) {
  // The others are by then where the test expects them.
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  if (way == "kill") kill(getpid(), SIGKILL);
  if (way == "throw") throw std::runtime_error("a fault of this rank alone");
  if (way == "exit") std::exit(3);
  if (way == "leave") std::exit(0);
  if (way == "stop") pause();  // neither dead nor taking part
  if (way == "order") world.broadcast(make(10), 0);
  if (way == "size") world.all_reduce(make(8));
  if (way == "dropped") world.all_reduce_async(make(8));
  if (way == "freeze") kill(getpid(), SIGSTOP);
}

void run(const std::string& way, int victim, bool tensors) {
  dist::init({.device = dist::DeviceChoice::cpu});
  dist::Communicator world = dist::world();
  for (int i = 0; i < 3; ++i) world.barrier();
  if (way == "work") {
    std::printf("at work\n");
    std::fflush(stdout);
    for (;;) {
      world.barrier();
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }
  if (world.rank() == victim) misbehave(way, world);
  if (tensors) {
    world.all_reduce(make(10));
  } else if (way != "none") {
    world.barrier();
  }
  if (way == "dropped") std::this_thread::sleep_for(std::chrono::seconds(20));
  std::printf("rank %d is through\n", world.rank());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: failing_rank WAY VICTIM [launch]\n");
    return 2;
  }
  if (std::string(argv[1]) == "catch") {  // a program that reports by itself
    try {
      run("throw", std::atoi(argv[2]), argc < 4);
    } catch (const std::exception& e) {
      std::fprintf(stderr, "error: %s\n", e.what());
      return 4;
    }
    return 0;
  }
  run(argv[1], std::atoi(argv[2]), argc < 4);
}
