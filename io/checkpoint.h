// Checkpoints: all that a training run needs to go on as if it had never stopped, in one
// safetensors file. Parameters and buffers, optimizer state (moments, fp32 masters, step counts,
// learning rates), the loss scale, the random generators, the loader's position and the step.
//
//   io::Checkpoint state{.model = &net, .optimizers = {&opt}, .scaler = &scaler, .loader =
//   &loader}; if (const auto found = io::newest_whole_checkpoint("run"); found.path)
//     io::load_checkpoint(*found.path, state);
//   for (; state.step < total; ++state.step) {
//     if (state.step % 1000 == 0) io::save_numbered_checkpoint("run", state, {.keep = 3});
//     ...
//   }
//
// Saving never leaves a file that is half old and half new (io/file.h). Loading checks everything
// first and changes nothing if anything does not fit.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "io/data_loader.h"
#include "io/safetensors.h"
#include "nn/module.h"
#include "optim/grad_scaler.h"
#include "optim/optimizer.h"

namespace mixtape::io {

/// What is saved, and where it is loaded to. Parts that are null are left out of a file, and left
/// alone when one is loaded. Objects are borrowed.
struct Checkpoint {
  nn::ModuleBase* model = nullptr;
  std::vector<optim::Optimizer*> optimizers = {};
  GradScaler* scaler = nullptr;
  DataLoader* loader = nullptr;
  /// Further tensors that belong to the run, such as an average of the weights; loaded in place.
  std::vector<nn::NamedTensor> tensors = {};
  /// Random generators of the CPU and of every CUDA device of this machine.
  bool random = true;
  /// Steps done: what a schedule is asked with.
  std::int64_t step = 0;
  /// The caller's own text; keys that start with "mixtape." are reserved.
  StringMap metadata = {};
};

/// Replaces the file at `path` as a whole. Waits for the device.
void save_checkpoint(const std::filesystem::path& path, const Checkpoint& checkpoint);

/// Restores every part that is not null, and sets step and metadata. Values, dtypes and step
/// counts come back bit for bit, on whatever device the parts are now. Throws, before anything is
/// changed, with the list of tensors that are missing, unexpected, or of another shape or dtype,
/// if a part is not in the file or the loader's data set, seed or batch size differs, and if a byte
/// of the file is not what was written.
void load_checkpoint(const std::filesystem::path& path, Checkpoint& checkpoint);

/// directory/checkpoint-000000001000.safetensors for step 1000.
std::filesystem::path checkpoint_path(const std::filesystem::path& directory, std::int64_t step);
/// The checkpoints in a directory by their names, oldest step first; empty if there is none or no
/// such directory.
std::vector<std::filesystem::path> list_checkpoints(const std::filesystem::path& directory);
/// The last of list_checkpoints().
std::optional<std::filesystem::path> latest_checkpoint(const std::filesystem::path& directory);

/// What a run can go on from.
struct WholeCheckpoint {
  std::optional<std::filesystem::path> path;  // none: every checkpoint is damaged, or there is none
  std::int64_t step = -1;                     // of it
  struct Skipped {
    std::filesystem::path path;
    std::string reason;
  };
  std::vector<Skipped> skipped = {};  // newer ones, the newest first
};
/// The newest of list_checkpoints() that can be read and whose bytes are those written (by their
/// checksum). Reads whole files; says why it passed over each.
WholeCheckpoint newest_whole_checkpoint(const std::filesystem::path& directory);

struct KeepOptions {
  int keep = 0;  // checkpoints left in the directory, the newest ones; 0 keeps all
};
/// save_checkpoint() to checkpoint_path(directory, checkpoint.step); makes the directory. Older
/// ones go only after the new one is on disk.
std::filesystem::path save_numbered_checkpoint(const std::filesystem::path& directory,
                                               const Checkpoint& checkpoint,
                                               KeepOptions options = {});

}  // namespace mixtape::io
