#!/usr/bin/env bash
# The set-up scripts without a network and without installing: package detection, the data's
# checksum and fall-backs, and the options' errors. apt-get, apt-cache, dpkg-query and curl are
# shell functions here, so that nothing outside of a temporary folder changes.
set -uo pipefail
. "$1/tools/setup.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0

# expect NAME WANTED-STATUS WANTED-TEXT COMMAND...: runs COMMAND in a subshell.
expect() {
  local name=$1 status=$2 text=$3 got output
  shift 3
  output=$("$@" 2>&1)
  got=$?
  if [ "$got" -ne "$status" ] || [[ "$output" != *"$text"* ]]; then
    printf 'FAILED %s: exit %s (expected %s), output without "%s":\n%s\n' \
      "$name" "$got" "$status" "$text" "$output"
    failures=$((failures + 1))
  fi
}

# A machine where only `present` is installed and apt knows only what `lists` holds.
present=" cmake " lists=" ninja-build "
dpkg-query() { [[ "$present" == *" ${*: -1} "* ]] && printf installed; }
apt-cache() {
  if [[ "$lists" == *" $2 "* ]]; then echo "  Candidate: 1.0"; else echo "  Candidate: (none)"; fi
}
apt-get() { [ "$1" != update ] || echo refreshed; }
as_root() {
  echo "root: $*"
  [ "$2" != update ] || echo refreshed
}

[ -z "$(install_packages cmake)" ] || { echo "FAILED nothing missing is silent"; failures=1; }
expect "missing packages are named" 0 "Installing: ninja-build" install_packages cmake ninja-build
expect "an unknown package refreshes the lists" 0 "refreshed" install_packages zlib1g-dev
MIXTAPE_INSTALL=0
expect "--no-install names and skips" 0 "Not installed (--no-install): ninja-build" \
  install_packages ninja-build
[[ "$(install_packages ninja-build)" != *root:* ]] || { echo "FAILED --no-install"; failures=1; }

# Data: two mirrors; `served` is the folder of the second, the first has nothing.
MIXTAPE_ROOT=$work SYSTEM_DATA=$work/none
DATA_URLS=(http://first.invalid http://second.invalid)
served=$work/served
mkdir -p "$served"
DATA_FILES=()
for name in a-idx3-ubyte b-idx1-ubyte; do
  echo "content of $name" | gzip >"$served/$name.gz"
  DATA_FILES+=("$name" "$(gzip -dc "$served/$name.gz" | sha256sum | cut -d' ' -f1)")
done
curl() {
  local target url
  while [ $# -gt 1 ]; do [ "$1" = -o ] && target=$2; shift; done
  url=$1
  case $url in http://second.invalid/*) cp "$served/${url##*/}" "$target" ;; *) return 6 ;; esac
}
fetch_and_list() { fetch_data && echo "in $DATA_DIR:" "$DATA_DIR"/*; }
expect "a download goes to data/" 0 "in $work/data/fashion-mnist:" fetch_and_list
expect "a second run finds it" 0 "b-idx1-ubyte.gz" fetch_and_list
rm -r "$work/data"
echo tampered | gzip >"$served/b-idx1-ubyte.gz"
expect "a wrong checksum is said" 1 "SHA-256 of the content is" fetch_data
expect "and nothing is left" 1 "" test -e "$work/data/fashion-mnist/b-idx1-ubyte.gz"
curl() { return 6; }
expect "offline names the ways out" 1 "pass --data DIR" fetch_data
SYSTEM_DATA=$served
expect "the system's copy is used" 0 "in $served:" fetch_and_list

# Options of the scripts themselves; none of these gets as far as building.
unset -f curl dpkg-query apt-cache apt-get as_root
expect "quickstart preset" 2 "expected cpu or cuda" "$1/quickstart.sh" --preset tpu
expect "quickstart value" 2 "--data needs a value" "$1/quickstart.sh" --data
expect "quickstart folder" 1 "not all there" "$1/quickstart.sh" --no-install --data "$work/none"
expect "quickstart help" 0 "usage: ./quickstart.sh" "$1/quickstart.sh" --help
expect "test preset" 2 "expected cpu, cuda, ci, asan or tsan" "$1/test.sh" --preset gpu
expect "test help" 0 "usage: ./test.sh" "$1/test.sh" --help

[ "$failures" -eq 0 ] && echo "all set-up checks passed"
exit "$((failures > 0))"
