// Numbers as the profile's table and report print them. Internal.
#pragma once

#include <string>

namespace mixtape::detail {

std::string format_seconds(double seconds);  // "12.3 us", "4.56 ms", "7.89 s"
/// Three digits with a decimal prefix: "312 TFLOP/s" for (3.12e14, "FLOP/s").
std::string format_rate(double per_second, const char* unit);
std::string format_percent(double share);  // "12.3 %"

}  // namespace mixtape::detail
