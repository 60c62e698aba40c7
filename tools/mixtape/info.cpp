// `mixtape info`: what this build can do and what this machine has.
#include <mixtape.h>

#include <iostream>

#include "engine/build_info.h"
#include "tools/mixtape/commands.h"

namespace mixtape::tools {

Command add_info(CLI::App&) {
  return [] {
    std::cout << build_summary() << "\ndevice: " << Device::best() << "\n";
    return 0;
  };
}

}  // namespace mixtape::tools
