// Environment variables that switch a behaviour on: MIXTAPE_SYNC, MIXTAPE_NO_CACHE.
#pragma once

namespace mixtape::detail {

/// True for "1", false for unset, empty or "0"; throws on anything else.
bool env_flag(const char* name);
/// A positive integer, or `fallback` when unset or empty; throws on anything else.
int env_positive(const char* name, int fallback);

}  // namespace mixtape::detail
