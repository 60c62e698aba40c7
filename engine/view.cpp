#include "engine/view.h"

namespace mixtape {

bool View::contiguous() const {
  for (const std::int64_t size : sizes) {
    if (size == 0) return true;
  }
  std::int64_t step = 1;
  for (int i = sizes.size() - 1; i >= 0; --i) {
    if (sizes[i] == 1) continue;
    if (strides[i] != step) return false;
    step *= sizes[i];
  }
  return true;
}

View View::expand_to(const Shape& shape) const {
  const int lead = shape.size() - sizes.size();
  MT_CHECK(lead >= 0, "View::expand_to: shape ", sizes, " does not expand to ", shape);
  View v = *this;
  v.sizes = shape;
  v.strides = Shape::filled(shape.size(), 0);
  for (int i = 0; i < sizes.size(); ++i) {
    MT_CHECK(sizes[i] == shape[lead + i] || sizes[i] == 1, "View::expand_to: shape ", sizes,
             " does not expand to ", shape);
    if (sizes[i] == shape[lead + i]) v.strides[lead + i] = strides[i];
  }
  return v;
}

}  // namespace mixtape
