// Parts of a group, and comparisons within one: what ranks decide together, through the store.
#include <algorithm>
#include <numeric>

#include "distributed/flight_recorder.h"
#include "distributed/process_group.h"
#include "distributed/run.h"
#include "distributed/wire.h"

namespace mixtape::distributed {
namespace {

struct Member {
  std::int64_t color, key;
  int rank;  // in the parent
};

/// Ranks of `color`, in the order that they have in their group.
std::vector<Member> members_of(const std::vector<Member>& all, std::int64_t color) {
  std::vector<Member> members;
  for (const Member& m : all)
    if (m.color == color) members.push_back(m);
  std::stable_sort(members.begin(), members.end(),
                   [](const Member& a, const Member& b) { return a.key < b.key; });
  return members;
}

std::shared_ptr<Backend> split_backend(const std::shared_ptr<Backend>& parent, int color, int key,
                                       const std::string& name) {
  return parent ? parent->split(color, key, name) : nullptr;
}

std::string describe(const TensorSummary& t) {
  return detail::concat('\'', t.name, "' ", t.dtype, t.shape);
}

/// The list as one text: two lists are equal if their texts are.
std::string encode(const std::vector<TensorSummary>& tensors) {
  MessageWriter writer;
  for (const TensorSummary& t : tensors)
    writer.text(describe(t)).i64(static_cast<std::int64_t>(t.hash));
  return writer.body();
}

struct Described {
  std::string text;
  std::int64_t hash = 0;
};

std::vector<Described> decode(const std::string& list) {
  std::vector<Described> tensors;
  MessageReader reader(list);
  while (!reader.empty()) {
    Described d;
    d.text = reader.text();
    d.hash = reader.i64();
    tensors.push_back(std::move(d));
  }
  return tensors;
}

std::uint64_t hash_of(const std::string& text) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

/// Ranks by what they have: "ranks 0, 2: 'fc.weight' float32[10, 4]".
std::string by_value(const std::vector<std::string>& values) {
  std::vector<std::string> distinct;
  for (const std::string& v : values)
    if (std::find(distinct.begin(), distinct.end(), v) == distinct.end()) distinct.push_back(v);
  std::string text;
  for (const std::string& v : distinct) {
    text += "\n  rank";
    std::string ranks;
    for (std::size_t r = 0; r < values.size(); ++r)
      if (values[r] == v) ranks += (ranks.empty() ? " " : ", ") + std::to_string(r);
    text += ranks + ": " + v;
  }
  return text;
}

/// What a list has at `i`, for a message.
std::string entry_text(const std::vector<Described>& list, std::size_t i, bool with_hash) {
  if (i >= list.size()) return "only " + std::to_string(list.size()) + " tensors";
  if (!with_hash) return list[i].text;
  return list[i].text + " with other values (hash " +
         std::to_string(static_cast<std::uint64_t>(list[i].hash)) + ")";
}

}  // namespace

std::vector<std::string> gather_texts(const Communicator::Impl& group, const std::string& key,
                                      const std::string& value, const std::string& what) {
  if (group.size() == 1) return {value};
  Run& run = current_run();
  return run.store->gather(group.name + '/' + key, group.rank, group.size(), value, run.timeout,
                           what);
}

Communicator Communicator::split(int color, int key) const {
  Impl& group = impl();
  const std::lock_guard lock(group.mutex);
  const std::uint64_t number = ++group.splits;
  const std::string what = group.name + ": split #" + std::to_string(number);
  const FlightScope scope({.group = group.name,
                           .members = group.world_ranks,
                           .sequence = ++group.sequence,
                           .signature = "split",
                           .text = what});
  const std::vector<std::string> texts =
      gather_texts(group, "split " + std::to_string(number),
                   MessageWriter().i64(std::max(color, -1)).i64(key).body(), what);
  std::vector<Member> all;
  for (const std::string& text : texts) {
    MessageReader reader(text);
    const std::int64_t its_color = reader.i64();
    all.push_back({its_color, reader.i64(), static_cast<int>(all.size())});
  }
  auto part = std::make_shared<Impl>();
  part->name = group.name + '/' + std::to_string(number) + '.' + std::to_string(color);
  part->device = group.device;
  part->no_host = group.no_host;
  part->no_cuda = group.no_cuda;
  for (const Member& m : members_of(all, color)) {
    if (m.rank == group.rank) part->rank = static_cast<int>(part->world_ranks.size());
    part->world_ranks.push_back(group.world_ranks[static_cast<std::size_t>(m.rank)]);
  }
  part->host = split_backend(group.host, color, key, part->name);
  part->cuda =
      group.cuda == group.host ? part->host : split_backend(group.cuda, color, key, part->name);
  return color < 0 ? Communicator() : Communicator(std::move(part));
}

Communicator Communicator::subgroup(std::span<const int> ranks) const {
  const auto mine = std::find(ranks.begin(), ranks.end(), rank());
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    MT_CHECK(ranks[i] >= 0 && ranks[i] < size(), "subgroup: expected ranks from 0 to ", size() - 1,
             ", got ", ranks[i]);
    MT_CHECK(std::find(ranks.begin(), ranks.begin() + static_cast<std::ptrdiff_t>(i), ranks[i]) ==
                 ranks.begin() + static_cast<std::ptrdiff_t>(i),
             "subgroup: expected each rank once, got ", ranks[i], " twice");
  }
  if (mine == ranks.end()) return split(-1);
  Communicator part = split(0, static_cast<int>(mine - ranks.begin()));
  MT_CHECK(part.size() == static_cast<int>(ranks.size()),
           "subgroup: ranks passed different lists: ", "this one's has ", ranks.size(), " ranks, ",
           part.size(), " ranks joined");
  return part;
}

void check_same_on_all_ranks(const Communicator& communicator, const std::string& what,
                             std::span<const TensorSummary> tensors) {
  Communicator::Impl& group = communicator.impl();
  if (group.size() == 1) return;
  const std::lock_guard lock(group.mutex);
  const std::string key = "same " + std::to_string(++group.comparisons);
  const FlightScope scope({.group = group.name,
                           .members = group.world_ranks,
                           .sequence = ++group.sequence,
                           .signature = "comparison",
                           .text = group.name + ": comparison of " + what});
  const std::string mine = encode({tensors.begin(), tensors.end()});
  // Hashes first: lists are long, and as a rule equal.
  const std::string digest = std::to_string(hash_of(mine)) + ' ' + std::to_string(mine.size());
  const std::vector<std::string> digests = gather_texts(group, key, digest, what);
  if (std::all_of(digests.begin(), digests.end(),
                  [&](const std::string& d) { return d == digest; }))
    return;
  const std::vector<std::string> lists = gather_texts(group, key + " lists", mine, what);
  std::vector<std::vector<Described>> all;
  for (const std::string& list : lists) all.push_back(decode(list));
  for (std::size_t i = 0;; ++i) {
    for (const bool hashes : {false, true}) {
      std::vector<std::string> values;
      for (const auto& list : all) values.push_back(entry_text(list, i, hashes));
      if (std::any_of(values.begin(), values.end(),
                      [&](const std::string& v) { return v != values[0]; }))
        MT_THROW(what, ": expected the same on all ranks, got at number ", i, by_value(values));
    }
    MT_CHECK(i < all[0].size(), what, ": expected the same on all ranks");
  }
}

}  // namespace mixtape::distributed
