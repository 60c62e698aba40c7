// What the store's server and its clients say to each other. Internal.
//
// A connection begins with `hello` and is then used for requests, each answered by one reply, in
// order; or, after `attach`, by a rank's watchdog: requests are answered as they can be, and the
// server sends Reply::failure of its own accord.
#pragma once

#include <cstdint>

namespace mixtape::distributed {

enum class Request : std::uint8_t {
  hello,     // magic, run
  set,       // key, value
  get,       // key, milliseconds to wait                  -> value
  add,       // key, number                                -> sum
  remove,    // key                                        -> 1 if it was there
  gather,    // key, rank, count, milliseconds, value      -> the values of all, in rank order
  attach,    // rank, description                          -> ok; a lost connection is a failure
  beat,      // status                                     -> ok
  statuses,  //                                            -> for each rank: presence, status
  fail,      // text                                       -> failure, to every watchdog
  leave,     //                                            -> ok; the connection may now be lost
};

enum class Reply : std::uint8_t {
  ok,
  timeout,  // gather: the ranks that are missing
  refused,  // why
  statuses,
  failure,  // the first rank that failed (or -1), text
};

/// Whether a rank's watchdog is there.
enum class Presence : std::uint8_t { never_came, here, left, lost };

inline constexpr char kStoreMagic[] = "mixtape-store-1";

}  // namespace mixtape::distributed
