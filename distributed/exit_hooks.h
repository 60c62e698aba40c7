// What a rank does when its process ends without finalize(): tells the others why. Internal.
#pragma once

namespace mixtape::distributed {

class Watchdog;

/// From now on std::terminate, exit() with a code other than 0 and SIGTERM go through `watchdog`
/// before they take their course, and exit(0) through finalize(). SIGTERM only if the program has
/// no handler of its own.
void install_exit_hooks(Watchdog* watchdog);
/// The watchdog ends.
void remove_exit_hooks();

}  // namespace mixtape::distributed
