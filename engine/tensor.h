// Tensor: a handle to a strided view of reference-counted memory on one device, with a gradient.
//
// Copying a Tensor copies the handle. Views (slice, transpose, expand, reshape where possible)
// share memory and its version counter. Members that compute are defined in ops/.
#pragma once

#include <span>
#include <string>
#include <variant>
#include <vector>

#include "engine/function.h"
#include "engine/scalar.h"
#include "engine/storage.h"
#include "engine/view.h"

namespace mixtape {

class Tensor;
struct Node;
struct LeafGrad;

/// What a Tensor points to. Fields are for the engine; users go through Tensor.
struct TensorImpl : RefCounted {
  static void destroy(TensorImpl* impl) noexcept;

  Ref<Storage> storage;
  std::int64_t offset = 0;  // in elements
  Shape sizes, strides;
  Dtype dtype = Dtype::f32;
  bool requires_grad = false;  // of a leaf; results have a grad_fn instead
  bool inference = false;
  bool is_view = false;
  std::uint32_t recorded_writes = 0;  // storage's, when this view was made
  int output_index = 0;               // which output of grad_fn
  Ref<Node> grad_fn;
  LeafGrad* leaf = nullptr;  // gradient, hooks, name, cast shadow; owned; null until needed
};

/// A range of one dimension: [start, stop) by step, negative ends counting from the end.
struct Slice {
  static constexpr std::int64_t kEnd = INT64_MAX;
  Slice() = default;
  Slice(std::int64_t start_, std::int64_t stop_, std::int64_t step_ = 1)
      : start(start_), stop(stop_), step(step_) {}
  std::int64_t start = 0, stop = kEnd, step = 1;
};
struct NewAxis {};
struct Ellipsis {};
inline constexpr NewAxis new_axis;
inline constexpr Ellipsis ellipsis;

/// One entry of x[{...}]: an integer (drops the dimension), a Slice, new_axis, or ellipsis.
using Index = std::variant<std::int64_t, Slice, NewAxis, Ellipsis>;
struct IndexEntry : Index {
  template <std::integral T>
  IndexEntry(T i) : Index(static_cast<std::int64_t>(i)) {}
  IndexEntry(Slice s) : Index(s) {}
  IndexEntry(NewAxis n) : Index(n) {}
  IndexEntry(Ellipsis e) : Index(e) {}
};

struct TensorOptions {
  Dtype dtype = Dtype::f32;
  Device device = {};
  bool requires_grad = false;
  bool pinned = false;  // page-locked host memory (device must be the CPU)
};

struct BackwardOptions {
  bool retain_graph = false;
  bool create_graph = false;  // record the backward pass; implies retain_graph
};

class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(Ref<TensorImpl> impl) : impl_(std::move(impl)) {}
  /// Uninitialised memory.
  static Tensor empty(const Shape& sizes, Dtype dtype, Device device);

  bool defined() const { return static_cast<bool>(impl_); }
  explicit operator bool() const { return defined(); }

  // ---- what it is -------------------------------------------------------------------------------
  const Shape& shape() const { return get().sizes; }
  const Shape& strides() const { return get().strides; }  // in elements
  int dim() const { return get().sizes.size(); }
  /// Size of dimension d; negative d counts from the end.
  std::int64_t size(int d) const;
  std::int64_t numel() const { return get().sizes.numel(); }
  Dtype dtype() const { return get().dtype; }
  Device device() const { return get().storage->device(); }
  bool is_contiguous() const { return view().contiguous(); }
  bool is_pinned() const { return get().storage->pinned(); }
  /// float32(64, 3, 28, 28) on cuda:0
  std::string describe() const;

  // ---- its elements
  // -------------------------------------------------------------------------------
  /// The elements of a contiguous CPU tensor; T must match the dtype.
  template <class T>
  std::span<T> data() const {
    check_data_access("data", dtype_of<T>);
    return {static_cast<T*>(raw_data()), static_cast<std::size_t>(numel())};
  }
  /// The value of a one-element tensor, converted to T. Waits for the device.
  template <class T>
  T item() const {
    return item_scalar().to<T>();
  }
  Scalar item_scalar() const;
  /// All elements in row-major order, converted to T, from any device.
  template <class T>
  std::vector<T> to_vector() const;
  void* raw_data() const {
    const TensorImpl& t = get();
    return static_cast<char*>(t.storage->data()) +
           t.offset * static_cast<std::int64_t>(size_of(t.dtype));
  }
  View view() const;
  /// Readable text as NumPy prints it, with dtype and device when they are not float32 and cpu.
  std::string to_string() const;

  // ---- gradients
  // ----------------------------------------------------------------------------------
  bool requires_grad() const { return defined() && (impl_->requires_grad || impl_->grad_fn); }
  bool is_leaf() const { return !get().grad_fn; }
  /// Only for leaves of floating dtype.
  Tensor& set_requires_grad(bool on = true);
  /// The accumulated gradient; undefined when there is none. A permanent view of the flat buffer
  /// for parameters of an optimizer. Throws when a failed backward left it incomplete.
  Tensor grad() const;
  void set_grad(const Tensor& gradient);
  /// 'No gradient': the next backward overwrites.
  void zero_grad();
  /// Gradients of this tensor (times `gradient`; ones for a one-element tensor) with respect to the
  /// leaves it was computed from, added to their grad().
  void backward(const Tensor& gradient = {}, BackwardOptions options = {}) const;
  /// Same memory and version counter, outside the tape.
  Tensor detach() const;
  /// f(gradient) runs when the gradient of this tensor is complete; a defined result replaces it.
  void register_hook(Function<Tensor(const Tensor&)> hook) const;
  /// f(leaf) runs after a backward pass has added to this leaf's gradient.
  void register_post_accumulate_hook(Function<void(Tensor&)> hook) const;
  /// Keeps the gradient of a result in its grad().
  void retain_grad() const;
  std::uint32_t version() const { return get().storage->version(); }
  /// A name for error messages; modules set it to the parameter's path.
  const std::string& name() const;
  void set_name(std::string name) const;

  // ---- conversion
  // ---------------------------------------------------------------------------------
  Tensor to(Dtype dtype) const;
  /// non_blocking: a copy from pinned host memory to a device is queued and the call returns at
  /// once (the source stays alive until it is done). Copies to the host always wait, so that the
  /// value is there to be read.
  Tensor to(Device device, bool non_blocking = false) const;
  Tensor to(Device device, Dtype dtype, bool non_blocking = false) const;
  Tensor cpu() const { return to(Device::cpu()); }
  Tensor contiguous() const;
  /// A copy in new memory, recorded on the tape.
  Tensor clone() const;
  Tensor pin_memory() const;
  /// Keeps the memory from reuse until `stream`'s work so far is done.
  void record_stream(const Stream& stream) const { get().storage->record_stream(stream); }

  // ---- views (ops/shape.cpp)
  // ------------------------------------------------------------------------
  Tensor operator[](std::initializer_list<IndexEntry> indices) const;
  Tensor operator[](std::int64_t i) const;
  Tensor slice(int dim, std::int64_t start, std::int64_t stop = Slice::kEnd,
               std::int64_t step = 1) const;
  Tensor select(int dim, std::int64_t index) const;
  Tensor reshape(const Shape& sizes) const;  // one size may be -1; a view where strides allow
  Tensor permute(const Shape& dims) const;
  Tensor transpose(int a, int b) const;
  Tensor t() const { return transpose(-2, -1); }
  Tensor expand(const Shape& sizes) const;  // -1 keeps a size
  Tensor squeeze(int dim) const;
  Tensor unsqueeze(int dim) const;
  Tensor flatten(int first = 0, int last = -1) const;

  // ---- common ops as members (the full set are free functions, ops/ops.h)
  // -----------------------------
  Tensor sum(const Shape& dims = {}, bool keepdim = false) const;
  Tensor mean(const Shape& dims = {}, bool keepdim = false) const;
  Tensor max() const;
  Tensor argmax(int dim, bool keepdim = false) const;
  Tensor matmul(const Tensor& other) const;

  // ---- in place (ops/inplace.cpp): every one bumps the version counter
  // ----------------------------------
  Tensor& copy_(const Tensor& source, bool non_blocking = false);
  Tensor& fill_(const Scalar& value);
  Tensor& zero_() { return fill_(0); }
  Tensor& add_(const Tensor& other);
  Tensor& sub_(const Tensor& other);
  Tensor& mul_(const Tensor& other);
  Tensor& div_(const Tensor& other);
  Tensor& add_(const Scalar& other);
  Tensor& sub_(const Scalar& other);
  Tensor& mul_(const Scalar& other);
  Tensor& div_(const Scalar& other);
  Tensor& clamp_(const Scalar& lo, const Scalar& hi);
  Tensor& relu_();
  Tensor& normal_(double mean = 0, double std = 1);
  Tensor& uniform_(double lo = 0, double hi = 1);

  TensorImpl& get() const;  // throws on an undefined tensor
  const Ref<TensorImpl>& impl() const { return impl_; }
  bool same(const Tensor& other) const { return impl_ == other.impl_; }

 private:
  void check_data_access(const char* what, Dtype dtype) const;
  Ref<TensorImpl> impl_;
};

std::ostream& operator<<(std::ostream& out, const Tensor& t);

/// Gradients of `outputs` (weighted by `gradients`, ones by default for one-element outputs) with
/// respect to `inputs`, returned and not accumulated. An input that was not used is an error unless
/// allow_unused, then an undefined tensor.
struct GradOptions {
  bool retain_graph = false, create_graph = false, allow_unused = false;
};
std::vector<Tensor> grad(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs,
                         const std::vector<Tensor>& gradients = {}, GradOptions options = {});

}  // namespace mixtape
