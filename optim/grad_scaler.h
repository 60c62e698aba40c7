// GradScaler: loss scaling for float16 training (Micikevicius et al. 2018), PyTorch's state
// machine.
//
//   scaler.scale(loss).backward();
//   scaler.unscale(opt);  optim::clip_grad_norm(params, 1.0f);     // optional
//   scaler.step(opt);  scaler.update();  opt.zero_grad();
//
// Nothing here waits for the device: overflow, the skipped step and the new scale are decided
// there.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/function.h"
#include "optim/gradient_table.h"
#include "optim/optimizer.h"

namespace mixtape {

struct GradScalerOptions {
  float init_scale = 65536.0f, growth_factor = 2.0f, backoff_factor = 0.5f;
  int growth_interval = 2000;
  float min_scale = 0x1p-126f;  // the scale never falls below; its reciprocal is then still finite
  bool enabled = true;          // false: scale() and the rest pass through
  /// update() throws after this many skipped steps in a row (0: never). Seen one step late at most,
  /// because nothing waits for the device.
  int max_consecutive_skips = 100;
  /// Lets step() wait for the device when an optimizer has no step(StepControl).
  bool allow_sync = false;
};

class GradScaler {
 public:
  explicit GradScaler(GradScalerOptions options = {});

  /// loss * scale, recorded; the gradients then carry the scale until unscale() or step().
  Tensor scale(const Tensor& loss);
  /// Divides the scale out of the optimizer's gradients and looks for inf and NaN. At most once
  /// between two update() calls for each optimizer.
  void unscale(optim::Optimizer& optimizer);
  /// Steps unless a gradient was inf or NaN; unscales on the way if unscale() was not called.
  void step(optim::Optimizer& optimizer);
  /// Lowers the scale if any optimizer's gradients overflowed, raises it after growth_interval
  /// clean steps, and makes every optimizer ready again; legal also when no step was taken.
  void update();
  /// update() to a scale of the caller's choice.
  void update(float new_scale);

  bool enabled() const { return options_.enabled; }
  /// The present scale. Waits for the device.
  float get_scale() const;

  struct Report {
    bool skipped = false;
    float scale = 0;                 // with which the gradients were computed
    std::vector<std::string> names;  // first parameters with an inf or NaN, at most 8 an optimizer
  };
  /// What happened in the step before the last update(). Waits for the device.
  Report last_step() const;

  optim::State state_dict() const;
  void load_state_dict(const optim::State& state);

  /// Called with found_inf (one float, non-zero on overflow) before it is acted on, so that ranks
  /// can agree: reduce it by max over all of them.
  void set_reduce(Function<void(Tensor& found_inf)> reduce) { reduce_ = std::move(reduce); }

 private:
  enum class Stage : std::uint8_t { ready, unscaled, stepped };
  struct PerOptimizer {
    std::uint64_t id;
    Stage stage = Stage::ready;
    Tensor found_inf;  // 1 element; the first optimizer's is the state's own
    Tensor per_range;  // one flag for each parameter of `table`
    optim::GradientTable table;
  };

  void ensure_state(Device device);
  void write_initial_state();
  PerOptimizer& entry_of(const optim::Optimizer& optimizer);
  void scan(PerOptimizer& entry, const std::vector<Tensor>& parameters, bool unscale);
  Tensor field(int index) const;
  void begin_update();
  void end_update();

  GradScalerOptions options_;
  float initial_tracker_ = 0, initial_skips_ = 0;  // loaded before the device is known
  Tensor state_;                                   // (5) f32 on the device: kernels::ScalerState
  Tensor last_host_;  // (5) f32, pinned: the state before the last update, once the device is there
  std::vector<PerOptimizer> optimizers_;
  Function<void(Tensor&)> reduce_;
};

}  // namespace mixtape
