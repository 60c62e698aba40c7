// A write that a reader never sees half done: temporary file, fsync, rename.
#pragma once

#include <filesystem>
#include <string_view>

namespace mixtape::io {

/// Replaces the file at `path` as a whole: after a crash or a full disk it holds either the old or
/// the new bytes, and no temporary file is left by a failed write. Throws mixtape::Error with the
/// path and the system's text. The directory must exist.
void write_file(const std::filesystem::path& path, std::string_view bytes);

}  // namespace mixtape::io
