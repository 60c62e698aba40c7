# shellcheck shell=bash disable=SC2034
# Shared by quickstart.sh, test.sh and .ci/run: system packages, the CMake configure and build, and
# the Fashion-MNIST files. Sourced, never run; works on Debian 12 and Ubuntu 24.04, and elsewhere
# says which packages it would have needed.
#
# Reads MIXTAPE_INSTALL (1 or 0). Every step says what it does and stops with one line on failure.

MIXTAPE_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
MIXTAPE_INSTALL=1

BUILD_PACKAGES=(build-essential cmake ninja-build ccache libeigen3-dev libcli11-dev zlib1g-dev
  nlohmann-json3-dev libpcre2-dev libdnnl-dev libjpeg-dev libpng-dev)
TEST_PACKAGES=(libgtest-dev libgmock-dev libbenchmark-dev libopenmpi-dev openmpi-bin
  clang-format-14 python3)

say() { printf '\033[1m== %s\033[0m\n' "$*"; }
die() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# The cores this process may use.
jobs_count() { nproc; }

# --- system packages ----------------------------------------------------------------------------

package_installed() {
  [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

package_available() {
  local candidate
  candidate=$(LC_ALL=C apt-cache policy "$1" 2>/dev/null | sed -n 's/^ *Candidate: //p')
  [ -n "$candidate" ] && [ "$candidate" != "(none)" ]
}

# Runs apt-get as root: directly, or through sudo.
as_root() {
  if [ "$(id -u)" -eq 0 ]; then
    "$@"
  elif command -v sudo >/dev/null; then
    sudo "$@"
  else
    die "needs root and there is no sudo; as root, run: $*"
  fi
}

apt_refreshed=0
apt_refresh() {
  [ "$apt_refreshed" -eq 0 ] || return 0
  say "Refreshing the package lists"
  as_root apt-get update -q
  apt_refreshed=1
}

# Installs those of the named packages that are missing.
install_packages() {
  local missing=() package
  if ! command -v apt-get >/dev/null; then
    say "No apt-get here; this needs the equivalents of: $*"
    return 0
  fi
  for package in "$@"; do
    package_installed "$package" || missing+=("$package")
  done
  [ "${#missing[@]}" -gt 0 ] || return 0
  if [ "$MIXTAPE_INSTALL" -eq 0 ]; then
    say "Not installed (--no-install): ${missing[*]}"
    return 0
  fi
  for package in "${missing[@]}"; do
    package_available "$package" || apt_refresh
  done
  say "Installing: ${missing[*]}"
  apt_install "${missing[@]}" && return 0
  # Package lists older than the mirror name versions that it no longer has.
  [ "$apt_refreshed" -eq 0 ] || die "apt-get could not install: ${missing[*]}"
  apt_refresh
  apt_install "${missing[@]}" || die "apt-get could not install: ${missing[*]}"
}

apt_install() {
  as_root env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -q --no-install-recommends "$@" </dev/null
}

# --- CUDA ---------------------------------------------------------------------------------------

# Puts nvcc on PATH; false when there is none.
find_nvcc() {
  command -v nvcc >/dev/null && return 0
  [ -x /usr/local/cuda/bin/nvcc ] && PATH="/usr/local/cuda/bin:$PATH"
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU 0'; }

# The preset for this machine: CUDA needs the toolkit to build and a GPU to be of use.
default_preset() {
  if ! has_gpu; then
    echo cpu
  elif find_nvcc; then
    echo cuda
  else
    echo "A GPU is here but no CUDA toolkit (nvcc): building for the CPU only." >&2
    echo cpu
  fi
}

has_cudnn() {
  local folder
  for folder in "${CUDNN_ROOT:-/nonexistent}" /usr/local/cuda /usr /usr/local; do
    if [ -e "$folder/include/cudnn.h" ] || [ -e "$folder/include/x86_64-linux-gnu/cudnn.h" ]; then
      return 0
    fi
  done
  return 1
}

# The cuDNN frontend's headers exist only in a Python wheel; it goes into the repository's .venv.
install_cudnn_frontend() {
  local wheel="$MIXTAPE_ROOT/.venv/lib/python3*/site-packages/include/cudnn_frontend.h"
  compgen -G "$wheel" >/dev/null && return 0
  if python3 -c "import importlib.metadata as m; m.version('nvidia-cudnn-frontend')" 2>/dev/null; then
    return 0
  fi
  if [ "$MIXTAPE_INSTALL" -eq 0 ]; then
    say "Not installed (--no-install): the Python wheel nvidia-cudnn-frontend"
    return 0
  fi
  install_packages python3 python3-venv
  say "Installing the cuDNN frontend headers into .venv"
  # The system's python3: a version manager's may lack ensurepip.
  local python=/usr/bin/python3
  [ -x "$python" ] || python=python3
  if ! "$python" -m venv "$MIXTAPE_ROOT/.venv" ||
    ! "$MIXTAPE_ROOT/.venv/bin/pip" install -q nvidia-cudnn-frontend; then
    say "No cuDNN frontend: attention on the GPU will run on slower kernels"
  fi
}

# --- build --------------------------------------------------------------------------------------

# configure PRESET [cmake arguments]: build/PRESET.
configure() {
  local preset=$1
  shift
  command -v cmake >/dev/null || die "cmake is not installed"
  command -v ninja >/dev/null || die "ninja is not installed"
  if [ "$preset" = cuda ] || [ "$preset" = ci ]; then
    if find_nvcc; then
      if has_cudnn; then install_cudnn_frontend; fi
    elif [ "$preset" = cuda ]; then
      die "the cuda preset needs nvcc; use --preset cpu"
    fi
  fi
  say "Configuring build/$preset"
  (cd "$MIXTAPE_ROOT" && cmake --preset "$preset" "$@")
}

# build PRESET [targets]
build() {
  local preset=$1 targets=()
  shift
  [ $# -eq 0 ] || targets=(--target "$@")
  say "Building build/$preset with $(jobs_count) jobs"
  cmake --build "$MIXTAPE_ROOT/build/$preset" -j "$(jobs_count)" "${targets[@]}"
}

# --- Fashion-MNIST ------------------------------------------------------------------------------

SYSTEM_DATA=/usr/share/datasets/fashion-mnist
DATA_URLS=(
  https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion
  http://fashion-mnist.s3-website.eu-central-1.amazonaws.com)
# SHA-256 of each file's uncompressed content, which Debian's copy and the original share.
DATA_FILES=(
  train-images-idx3-ubyte c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888
  train-labels-idx1-ubyte bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9
  t10k-images-idx3-ubyte 5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b
  t10k-labels-idx1-ubyte 0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34)

# True when folder $1 holds all four files, plain or gzipped.
has_data() {
  local i
  for ((i = 0; i < ${#DATA_FILES[@]}; i += 2)); do
    [ -e "$1/${DATA_FILES[i]}.gz" ] || [ -e "$1/${DATA_FILES[i]}" ] || return 1
  done
}

# Fetches URL $1 into file $2.
download() {
  if command -v curl >/dev/null; then
    curl -fsSL --connect-timeout 15 --retry 2 -o "$2" "$1"
  elif command -v wget >/dev/null; then
    wget -q --timeout=15 --tries=3 -O "$2" "$1"
  else
    return 1
  fi
}

# Fetches one file into folder $1 and checks it: name $2, SHA-256 $3.
download_data_file() {
  local target="$1/$2.gz" part="$1/$2.gz.part" url sum
  for url in "${DATA_URLS[@]}"; do
    download "$url/$2.gz" "$part" || continue
    sum=$(gzip -dc "$part" 2>/dev/null | sha256sum | cut -d' ' -f1)
    if [ "$sum" = "$3" ]; then
      mv "$part" "$target"
      return 0
    fi
    echo "$url/$2.gz: SHA-256 of the content is $sum, expected $3" >&2
  done
  rm -f "$part"
  return 1
}

# Sets DATA_DIR to a folder with the four files: an earlier download, the Debian package, or a
# fresh download into data/fashion-mnist.
fetch_data() {
  local folder="$MIXTAPE_ROOT/data/fashion-mnist" i
  for DATA_DIR in "$folder" "$SYSTEM_DATA"; do
    if has_data "$DATA_DIR"; then return 0; fi
  done
  if [ "$MIXTAPE_INSTALL" -eq 1 ] && command -v apt-get >/dev/null; then
    package_available dataset-fashion-mnist || apt_refresh
    if package_available dataset-fashion-mnist; then
      install_packages dataset-fashion-mnist
      if has_data "$DATA_DIR"; then return 0; fi
    fi
  fi
  DATA_DIR=$folder
  say "Downloading Fashion-MNIST into $folder (30 MB)"
  command -v curl >/dev/null || command -v wget >/dev/null ||
    die "downloading needs curl or wget; install one, or pass --data DIR"
  mkdir -p "$folder"
  for ((i = 0; i < ${#DATA_FILES[@]}; i += 2)); do
    download_data_file "$folder" "${DATA_FILES[i]}" "${DATA_FILES[i + 1]}" ||
      die "could not download ${DATA_FILES[i]}.gz (offline?); install the package \
dataset-fashion-mnist, or put the four IDX files into a folder and pass --data DIR"
  done
}
