#!/usr/bin/env bash
# Trains a small network on Fashion-MNIST, from a bare Debian 12 or Ubuntu 24.04 machine in one
# command: system packages, build, data, training.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/tools/setup.sh"

usage() {
  cat <<'TEXT'
usage: ./quickstart.sh [--no-install] [--preset cpu|cuda] [--data DIR] [training options]

  --no-install   install no system packages; use what is there
  --preset NAME  CMake preset to build (default: cuda with a GPU and nvcc, else cpu)
  --data DIR     folder with the four Fashion-MNIST IDX files, plain or gzipped
  -h, --help     this text

Everything else goes to the training program, for example
  ./quickstart.sh --precision fp16 --epochs 5 --device cuda
  build/cpu/examples/fashion_mnist --help lists its options.
TEXT
}

preset="" data="" program_options=()
while [ $# -gt 0 ]; do
  case $1 in
    --no-install) MIXTAPE_INSTALL=0 ;;
    --preset | --data)
      [ $# -ge 2 ] || { echo "quickstart.sh: $1 needs a value" >&2; exit 2; }
      if [ "$1" = --preset ]; then preset=$2; else data=$2; fi
      shift
      ;;
    --preset=*) preset=${1#*=} ;;
    --data=*) data=${1#*=} ;;
    -h | --help) usage; exit 0 ;;
    *) program_options+=("$1") ;;
  esac
  shift
done

if [ -z "$preset" ]; then preset=$(default_preset); fi
case $preset in
  cpu | cuda) ;;
  *) echo "quickstart.sh: --preset is '$preset'; expected cpu or cuda" >&2; exit 2 ;;
esac
if [ -n "$data" ]; then
  has_data "$data" || die "--data $data: the four Fashion-MNIST files are not all there"
fi

install_packages "${BUILD_PACKAGES[@]}"
configure "$preset" -DMIXTAPE_BUILD_TESTS=OFF -DMIXTAPE_BUILD_BENCHMARKS=OFF
build "$preset" fashion_mnist
if [ -n "$data" ]; then DATA_DIR=$data; else fetch_data; fi
say "Training on Fashion-MNIST in $DATA_DIR"
exec "$MIXTAPE_ROOT/build/$preset/examples/fashion_mnist" --data "$DATA_DIR" "${program_options[@]}"
