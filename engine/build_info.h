// What this library was built with: for the command line's --version, bug reports and tests that
// need to know whether a backend exists at all.
#pragma once

#include <string>

namespace mixtape {

struct BuildInfo {
  std::string version;  // "0.1.0"
  bool cuda = false, cudnn = false, nccl = false, mpi = false, onednn = false;
};

const BuildInfo& build_info();

/// One line: "Mixtape 0.1.0 (Eigen, oneDNN, CUDA, cuDNN; without NCCL, MPI)".
std::string build_summary();

}  // namespace mixtape
