// Tensors from nothing: constants, ranges, random numbers, host data.
#include <cmath>
#include <cstring>

#include "engine/generator.h"
#include "engine/transfer.h"
#include "kernels/elementwise.h"
#include "kernels/random.h"
#include "ops/op_support.h"

namespace mixtape {
namespace {

Tensor finish(Tensor t, const TensorOptions& options) {
  if (options.requires_grad) t.set_requires_grad();
  return t;
}

Tensor uninitialised(const char* op, const Shape& sizes, const TensorOptions& options) {
  check_device(op, options.device);
  MT_CHECK(!options.pinned || options.device.is_cpu(), op,
           ": expected the CPU for pinned memory, got ", options.device);
  Tensor t = Tensor::empty(options.pinned ? Shape{0} : sizes, options.dtype, options.device);
  if (options.pinned) {
    for (const std::int64_t s : sizes)
      MT_CHECK(s >= 0, op, ": expected sizes of at least 0, got ", sizes);
    TensorImpl& impl = *t.impl();
    impl.storage =
        Storage::create_pinned(static_cast<std::size_t>(sizes.numel()) * size_of(options.dtype));
    impl.sizes = sizes;
    impl.strides = contiguous_strides(sizes);
  }
  return t;
}

}  // namespace

Tensor empty(const Shape& sizes, const TensorOptions& options) {
  return finish(uninitialised("empty", sizes, options), options);
}

Tensor full(const Shape& sizes, const Scalar& value, const TensorOptions& options) {
  const OpScope scope("full");
  Tensor t = uninitialised("full", sizes, options);
  kernels::fill(stream_of(t), t.view(), value);
  return finish(t, options);
}
Tensor zeros(const Shape& sizes, const TensorOptions& options) { return full(sizes, 0, options); }
Tensor ones(const Shape& sizes, const TensorOptions& options) { return full(sizes, 1, options); }
Tensor scalar_tensor(const Scalar& value, const TensorOptions& options) {
  return full({}, value, options);
}

Tensor arange(const Scalar& start, const Scalar& stop, const Scalar& step,
              const TensorOptions& options) {
  const OpScope scope("arange");
  std::int64_t n = 0;
  const bool whole =
      start.kind() != Dtype::f64 && stop.kind() != Dtype::f64 && step.kind() != Dtype::f64;
  if (whole) {
    const auto a = start.to<std::int64_t>(), b = stop.to<std::int64_t>(),
               s = step.to<std::int64_t>();
    MT_CHECK(s != 0, "arange: expected a step other than 0");
    if ((s > 0) == (b > a) && a != b) n = (b - a + s + (s > 0 ? -1 : 1)) / s;
  } else {
    const double a = start.to<double>(), b = stop.to<double>(), s = step.to<double>();
    MT_CHECK(s != 0 && std::isfinite((b - a) / s),
             "arange: expected finite bounds and a step other than 0, got ", a, ", ", b, ", ", s);
    n = std::max<std::int64_t>(0, static_cast<std::int64_t>(std::ceil((b - a) / s)));
  }
  Tensor t = uninitialised("arange", {n}, options);
  kernels::arange(stream_of(t), t.view(), start, step);
  return finish(t, options);
}

Tensor rand(const Shape& sizes, const TensorOptions& options) {
  const OpScope scope("rand");
  Tensor t = uninitialised("rand", sizes, options);
  check_floating("rand", "a tensor", t);
  kernels::uniform(stream_of(t), t.view(), draw_random(t.device(), t.numel()), 0, 1);
  return finish(t, options);
}

Tensor randn(const Shape& sizes, const TensorOptions& options) {
  const OpScope scope("randn");
  Tensor t = uninitialised("randn", sizes, options);
  check_floating("randn", "a tensor", t);
  kernels::normal(stream_of(t), t.view(), draw_random(t.device(), t.numel()), 0, 1);
  return finish(t, options);
}

Tensor randint(std::int64_t lo, std::int64_t hi, const Shape& sizes, const TensorOptions& options) {
  const OpScope scope("randint");
  MT_CHECK(lo < hi && static_cast<std::uint64_t>(hi) - static_cast<std::uint64_t>(lo) <=
                          (std::uint64_t{1} << 32),
           "randint: expected lo < hi within 2^32 of each other, got ", lo, " and ", hi);
  Tensor t = uninitialised("randint", sizes, options);
  kernels::randint(stream_of(t), t.view(), draw_random(t.device(), t.numel()), lo, hi);
  return finish(t, options);
}

Tensor empty_like(const Tensor& t) {
  return empty(t.shape(), {.dtype = t.dtype(), .device = t.device()});
}
Tensor zeros_like(const Tensor& t) {
  return zeros(t.shape(), {.dtype = t.dtype(), .device = t.device()});
}
Tensor ones_like(const Tensor& t) {
  return ones(t.shape(), {.dtype = t.dtype(), .device = t.device()});
}

template <class T>
Tensor from_span(std::span<const T> values, const Shape& sizes, const TensorOptions& options) {
  MT_CHECK(static_cast<std::int64_t>(values.size()) == sizes.numel(), "from_span: expected ",
           sizes.numel(), " values for shape ", sizes, ", got ", values.size());
  const bool direct = options.device.is_cpu() && options.dtype == dtype_of<T>;
  Tensor host =
      uninitialised("from_span", sizes, {.dtype = dtype_of<T>, .pinned = direct && options.pinned});
  if (!values.empty()) std::memcpy(host.raw_data(), values.data(), values.size_bytes());
  if (direct) return finish(host, options);
  const Tensor moved = host.to(options.device, options.dtype).detach();
  return finish(options.pinned ? moved.pin_memory() : moved, options);
}
template Tensor from_span(std::span<const float>, const Shape&, const TensorOptions&);
template Tensor from_span(std::span<const double>, const Shape&, const TensorOptions&);
template Tensor from_span(std::span<const Half>, const Shape&, const TensorOptions&);
template Tensor from_span(std::span<const BFloat16>, const Shape&, const TensorOptions&);
template Tensor from_span(std::span<const std::int64_t>, const Shape&, const TensorOptions&);
template Tensor from_span(std::span<const std::int32_t>, const Shape&, const TensorOptions&);
template Tensor from_span(std::span<const std::uint8_t>, const Shape&, const TensorOptions&);
template Tensor from_span(std::span<const bool>, const Shape&, const TensorOptions&);

}  // namespace mixtape
