// Gathering and scattering by index tensors.
#include "kernels/index.h"

#include "engine/grad_mode.h"
#include "kernels/elementwise.h"
#include "ops/op_support.h"

namespace mixtape {
namespace {

void check_index(const char* op, const Tensor& index) {
  MT_CHECK(index.dtype() == Dtype::i64 || index.dtype() == Dtype::i32, op,
           ": expected an int64 or int32 index, got ", index.describe());
}

double meta_bytes(const Meta& m) {
  return static_cast<double>(m.shape.numel()) * static_cast<double>(size_of(m.dtype));
}
/// Rows picked from in[0] by in[1]: the rest of in[0] is not touched. Backward reads and adds to as
/// many.
OpWork picking_work(const OpCall& call) {
  return {.bytes = (call.backward ? 3 : 2) * meta_bytes(call.out[0]) + meta_bytes(call.in[1])};
}

/// Zeros of `like`'s meta with src added at index: index_select's gradient.
struct IndexAdd {
  Shape sizes;
  int dim;
  static constexpr OpInfo info{.name = "index_add", .higher_order = true};
  Metas infer(Inputs in) const { return {{sizes, in[0].dtype()}}; }
  void forward(Inputs in, Outputs out, Saved& saved) const {
    run(out[0], 0, in[1], in[0]);
    saved.value(in[1]);
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    if (dx[0]) dx[0].set(index_select(dy[0], dim, saved[0]));
  }
  void run(const Tensor& out, float beta, const Tensor& index, const Tensor& src,
           std::int64_t padding = -1) const {
    const std::int64_t rows = sizes[dim], width = rows == 0 ? 0 : sizes.numel() / rows;
    const ScratchWorkspace scratch(
        kernels::index_add_workspace_bytes(out.device(), index.numel(), rows, width), out.device());
    kernels::index_add(stream_of(out), info.name, out.view(), beta, dim, index.view(), src.view(),
                       padding, scratch);
  }
};

struct IndexSelect {
  int dim;
  static constexpr OpInfo info{.name = "index_select", .higher_order = true};
  Metas infer(Inputs in) const {
    check_index("index_select", in[1]);
    MT_CHECK(in[1].dim() == 1, "index_select: expected a 1-D index, got ", in[1].describe());
    Meta out = meta_of(in[0]);
    out.shape[dim] = in[1].numel();
    return {out};
  }
  void forward(Inputs in, Outputs out, Saved& saved) const {
    kernels::index_select(stream_of(in[0]), info.name, out[0].view(), in[0].view(), dim,
                          in[1].view());
    saved.value(in[1]);
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    if (!dx[0]) return;
    const IndexAdd add{saved.input(0).shape, dim};
    if (grad_enabled()) return dx[0].set(apply(add, {dy[0], saved[0]}));
    const auto [into, beta] = dx[0].accumulator();
    add.run(into, beta, saved[0], dy[0]);
  }
  OpWork work(const OpCall& call) const { return picking_work(call); }
};

struct Embedding {
  std::int64_t padding_index;
  static constexpr OpInfo info{.name = "embedding"};
  Metas infer(Inputs in) const {
    check_index("embedding", in[1]);
    MT_CHECK(in[0].dim() == 2, "embedding: expected a weight of shape (V, C), got ",
             in[0].describe());
    Shape sizes = in[1].shape();
    sizes.push_back(in[0].size(1));
    return {{sizes, in[0].dtype()}};
  }
  void forward(Inputs in, Outputs out, Saved& saved) const {
    const Tensor rows = in[1].detach().reshape({in[1].numel()});
    View flat = out[0].view();
    flat.sizes = {in[1].numel(), in[0].size(1)};
    flat.strides = contiguous_strides(flat.sizes);
    kernels::index_select(stream_of(in[0]), info.name, flat, in[0].view(), 0, rows.view());
    saved.value(in[1]);
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    if (!dx[0]) return;
    const Tensor index = saved[0];
    const IndexAdd add{saved.input(0).shape, 0};
    const auto [into, beta] = dx[0].accumulator();
    add.run(into, beta, index.reshape({index.numel()}),
            dy[0].reshape({index.numel(), saved.input(0).shape[1]}), padding_index);
  }
  OpWork work(const OpCall& call) const { return picking_work(call); }
};

struct ScatterAdd {
  int dim;
  static constexpr OpInfo info{.name = "scatter_add", .cast = Cast::widest, .higher_order = true};
  Metas infer(Inputs in) const {
    check_index("scatter_add", in[1]);
    MT_CHECK(in[1].dim() == in[0].dim() && in[2].dim() == in[0].dim(),
             "scatter_add: expected index and source of ", in[0].dim(), " dimensions, got ",
             in[1].describe(), " and ", in[2].describe());
    for (int d = 0; d < in[0].dim(); ++d) {
      MT_CHECK(in[1].size(d) <= in[2].size(d) && (d == dim || in[1].size(d) <= in[0].size(d)),
               "scatter_add: expected an index no larger than the source ", in[2].shape(),
               " and, except in dimension ", dim, ", than ", in[0].shape(), ", got ",
               in[1].shape());
    }
    return {{in[0].shape(), promote_types(in[0].dtype(), in[2].dtype())}};
  }
  void forward(Inputs in, Outputs out, Saved& saved) const {
    kernels::copy(stream_of(in[0]), out[0].view(), in[0].view());
    View source = in[2].view();
    source.sizes = in[1].shape();
    const std::int64_t rows = out[0].dim() ? out[0].size(dim) : 1;
    const std::int64_t width = rows == 0 ? 0 : out[0].numel() / rows;
    const ScratchWorkspace scratch(
        kernels::index_add_workspace_bytes(out[0].device(), in[1].numel(), out[0].numel(),
                                           width > 0 ? 1 : 0),
        out[0].device());
    kernels::scatter_add(stream_of(in[0]), info.name, out[0].view(), 1, dim, in[1].view(), source,
                         scratch);
    saved.value(in[1]);
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    if (dx[0]) dx[0].set(dy[0]);
    if (!dx[2]) return;
    const Tensor index = saved[0];
    Tensor g = gather(dy[0], dim, index);
    const Shape& sizes = saved.input(2).shape;
    for (int d = 0; d < sizes.size(); ++d) {  // source elements beyond the index were not used
      if (g.size(d) == sizes[d]) continue;
      Shape rest = g.shape();
      rest[d] = sizes[d] - g.size(d);
      g = cat({g, zeros(rest, {.dtype = g.dtype(), .device = g.device()})}, d);
    }
    dx[2].set(g);
  }
};

struct Gather {
  int dim;
  static constexpr OpInfo info{.name = "gather", .higher_order = true};
  Metas infer(Inputs in) const {
    check_index("gather", in[1]);
    MT_CHECK_EQ(in[1].dim(), in[0].dim(), "gather: dimensions of the index");
    for (int d = 0; d < in[0].dim(); ++d) {
      MT_CHECK(d == dim || in[1].size(d) <= in[0].size(d),
               "gather: expected an index no larger than ", in[0].shape(), " except in dimension ",
               dim, ", got ", in[1].shape());
    }
    return {{in[1].shape(), in[0].dtype()}};
  }
  void forward(Inputs in, Outputs out, Saved& saved) const {
    kernels::gather(stream_of(in[0]), info.name, out[0].view(), in[0].view(), dim, in[1].view());
    saved.value(in[1]);
  }
  void backward(const Saved& saved, Inputs dy, Grads dx) const {
    if (!dx[0]) return;
    const Meta& x = saved.input(0);
    dx[0].set(scatter_add(zeros(x.shape, {.dtype = x.dtype, .device = saved.device()}), dim,
                          saved[0], dy[0]));
  }
};

}  // namespace

Tensor index_select(const Tensor& x, int dim, const Tensor& index) {
  MT_CHECK(x.dim() > 0, "index_select: expected at least one dimension, got ", x.describe());
  return apply(IndexSelect{normalize_dim("index_select", dim, x.dim())}, {x, index});
}
Tensor gather(const Tensor& x, int dim, const Tensor& index) {
  return apply(Gather{normalize_dim("gather", dim, x.dim())}, {x, index});
}
Tensor scatter_add(const Tensor& x, int dim, const Tensor& index, const Tensor& source) {
  return apply(ScatterAdd{normalize_dim("scatter_add", dim, x.dim())}, {x, index, source});
}
Tensor embedding(const Tensor& weight, const Tensor& index, std::int64_t padding_index) {
  return apply(Embedding{padding_index}, {weight, index});
}

}  // namespace mixtape
