#include "engine/generator.h"

#include <map>
#include <mutex>
#include <utility>

#include "engine/check.h"
#include "engine/graph_recorder.h"

namespace mixtape {
namespace {

constexpr std::uint64_t kDefaultSeed = 0x6d69787461706521;  // any fixed number will do

struct Generators {
  std::mutex mutex;
  std::uint64_t seed = kDefaultSeed;
  std::map<std::pair<DeviceType, int>, PhiloxState> states;

  PhiloxState& of(Device d) {
    return states.try_emplace({d.type, d.index}, PhiloxState{seed, 0}).first->second;
  }
};
Generators& generators() {
  static Generators instance;
  return instance;
}

thread_local constinit DrawScope* innermost_scope = nullptr;

}  // namespace

void manual_seed(std::uint64_t seed) {
  Generators& all = generators();
  const std::lock_guard lock(all.mutex);
  all.seed = seed;
  all.states.clear();
}

PhiloxState advance_random(Device device, std::uint64_t blocks) {
  Generators& all = generators();
  const std::lock_guard lock(all.mutex);
  PhiloxState& state = all.of(device);
  const PhiloxState drawn = state;
  state.offset += blocks;
  return drawn;
}

PhiloxState draw_random(Device device, std::int64_t n) {
  const std::uint64_t blocks = philox_blocks(static_cast<std::uint64_t>(n));
  return DrawScope::draw(innermost_scope, device, blocks);
}

DrawScope::DrawScope(std::vector<RandomDraw>& draws, Mode mode)
    : draws_(draws), mode_(mode), outer_(std::exchange(innermost_scope, this)) {}
DrawScope::~DrawScope() { innermost_scope = outer_; }

PhiloxState DrawScope::draw(DrawScope* scope, Device device, std::uint64_t blocks) {
  if (scope == nullptr) {
    if (graph_recorder != nullptr && graph_recorder->device() == device)
      return graph_recorder->draw(blocks);
    return advance_random(device, blocks);
  }
  if (scope->mode_ == Mode::record) {
    const PhiloxState state = draw(scope->outer_, device, blocks);
    scope->draws_.push_back({device, blocks, state});
    return state;
  }
  MT_CHECK(scope->next_ < scope->draws_.size(), "draw_random: expected ", scope->draws_.size(),
           " random draws as in the first run, got one more");
  const RandomDraw& draw = scope->draws_[scope->next_++];
  MT_CHECK(draw.device == device && draw.blocks == blocks, "draw_random: expected draw ",
           scope->next_ - 1, " to take ", draw.blocks, " blocks on ", draw.device,
           " as in the first run, got ", blocks, " on ", device);
  return draw.state;
}

PhiloxState random_state(Device device) {
  Generators& all = generators();
  const std::lock_guard lock(all.mutex);
  return all.of(device);
}

void set_random_state(Device device, PhiloxState state) {
  Generators& all = generators();
  const std::lock_guard lock(all.mutex);
  all.of(device) = state;
}

}  // namespace mixtape
