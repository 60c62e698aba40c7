// Uses the installed library as a user would: one header, one target, no knowledge of backends.
#include <mixtape.h>

#include <cstdio>
#include <string>

int main() {
  const std::string summary = mixtape::build_summary();
  std::puts(summary.c_str());
  return summary.rfind("Mixtape ", 0) == 0 ? 0 : 1;
}
