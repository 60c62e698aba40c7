#!/usr/bin/env bash
# Two network namespaces as two hosts: two_hosts_test.sh FAILING_RANK.
#
# Rank 0 and rank 1 start with RANK and WORLD_SIZE and know each other's address alone. They take part
# in a run, and then lose the link between them: both must end within the timeout, with a message that
# names the other. Skipped, with the reason, where the system forbids namespaces.
set -euo pipefail

program=$1
timeout_s=5 margin_s=10
tag=mt$$
work=$(mktemp -d)

skip() {
  echo "SKIPPED: $1"
  exit 0
}
cleanup() {
  ip netns pids "$tag-a" 2>/dev/null | xargs -r kill -9 2>/dev/null || true
  ip netns pids "$tag-b" 2>/dev/null | xargs -r kill -9 2>/dev/null || true
  ip netns del "$tag-a" 2>/dev/null || true
  ip netns del "$tag-b" 2>/dev/null || true
  rm -rf "$work"
}
trap cleanup EXIT

command -v ip >/dev/null || skip "needs ip (Debian: iproute2)"
reason=$({ ip netns add "$tag-a" && ip netns add "$tag-b"; } 2>&1) ||
  skip "network namespaces are not permitted: $reason"
reason=$(ip link add "$tag-0" netns "$tag-a" type veth peer name "$tag-1" netns "$tag-b" 2>&1) ||
  skip "a pair of virtual interfaces is not permitted: $reason"
ip -n "$tag-a" address add 10.213.7.1/24 dev "$tag-0"
ip -n "$tag-b" address add 10.213.7.2/24 dev "$tag-1"
for host in a b; do ip -n "$tag-$host" link set lo up; done
ip -n "$tag-a" link set "$tag-0" up
ip -n "$tag-b" link set "$tag-1" up

start() { # namespace, rank, way
  ip netns exec "$tag-$1" env RANK="$2" WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 \
    MASTER_ADDR=10.213.7.1 MASTER_PORT=29555 MIXTAPE_TIMEOUT_S=$timeout_s \
    "$program" "$3" 0 launch >"$work/$3.$2" 2>&1 &
}
fail() {
  echo "FAILED: $1"
  tail -n +1 "$work"/*
  exit 1
}
# Sets `code` to the exit code of a process, which must end by then.
wait_for() { # pid, seconds
  local waited=0
  while kill -0 "$1" 2>/dev/null; do
    [ $waited -lt $((10 * $2)) ] || fail "a rank still runs after $2 s"
    sleep 0.1
    waited=$((waited + 1))
  done
  code=0
  wait "$1" || code=$?
}

# A run that goes well.
start b 1 none; second=$!
start a 0 none; first=$!
for rank in $first $second; do
  wait_for "$rank" 30
  [ "$code" = 0 ] || fail "the run over two hosts: exit code $code"
done
grep -q "rank 1 is through" "$work/none.1" || fail "rank 1 did not get through"

# The link is cut in the middle of a run.
start a 0 work; first=$!
start b 1 work; second=$!
for _ in $(seq 300); do
  if grep -q "at work" "$work/work.0" && grep -q "at work" "$work/work.1"; then break; fi
  sleep 0.1
done
grep -q "at work" "$work/work.1" || fail "the ranks did not begin"
ip -n "$tag-a" link set "$tag-0" down
for rank in $first $second; do
  wait_for "$rank" $((timeout_s + margin_s))
  [ "$code" != 0 ] || fail "a rank that lost the other ended without an error"
done
grep -Eq "the run ends: .*rank 1 \(.*(has not been heard of|has not called it)" "$work/work.0" ||
  fail "rank 0 does not name rank 1"
grep -Eq "the run ends: rank 0, or the network to it, is gone|the run ends: timeout" "$work/work.1" ||
  fail "rank 1 does not name rank 0"
cat "$work/work.0" "$work/work.1"
echo "PASSED"
