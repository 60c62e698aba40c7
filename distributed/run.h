// What a process keeps of the run that it takes part in, and how its groups compare notes.
// Internal.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "distributed/communicator_impl.h"
#include "distributed/launch.h"
#include "distributed/store.h"
#include "distributed/store_server.h"
#include "distributed/watchdog.h"

namespace mixtape::distributed {

struct Run {
  Launch launch;
  double timeout = 600;
  bool check_collectives = false;  // MIXTAPE_CHECK_COLLECTIVES=1
  // In this order: what is below uses what is above. Null in a run of one rank.
  std::unique_ptr<StoreServer> server;  // of rank 0
  std::unique_ptr<Store> store;
  std::unique_ptr<Watchdog> watchdog;
  Communicator world;
};

/// The run that init() joined; throws before that and after finalize().
Run& current_run();

/// Every rank's `value`, by rank in the group. All ranks of the group call it with the same `key`,
/// unique within the group. `what` is for messages. The watchdog sees it as a collective.
std::vector<std::string> gather_texts(const Communicator::Impl& group, const std::string& key,
                                      const std::string& value, const std::string& what);

}  // namespace mixtape::distributed
