// The table as text.
#include <algorithm>
#include <cstdio>

#include "engine/caching_allocator.h"
#include "engine/profile_result.h"
#include "engine/profile_text.h"

namespace mixtape {

namespace detail {

std::string format_seconds(double seconds) {
  char text[32];
  if (seconds < 1e-3)
    std::snprintf(text, sizeof text, "%.1f us", seconds * 1e6);
  else if (seconds < 1)
    std::snprintf(text, sizeof text, "%.2f ms", seconds * 1e3);
  else
    std::snprintf(text, sizeof text, "%.2f s", seconds);
  return text;
}

std::string format_rate(double per_second, const char* unit) {
  constexpr const char* kPrefixes[] = {"", "k", "M", "G", "T", "P"};
  int prefix = 0;
  for (; per_second >= 999.5 && prefix < 5; ++prefix) per_second /= 1000;
  char text[48];
  std::snprintf(text, sizeof text, "%.*f %s%s",
                per_second < 10    ? 2
                : per_second < 100 ? 1
                                   : 0,
                per_second, kPrefixes[prefix], unit);
  return text;
}

std::string format_percent(double share) {
  char text[16];
  std::snprintf(text, sizeof text, "%.1f %%", share * 100);
  return text;
}

}  // namespace detail

namespace {

using detail::format_bytes;
using detail::format_rate;
using detail::format_seconds;

struct Column {
  std::string head;
  bool left = false;
  std::vector<std::string> cells = {};
};

/// Names come from users: what would break the lines or the terminal is shown as its code.
std::string printable(const std::string& name) {
  std::string out;
  for (const char c : name) {
    const auto byte = static_cast<unsigned char>(c);
    char code[8];
    std::snprintf(code, sizeof code, "\\x%02x", byte);
    out += byte < 0x20 || byte == 0x7F ? std::string(code) : std::string(1, c);
  }
  return out.empty() ? "\"\"" : out;
}

std::string label(const ProfileRow& r, ProfileGroup group) {
  const bool by_module = group == ProfileGroup::module;
  std::string text = by_module ? (r.module.empty() ? "(no module)" : r.module) : printable(r.name);
  if (r.backward && text != "backward") text += " (backward)";
  return text;
}

std::string lay_out(const std::vector<Column>& columns, std::size_t rows) {
  std::string out;
  std::vector<std::size_t> widths;
  for (const Column& c : columns) {
    std::size_t width = c.head.size();
    for (const std::string& cell : c.cells) width = std::max(width, cell.size());
    widths.push_back(width);
  }
  const auto line = [&](const auto& cell_of) {
    std::string text;
    for (std::size_t c = 0; c < columns.size(); ++c) {
      const std::string& cell = cell_of(columns[c]);
      const std::string pad(widths[c] - cell.size(), ' ');
      text += (c ? "  " : "") + (columns[c].left ? cell + pad : pad + cell);
    }
    text.resize(text.find_last_not_of(' ') + 1);
    out += text + "\n";
  };
  line([](const Column& c) -> const std::string& { return c.head; });
  for (std::size_t r = 0; r < rows; ++r)
    line([r](const Column& c) -> const std::string& { return c.cells[r]; });
  return out;
}

std::string or_blank(bool wanted, const std::string& text) { return wanted ? text : ""; }

}  // namespace

std::string ProfileResult::table(const ProfileTableOptions& options) const {
  const std::vector<ProfileRow> shown = rows(options);
  ProfileTableOptions whole = options;
  whole.rows = 0;
  const std::vector<ProfileRow> all = rows(whole);
  double host = 0, device = 0, flops = 0;
  std::int64_t allocated = 0;
  for (const ProfileRow& r : all) {
    host += r.host_self;
    device += r.device_self;
    flops += r.flops;
    allocated += r.allocated;
  }
  const bool on_device = !activities.empty();
  const double whole_time = on_device ? device : host;
  Column name{"name", true}, module{"module", true}, shapes{"inputs", true}, calls{"calls"},
      total{"host total"}, self{"host self"}, device_total{"device total"},
      device_self{"device self"}, share{"%"}, product_rate{"FLOP/s"}, byte_rate{"bytes/s"},
      memory{"allocated"};
  for (const ProfileRow& r : shown) {
    const double own = on_device ? r.device_self : r.host_self;
    name.cells.push_back(label(r, options.group_by));
    module.cells.push_back(r.module);
    shapes.cells.push_back(r.shapes);
    calls.cells.push_back(std::to_string(r.calls));
    total.cells.push_back(format_seconds(r.host_total));
    self.cells.push_back(format_seconds(r.host_self));
    device_total.cells.push_back(or_blank(r.device_total > 0, format_seconds(r.device_total)));
    device_self.cells.push_back(or_blank(r.device_self > 0, format_seconds(r.device_self)));
    share.cells.push_back(whole_time > 0 ? detail::format_percent(own / whole_time) : "");
    product_rate.cells.push_back(or_blank(r.flops > 0 && own > 0, format_rate(r.flops / own, "")));
    byte_rate.cells.push_back(or_blank(r.bytes > 0 && own > 0, format_rate(r.bytes / own, "B")));
    memory.cells.push_back(
        or_blank(r.allocated > 0, format_bytes(static_cast<std::size_t>(r.allocated))));
  }
  std::vector<Column> columns{std::move(name)};
  if (options.group_by == ProfileGroup::op_and_module) columns.push_back(std::move(module));
  if (options.group_by == ProfileGroup::op_and_shapes) columns.push_back(std::move(shapes));
  for (Column* c : {&calls, &total, &self}) columns.push_back(std::move(*c));
  if (on_device)
    for (Column* c : {&device_total, &device_self}) columns.push_back(std::move(*c));
  for (Column* c : {&share, &product_rate, &byte_rate, &memory}) columns.push_back(std::move(*c));

  std::string out = lay_out(columns, shown.size());
  if (shown.size() < all.size())
    out += "... and " + std::to_string(all.size() - shown.size()) + " more\n";
  out += std::to_string(steps.size()) + (steps.size() == 1 ? " step" : " steps") + ", host " +
         format_seconds(host);
  if (on_device) out += ", device " + format_seconds(device);
  if (flops > 0) out += ", " + format_rate(flops, "FLOP");
  if (allocated > 0) out += ", " + format_bytes(static_cast<std::size_t>(allocated)) + " allocated";
  out += "\n";
  for (const std::string& note : notes) out += "note: " + note + "\n";
  return out;
}

}  // namespace mixtape
