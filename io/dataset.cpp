#include "io/dataset.h"

#include <cstring>

#include "engine/check.h"
#include "ops/ops.h"

namespace mixtape::io {
namespace {

std::size_t bytes_of(const Tensor& t) {
  return static_cast<std::size_t>(t.numel()) * size_of(t.dtype());
}

Shape with_leading(std::int64_t n, const Shape& sizes) {
  Shape s = sizes;
  s.insert(0, n);
  return s;
}

char* row(const Tensor& batch, std::size_t i, std::size_t bytes) {
  return static_cast<char*>(batch.raw_data()) + i * bytes;
}

/// One field of the examples, stacked row by row.
class Stack {
 public:
  Stack(const char* name, const Tensor& first, std::size_t rows, const CollateContext& context)
      : name_(name), defined_(first.defined()) {
    if (!defined_) return;
    check_cpu(first);
    sizes_ = first.shape();
    bytes_ = bytes_of(first);
    out_ = context.empty(with_leading(static_cast<std::int64_t>(rows), sizes_), first.dtype());
  }
  void put(std::size_t i, std::int64_t index, const Tensor& t) {
    MT_CHECK(t.defined() == defined_, "collate: sample ", index, ": expected ", name_,
             defined_ ? " as in the other samples" : " undefined as in the other samples", ", got ",
             t.describe());
    if (!defined_) return;
    check_cpu(t);
    MT_CHECK(t.shape() == sizes_ && t.dtype() == out_.dtype(), "collate: sample ", index,
             ": expected ", name_, " to be ", out_.dtype(), sizes_,
             " as in the batch's first, got ", t.describe());
    const Tensor dense = t.contiguous();
    if (bytes_ > 0) std::memcpy(row(out_, i, bytes_), dense.raw_data(), bytes_);
  }
  const Tensor& result() const { return out_; }

 private:
  void check_cpu(const Tensor& t) const {
    MT_CHECK(t.device().is_cpu(), "collate: expected samples on the CPU, got ", name_, " ",
             t.describe());
  }
  const char* name_;
  bool defined_;
  Shape sizes_;
  std::size_t bytes_ = 0;
  Tensor out_;
};

Tensor gather_rows(const Tensor& from, std::span<const std::int64_t> indices,
                   const CollateContext& context) {
  Shape sizes = from.shape();
  sizes[0] = static_cast<std::int64_t>(indices.size());
  const Tensor out = context.empty(sizes, from.dtype());
  if (from.numel() == 0) return out;
  const std::size_t bytes = bytes_of(from) / static_cast<std::size_t>(from.size(0));
  for (std::size_t i = 0; i < indices.size(); ++i)
    std::memcpy(row(out, i, bytes), row(from, static_cast<std::size_t>(indices[i]), bytes), bytes);
  return out;
}

void check_index(const char* op, std::int64_t index, std::int64_t size) {
  MT_CHECK(index >= 0 && index < size, op, ": expected a sample index in [0, ", size, "), got ",
           index);
}

}  // namespace

Tensor CollateContext::empty(const Shape& sizes, Dtype dtype) const {
  return mixtape::empty(sizes, {.dtype = dtype, .pinned = pinned});
}

Batch Dataset::collate(std::span<const std::int64_t> indices, const CollateContext& context) const {
  MT_CHECK(!indices.empty(), "collate: expected at least one sample");
  std::vector<Stack> stacks;
  for (std::size_t i = 0; i < indices.size(); ++i) {
    SampleRandom random = context.random.sample(indices[i]);
    const Example e = get(indices[i], random);
    if (i == 0) {
      stacks.emplace_back("x", e.x, indices.size(), context);
      stacks.emplace_back("y", e.y, indices.size(), context);
      for (const Tensor& t : e.more) stacks.emplace_back("more", t, indices.size(), context);
    }
    MT_CHECK(e.more.size() + 2 == stacks.size(), "collate: sample ", indices[i], ": expected ",
             stacks.size() - 2, " further tensors as in the batch's first, got ", e.more.size());
    stacks[0].put(i, indices[i], e.x);
    stacks[1].put(i, indices[i], e.y);
    for (std::size_t k = 0; k < e.more.size(); ++k) stacks[k + 2].put(i, indices[i], e.more[k]);
  }
  Batch batch{stacks[0].result(), stacks[1].result()};
  for (std::size_t k = 2; k < stacks.size(); ++k) batch.more.push_back(stacks[k].result());
  return batch;
}

TensorDataset::TensorDataset(const Tensor& x, const Tensor& y, const std::vector<Tensor>& more) {
  const auto prepare = [&](const char* name, const Tensor& t) {
    MT_CHECK(t.defined() && t.device().is_cpu() && t.dim() > 0, "TensorDataset: expected ", name,
             " on the CPU with one or more dimensions, got ", t.describe());
    MT_CHECK(t.size(0) == x.size(0), "TensorDataset: expected ", x.size(0), " samples in ", name,
             " as in x, got ", t.describe());
    return t.detach().contiguous();
  };
  x_ = prepare("x", x);
  if (y) y_ = prepare("y", y);
  for (const Tensor& t : more) more_.push_back(prepare("more", t));
}

Example TensorDataset::get(std::int64_t index, SampleRandom&) const {
  check_index("TensorDataset", index, size());
  Example e{x_[index], y_ ? y_[index] : Tensor()};
  for (const Tensor& t : more_) e.more.push_back(t[index]);
  return e;
}

Batch TensorDataset::collate(std::span<const std::int64_t> indices,
                             const CollateContext& context) const {
  for (const std::int64_t i : indices) check_index("TensorDataset", i, size());
  Batch batch{gather_rows(x_, indices, context)};
  if (y_) batch.y = gather_rows(y_, indices, context);
  for (const Tensor& t : more_) batch.more.push_back(gather_rows(t, indices, context));
  return batch;
}

}  // namespace mixtape::io
