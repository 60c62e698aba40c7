#include "distributed/gradient_buckets.h"

#include <algorithm>
#include <map>

#include "engine/grad_mode.h"
#include "engine/node.h"
#include "engine/op.h"

namespace mixtape::distributed {
namespace {

constexpr std::int64_t kAlignment = 256;  // of gradients in a flat buffer

/// One parameter's gradient in memory.
struct Piece {
  Tensor parameter, gradient;
  std::int64_t readiness = 0;  // place in the reverse order of registration
  std::int64_t element_bytes() const {
    return static_cast<std::int64_t>(size_of(gradient.dtype()));
  }
  std::int64_t begin() const { return gradient.impl()->offset * element_bytes(); }
  std::int64_t end() const { return begin() + gradient.numel() * element_bytes(); }
  std::int64_t padded_end() const {
    return begin() +
           (gradient.numel() * element_bytes() + kAlignment - 1) / kAlignment * kAlignment;
  }
};

/// A bucket's pieces, in the order of memory.
struct Run {
  std::vector<Piece> pieces;
  std::int64_t readiness() const {
    std::int64_t last = 0;
    for (const Piece& p : pieces) last = std::max(last, p.readiness);
    return last;
  }
};

/// The gradients of each flat buffer in the order of memory; buffers in the order of their first
/// ready gradient.
std::vector<std::vector<Piece>> pieces_by_buffer(const std::vector<Tensor>& parameters) {
  std::vector<std::vector<Piece>> buffers;
  std::map<const Storage*, std::size_t> buffer_of;
  for (auto p = parameters.rbegin(); p != parameters.rend(); ++p) {
    const LeafGrad& leaf = leaf_grad(*p->impl());
    MT_CHECK(leaf.flat, "make_gradient_buckets: expected parameters with flat gradients, got ",
             p->describe(), " without");
    const auto [it, fresh] =
        buffer_of.try_emplace(leaf.gradient.impl()->storage.get(), buffers.size());
    if (fresh) buffers.emplace_back();
    buffers[it->second].push_back({*p, leaf.gradient, p - parameters.rbegin()});
  }
  for (auto& buffer : buffers)
    std::sort(buffer.begin(), buffer.end(),
              [](const Piece& a, const Piece& b) { return a.begin() < b.begin(); });
  return buffers;
}

void cut(const std::vector<Piece>& buffer, const BucketSizes& sizes, std::vector<Run>& runs) {
  std::int64_t limit = sizes.first;
  bool open = false;
  for (const Piece& piece : buffer) {
    if (open) {
      const std::vector<Piece>& last = runs.back().pieces;
      open =
          last.back().padded_end() == piece.begin() && piece.end() - last.front().begin() <= limit;
      if (!open) limit = sizes.rest;
    }
    if (!open) runs.emplace_back();
    open = true;
    runs.back().pieces.push_back(piece);
  }
}

GradientBucket bucket_of(const Run& run, int index) {
  GradientBucket bucket;
  bucket.index = index;
  const Piece &first = run.pieces.front(), &last = run.pieces.back();
  const std::int64_t n = (last.end() - first.begin()) / first.element_bytes();
  bucket.gradients = make_view(first.gradient, {n}, {1}, 0);
  for (const Piece& piece : run.pieces) bucket.parameters.push_back(piece.parameter);
  const std::string name = "gradients of " + first.parameter.name();
  bucket.gradients.set_name(run.pieces.size() == 1 ? name : name + " to " + last.parameter.name());
  return bucket;
}

}  // namespace

std::int64_t GradientBucket::bytes() const {
  return gradients.numel() * static_cast<std::int64_t>(size_of(gradients.dtype()));
}

std::vector<GradientBucket> make_gradient_buckets(const std::vector<Tensor>& parameters,
                                                  const BucketSizes& sizes) {
  MT_CHECK(sizes.first > 0 && sizes.rest > 0,
           "make_gradient_buckets: expected bucket sizes of at least 1 byte, got ", sizes.first,
           " and ", sizes.rest);
  std::vector<Run> runs;
  for (const std::vector<Piece>& buffer : pieces_by_buffer(parameters)) cut(buffer, sizes, runs);
  std::stable_sort(runs.begin(), runs.end(),
                   [](const Run& a, const Run& b) { return a.readiness() < b.readiness(); });
  std::vector<GradientBucket> buckets;
  for (const Run& run : runs) buckets.push_back(bucket_of(run, static_cast<int>(buckets.size())));
  return buckets;
}

void clear_padding(const std::vector<GradientBucket>& buckets) {
  const NoGrad no_grad;
  for (const GradientBucket& bucket : buckets) {
    const std::int64_t start = bucket.gradients.impl()->offset;
    std::int64_t written = 0;
    for (const Tensor& p : bucket.parameters) {
      const Tensor& gradient = leaf_grad(*p.impl()).gradient;
      const std::int64_t at = gradient.impl()->offset - start;
      if (at > written) make_view(bucket.gradients, {at - written}, {1}, written).zero_();
      written = at + gradient.numel();
    }
  }
}

}  // namespace mixtape::distributed
