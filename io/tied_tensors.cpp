#include "io/tied_tensors.h"

#include <algorithm>
#include <map>

#include "engine/check.h"

namespace mixtape::io {
namespace {

/// The bytes of a storage between a tensor's first and its last element.
struct Extent {
  std::int64_t first, last;  // last: one past the end
};

Extent extent_of(const Tensor& t) {
  const auto item = static_cast<std::int64_t>(size_of(t.dtype()));
  std::int64_t last = t.get().offset;
  for (int d = 0; d < t.dim(); ++d) last += (t.shape()[d] - 1) * t.strides()[d];
  return {t.get().offset * item, (last + 1) * item};
}

bool identical(const Tensor& a, const Tensor& b) {
  return a.dtype() == b.dtype() && a.get().offset == b.get().offset && a.shape() == b.shape() &&
         a.strides() == b.strides();
}

bool within(const Tensor& inner, const Tensor& outer) {
  const Extent i = extent_of(inner), o = extent_of(outer);
  return outer.is_contiguous() && inner.dtype() == outer.dtype() && i.first >= o.first &&
         i.last <= o.last;
}

/// Calls f(byte) for the first byte of every element.
template <class F>
void for_each_element(const Tensor& t, F&& f) {
  const auto item = static_cast<std::int64_t>(size_of(t.dtype()));
  std::vector<std::int64_t> at(static_cast<std::size_t>(t.dim()), 0);
  for (std::int64_t n = 0, element = t.get().offset; n < t.numel(); ++n) {
    f(element * item);
    for (int d = t.dim() - 1; d >= 0; --d) {
      element += t.strides()[d];
      if (++at[static_cast<std::size_t>(d)] < t.shape()[d]) break;
      at[static_cast<std::size_t>(d)] = 0;
      element -= t.shape()[d] * t.strides()[d];
    }
  }
}

// Extents that overlap may still interleave without a common element, as columns do.
bool have_common_bytes(const Tensor& a, const Tensor& b) {
  const Extent x = extent_of(a), y = extent_of(b);
  if (x.last <= y.first || y.last <= x.first) return false;
  std::vector<bool> taken(static_cast<std::size_t>(x.last - x.first));
  const auto item_a = static_cast<std::int64_t>(size_of(a.dtype()));
  const auto item_b = static_cast<std::int64_t>(size_of(b.dtype()));
  for_each_element(a, [&](std::int64_t byte) {
    for (std::int64_t k = 0; k < item_a; ++k)
      taken[static_cast<std::size_t>(byte - x.first + k)] = true;
  });
  bool common = false;
  for_each_element(b, [&](std::int64_t byte) {
    for (std::int64_t k = byte; k < byte + item_b; ++k)
      common |= k >= x.first && k < x.last && taken[static_cast<std::size_t>(k - x.first)];
  });
  return common;
}

}  // namespace

std::vector<Tie> find_ties(const char* op, const std::vector<nn::NamedTensor>& tensors) {
  std::vector<Tie> ties(tensors.size());
  std::map<const Storage*, std::vector<int>> by_storage;
  for (std::size_t i = 0; i < tensors.size(); ++i)
    if (tensors[i].tensor.numel() > 0)
      by_storage[tensors[i].tensor.get().storage.get()].push_back(static_cast<int>(i));

  const auto tensor = [&](int i) -> const Tensor& {
    return tensors[static_cast<std::size_t>(i)].tensor;
  };
  for (auto& [storage, members] : by_storage) {
    if (members.size() < 2) continue;
    // Those that can own others come first: contiguous before not, long before short.
    std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
      const bool ca = tensor(a).is_contiguous(), cb = tensor(b).is_contiguous();
      if (ca != cb) return ca;
      return ca && tensor(a).numel() > tensor(b).numel();
    });
    std::vector<int> owners;
    for (const int i : members) {
      const Tensor& t = tensor(i);
      const auto owner = std::find_if(owners.begin(), owners.end(), [&](int o) {
        return identical(t, tensor(o)) || within(t, tensor(o));
      });
      if (owner == owners.end()) {
        for (const int o : owners)
          MT_CHECK(!have_common_bytes(tensor(o), t), op, ": expected tensors that share no memory ",
                   "or lie within a contiguous one, got '",
                   tensors[static_cast<std::size_t>(o)].name, "' and '",
                   tensors[static_cast<std::size_t>(i)].name,
                   "', which overlap in part; clone one of them");
        owners.push_back(i);
        continue;
      }
      const bool same = identical(t, tensor(*owner));
      ties[static_cast<std::size_t>(i)] = {*owner,
                                           same ? 0 : t.get().offset - tensor(*owner).get().offset,
                                           same ? contiguous_strides(t.shape()) : t.strides()};
    }
  }
  return ties;
}

}  // namespace mixtape::io
