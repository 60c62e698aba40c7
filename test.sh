#!/usr/bin/env bash
# Builds Mixtape and runs every test that this machine can run; the rest shows as skipped.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/tools/setup.sh"

usage() {
  cat <<'TEXT'
usage: ./test.sh [--no-install] [--preset NAME] [--target NAME] [ctest options]

  --no-install   install no system packages; use what is there
  --preset NAME  cpu, cuda, ci, asan or tsan (default: cuda with a GPU and nvcc, else cpu)
  --target NAME  build only this target, for example tests_threads
  -h, --help     this text

Everything else goes to ctest: ./test.sh -L cpu, ./test.sh -R engine
TEXT
}

preset="" targets=() ctest_options=()
while [ $# -gt 0 ]; do
  case $1 in
    --no-install) MIXTAPE_INSTALL=0 ;;
    --preset | --target)
      [ $# -ge 2 ] || { echo "test.sh: $1 needs a value" >&2; exit 2; }
      if [ "$1" = --preset ]; then preset=$2; else targets+=("$2"); fi
      shift
      ;;
    --preset=*) preset=${1#*=} ;;
    -h | --help) usage; exit 0 ;;
    *) ctest_options+=("$1") ;;
  esac
  shift
done

if [ -z "$preset" ]; then preset=$(default_preset); fi
case $preset in
  cpu | cuda | ci | asan | tsan) ;;
  *) echo "test.sh: --preset is '$preset'; expected cpu, cuda, ci, asan or tsan" >&2; exit 2 ;;
esac

install_packages "${BUILD_PACKAGES[@]}" "${TEST_PACKAGES[@]}"
configure "$preset" -DMIXTAPE_BUILD_TESTS=ON -DMIXTAPE_BUILD_BENCHMARKS=ON
build "$preset" "${targets[@]}"
say "Testing build/$preset"
cd "$MIXTAPE_ROOT"
exec ctest --preset "$preset" -j "$(jobs_count)" --no-tests=error "${ctest_options[@]}"
