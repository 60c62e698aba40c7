// Views (reshape, permute, expand, slice), copies that change layout, and joining.
#include "engine/grad_mode.h"

#include <algorithm>
#include "kernels/elementwise.h"
#include "ops/op_support.h"

namespace mixtape {
namespace {

/// The same elements in row-major order under other sizes, where strides can express it.
struct Reshape {
  Shape sizes, strides;
  static constexpr OpInfo info{.name = "reshape", .higher_order = true};
  Tensor view(const Tensor& x) const { return make_view(x, sizes, strides, 0); }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    dx[0].set(reshape(dy[0], saved.input(0).shape));
  }
};

struct Permute {
  Shape dims;
  static constexpr OpInfo info{.name = "permute", .higher_order = true};
  Tensor view(const Tensor& x) const {
    Shape sizes, strides;
    for (const std::int64_t d : dims) {
      sizes.push_back(x.shape()[static_cast<int>(d)]);
      strides.push_back(x.strides()[static_cast<int>(d)]);
    }
    return make_view(x, sizes, strides, 0);
  }
  void backward(const Saved&, Inputs dy, Grads dx) const {
    Shape inverse = dims;
    for (int i = 0; i < dims.size(); ++i) inverse[static_cast<int>(dims[i])] = i;
    dx[0].set(permute(dy[0], inverse));
  }
};

struct Expand {
  Shape sizes;
  static constexpr OpInfo info{.name = "expand", .higher_order = true};
  Tensor view(const Tensor& x) const {
    const View v = x.view().expand_to(sizes);
    return make_view(x, sizes, v.strides, 0);
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    dx[0].set(sum_to(dy[0], saved.input(0).shape));
  }
};

/// Zeros of `sizes` with x written into the slice: the gradient of slicing.
struct SliceScatter {
  Shape sizes;
  int dim;
  std::int64_t start, step;
  static constexpr OpInfo info{.name = "slice_scatter", .higher_order = true};
  Metas infer(Inputs in) const { return {{sizes, in[0].dtype()}}; }
  void forward(Inputs in, Outputs out, Saved&) const {
    const Stream stream = stream_of(in[0]);
    kernels::fill(stream, out[0].view(), 0);
    View part = out[0].view();
    part.data = static_cast<char*>(part.data) +
                start * part.strides[dim] * static_cast<std::int64_t>(size_of(part.dtype));
    part.sizes[dim] = in[0].size(dim);
    part.strides[dim] *= step;
    kernels::copy(stream, part, in[0].view());
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    dx[0].set(slice(dy[0], dim, start, start + (saved.input(0).shape[dim] - 1) * step + 1, step));
  }
};

struct SliceOp {
  int dim;
  std::int64_t start, count, step;
  static constexpr OpInfo info{.name = "slice", .higher_order = true};
  Tensor view(const Tensor& x) const {
    Shape sizes = x.shape(), strides = x.strides();
    const std::int64_t offset = count > 0 ? start * strides[dim] : 0;
    sizes[dim] = count;
    strides[dim] *= step;
    return make_view(x, sizes, strides, offset);
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    dx[0].set(apply(SliceScatter{saved.input(0).shape, dim, start, step}, {dy[0]}));
  }
};

struct Contiguous {
  static constexpr OpInfo info{.name = "contiguous", .higher_order = true};
  Metas infer(Inputs in) const { return {meta_of(in[0])}; }
  void forward(Inputs in, Outputs out, Saved&) const {
    kernels::copy(stream_of(in[0]), out[0].view(), in[0].view());
  }
  void backward(const Saved&, Inputs dy, Grads dx) const { dx[0].set(dy[0]); }
};

struct Cat {
  int dim;
  static constexpr OpInfo info{.name = "cat", .cast = Cast::widest, .higher_order = true};
  Metas infer(Inputs in) const {
    Meta out = meta_of(in[0]);
    out.shape[dim] = 0;
    for (const Tensor& t : in) {
      MT_CHECK_EQ(t.dim(), out.shape.size(), "cat: number of dimensions");
      for (int d = 0; d < t.dim(); ++d) {
        MT_CHECK(d == dim || t.size(d) == in[0].size(d),
                 "cat: expected sizes equal except in dimension ", dim, ", got ", in[0].shape(),
                 " and ", t.shape());
      }
      out.shape[dim] += t.size(dim);
      out.dtype = promote_types(out.dtype, t.dtype());
    }
    return {out};
  }
  void forward(Inputs in, Outputs out, Saved&) const {
    std::int64_t start = 0;
    for (const Tensor& t : in) {
      View part = out[0].view();
      part.data = static_cast<char*>(part.data) +
                  start * part.strides[dim] * static_cast<std::int64_t>(size_of(part.dtype));
      part.sizes[dim] = t.size(dim);
      kernels::copy(stream_of(t), part, t.view());
      start += t.size(dim);
    }
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    std::int64_t start = 0;
    for (std::size_t i = 0; i < dx.size(); ++i) {
      const std::int64_t count = saved.input(static_cast<int>(i)).shape[dim];
      if (dx[i]) dx[i].set(slice(dy[0], dim, start, start + count));
      start += count;
    }
  }
};

Shape resolve_sizes(const char* op, const Tensor& x, const Shape& sizes) {
  Shape out = sizes;
  std::int64_t known = 1;
  int unknown = -1;
  for (int i = 0; i < sizes.size(); ++i) {
    MT_CHECK(sizes[i] >= -1 && (sizes[i] != -1 || unknown < 0), op,
             ": expected at most one -1 and no other negative size, got ", sizes);
    if (sizes[i] == -1)
      unknown = i;
    else
      known *= sizes[i];
  }
  if (unknown >= 0) {
    MT_CHECK(known > 0 && x.numel() % known == 0, op, ": expected sizes that divide ", x.numel(),
             " elements of ", x.describe(), ", got ", sizes);
    out[unknown] = x.numel() / known;
  }
  MT_CHECK(out.numel() == x.numel(), op, ": expected ", x.numel(), " elements as in ", x.describe(),
           ", got sizes ", sizes);
  return out;
}

}  // namespace

Tensor reshape(const Tensor& x, const Shape& sizes) {
  const Shape target = resolve_sizes("reshape", x, sizes);
  if (target == x.shape()) return x;
  Shape strides;
  if (reshape_strides(x.shape(), x.strides(), target, strides))
    return apply_view(Reshape{target, strides}, x);
  const Tensor flat = x.contiguous();
  return apply_view(Reshape{target, contiguous_strides(target)}, flat);
}

Tensor permute(const Tensor& x, const Shape& dims) {
  MT_CHECK_EQ(dims.size(), x.dim(), "permute: number of dimensions");
  Shape order;
  unsigned seen = 0;
  for (const std::int64_t d : dims) {
    const int i = normalize_dim("permute", d, x.dim());
    MT_CHECK(!(seen & (1u << i)), "permute: expected each dimension once, got ", dims);
    seen |= 1u << i;
    order.push_back(i);
  }
  return apply_view(Permute{order}, x);
}

Tensor transpose(const Tensor& x, int a, int b) {
  const int i = normalize_dim("transpose", a, x.dim()), j = normalize_dim("transpose", b, x.dim());
  if (x.dim() == 0 || i == j) return x;
  Shape order;
  for (int d = 0; d < x.dim(); ++d) order.push_back(d == i ? j : d == j ? i : d);
  return apply_view(Permute{order}, x);
}

Tensor expand(const Tensor& x, const Shape& sizes) {
  MT_CHECK(sizes.size() >= x.dim(), "expand: expected at least ", x.dim(), " dimensions, got ",
           sizes);
  Shape target = sizes;
  const int extra = sizes.size() - x.dim();
  for (int i = 0; i < sizes.size(); ++i) {
    if (target[i] == -1 && i >= extra) target[i] = x.shape()[i - extra];
    MT_CHECK(target[i] >= 0 &&
                 (i < extra || x.shape()[i - extra] == 1 || x.shape()[i - extra] == target[i]),
             "expand: expected sizes that ", x.describe(), " broadcasts to, got ", sizes);
  }
  return target == x.shape() ? x : apply_view(Expand{target}, x);
}

Tensor slice(const Tensor& x, int dim, std::int64_t start, std::int64_t stop, std::int64_t step) {
  MT_CHECK(x.dim() > 0, "slice: expected at least one dimension, got ", x.describe());
  MT_CHECK(step > 0, "slice: expected a step of at least 1, got ", step);
  const int d = normalize_dim("slice", dim, x.dim());
  const std::int64_t n = x.size(d);
  const auto clip = [n](std::int64_t i) {
    return std::clamp<std::int64_t>(i < 0 ? i + n : i, 0, n);
  };
  const std::int64_t first = clip(start), last = clip(stop);
  const std::int64_t count = last > first ? (last - first + step - 1) / step : 0;
  return apply_view(SliceOp{d, first, count, step}, x);
}

Tensor cat(const std::vector<Tensor>& tensors, int dim) {
  MT_CHECK(!tensors.empty(), "cat: expected at least one tensor, got none");
  MT_CHECK(tensors[0].dim() > 0, "cat: expected tensors of at least one dimension, got ",
           tensors[0].describe());
  return mixtape::apply(Cat{normalize_dim("cat", dim, tensors[0].dim())}, Inputs(tensors));
}

Tensor stack(const std::vector<Tensor>& tensors, int dim) {
  MT_CHECK(!tensors.empty(), "stack: expected at least one tensor, got none");
  std::vector<Tensor> raised;
  for (const Tensor& t : tensors) {
    MT_CHECK_EQ(t.shape(), tensors[0].shape(), "stack: shapes");
    raised.push_back(t.unsqueeze(normalize_dim("stack", dim, t.dim() + 1)));
  }
  return cat(raised, normalize_dim("stack", dim, tensors[0].dim() + 1));
}

// ---- Tensor members
// ------------------------------------------------------------------------------------

Tensor Tensor::contiguous() const { return is_contiguous() ? *this : apply(Contiguous{}, {*this}); }
Tensor Tensor::clone() const { return apply(Contiguous{}, {*this}); }
Tensor Tensor::reshape(const Shape& sizes) const { return mixtape::reshape(*this, sizes); }
Tensor Tensor::permute(const Shape& dims) const { return mixtape::permute(*this, dims); }
Tensor Tensor::transpose(int a, int b) const { return mixtape::transpose(*this, a, b); }
Tensor Tensor::expand(const Shape& sizes) const { return mixtape::expand(*this, sizes); }
Tensor Tensor::slice(int dim, std::int64_t start, std::int64_t stop, std::int64_t step) const {
  return mixtape::slice(*this, dim, start, stop, step);
}

Tensor Tensor::select(int dim, std::int64_t index) const {
  MT_CHECK(this->dim() > 0, "select: expected at least one dimension, got ", describe());
  const int d = normalize_dim("select", dim, this->dim());
  const std::int64_t n = size(d), i = index < 0 ? index + n : index;
  MT_CHECK(i >= 0 && i < n, "select: expected an index in [", -n, ", ", n, ") for dimension ", d,
           " of ", describe(), ", got ", index);
  Shape sizes = shape();
  sizes.erase(d);
  return slice(d, i, i + 1).reshape(sizes);
}

Tensor Tensor::squeeze(int dim) const {
  const int d = normalize_dim("squeeze", dim, this->dim());
  if (this->dim() == 0 || size(d) != 1) return *this;
  Shape sizes = shape();
  sizes.erase(d);
  return reshape(sizes);
}

Tensor Tensor::unsqueeze(int dim) const {
  Shape sizes = shape();
  sizes.insert(normalize_dim("unsqueeze", dim, this->dim() + 1), 1);
  return reshape(sizes);
}

Tensor Tensor::flatten(int first, int last) const {
  if (dim() == 0) return reshape({1});
  const int a = normalize_dim("flatten", first, dim()), b = normalize_dim("flatten", last, dim());
  MT_CHECK(a <= b, "flatten: expected first <= last, got ", first, " and ", last);
  Shape sizes;
  for (int i = 0; i < dim(); ++i) {
    if (i <= a || i > b)
      sizes.push_back(size(i));
    else
      sizes.back() *= size(i);
  }
  return reshape(sizes);
}

Tensor Tensor::operator[](std::int64_t i) const { return select(0, i); }

Tensor Tensor::operator[](std::initializer_list<IndexEntry> indices) const {
  int consumed = 0;
  for (const Index& e : indices)
    consumed += std::holds_alternative<std::int64_t>(e) || std::holds_alternative<Slice>(e);
  MT_CHECK(consumed <= dim(), "index: expected at most ", dim(), " indices for ", describe(),
           ", got ", consumed);
  Tensor x = *this;
  int d = 0;
  for (const Index& e : indices) {
    if (const auto* i = std::get_if<std::int64_t>(&e)) {
      x = x.select(d, *i);
    } else if (const auto* s = std::get_if<Slice>(&e)) {
      x = x.slice(d++, s->start, s->stop, s->step);
    } else if (std::holds_alternative<NewAxis>(e)) {
      x = x.unsqueeze(d++);
    } else {
      d += dim() - consumed;
    }
  }
  return x;
}

}  // namespace mixtape
