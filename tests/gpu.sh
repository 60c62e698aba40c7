#!/usr/bin/env bash
# Everything that needs a GPU, in one call: all cuda tests, compute-sanitizer on the kernel tests, the
# benchmarks, and PyTorch beside them where it is installed; a short table comes last.
#
#   tests/gpu.sh --bundle BUILD DIR   gather a build's binaries into DIR, to carry to a GPU machine
#   tests/gpu.sh DIR [part...]        run them there; parts: tests sanitize bench torch train parity (default: all but
#                                     train and parity)
#
# A build to carry: cmake -B BUILD -DBUILD_SHARED_LIBS=ON -DMIXTAPE_NATIVE=OFF -DMIXTAPE_ONEDNN=OFF
# -DMIXTAPE_MPI=OFF -DCMAKE_CUDA_ARCHITECTURES=90; the parity part needs its target parity_train. Logs go to $OUT
# (default: DIR/out). SANITIZER_TOOLS and SANITIZER_TESTS narrow the sanitize part: SANITIZER_TOOLS=racecheck
# SANITIZER_TESTS='kernels_re*'.
set -uo pipefail

if [ "${1:-}" = --bundle ]; then
  build=$2 dir=$3
  mkdir -p "$dir/tests" "$dir/bench" "$dir/lib" "$dir/examples" "$dir/parity"
  find "$build" -maxdepth 1 -name 'libmixtape.so*' -exec cp -a {} "$dir/lib/" \;
  for binary in $(find "$build/tests" -type f -perm -u+x ! -name '*.so' ! -name '*.sh' ! -path '*/CMakeFiles/*'); do
    case $(basename "$binary") in
      *bench*) cp "$binary" "$dir/bench/" ;;
      parity_train) cp "$binary" "$dir/parity/" ;;
      *) cp "$binary" "$dir/tests/" ;;
    esac
  done
  find "$build/examples" -type f -perm -u+x ! -path '*/CMakeFiles/*' -exec cp {} "$dir/examples/" \; 2>/dev/null
  find "$dir" -type f -exec strip --strip-unneeded {} \; 2>/dev/null
  du -sh "$dir"
  exit 0
fi

dir=$(cd "${1:?usage: tests/gpu.sh DIR [tests|sanitize|bench|torch ...]}" && pwd)
shift
parts=${*:-tests sanitize bench torch}
here=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-$dir/out}
mkdir -p "$out"
export MIXTAPE_ALGORITHM_CACHE=${MIXTAPE_ALGORITHM_CACHE:-$out/algorithms}
export LD_LIBRARY_PATH=$dir/lib:${LD_LIBRARY_PATH:-} MIXTAPE_TEST_DEVICE=cuda NCCL_NVLS_ENABLE=0 \
  MIXTAPE_GOLDENS=$here/goldens/data MIXTAPE_PARITY_DATA=$here/parity/data
table=$out/table.txt
: > "$table"

run_tests() {
  local passed=0 failed=0 summary
  for t in "$dir"/tests/*; do
    local name
    name=$(basename "$t")
    timeout "${TEST_TIMEOUT:-120}" "$t" --gtest_brief=1 > "$out/test_$name.log" 2>&1
    local rc=$?
    summary=$(grep -E '^\[  (PASSED|FAILED|SKIPPED)' "$out/test_$name.log" | head -3 | tr '\n' ' ')
    if [ $rc -eq 0 ]; then
      passed=$((passed + 1))
    else
      failed=$((failed + 1))
      echo "FAILED $name rc=$rc $summary" | tee -a "$table"
      grep -vE '^\[  (PASSED|FAILED|SKIPPED)|^Note:|^Running|^$' "$out/test_$name.log" | head -"${FAILURE_LINES:-12}"
    fi
  done
  echo "tests: $passed binaries passed, $failed failed" | tee -a "$table"
}

# racecheck instruments Mixtape's kernels alone: with the libraries' it takes minutes a binary. memcheck and initcheck
# need them all, the one to see operands of wrong sizes, the other to know what was written.
sanitizer_options() {
  case $1 in
    racecheck) echo "--kernel-name kernel_substring=mixtape" ;;
    initcheck) echo "--suppressions $here/sanitizer_suppressions.xml" ;;
    *) echo "--kernel-name-exclude kernel_substring=cutlass --kernel-name-exclude kernel_substring=cublas" ;;
  esac
}

# Runs binary $2 under tool $1, in parts that each end in time; fails if any part is not clean.
sanitize() {
  local tool=$1 binary=$2 name shards=1 rc bad=0 log
  name=$(basename "$binary")
  case $name in *_conv | *_matmul) shards=4 ;; esac
  for ((shard = 0; shard < shards; ++shard)); do
    log=$out/${tool}_$name.$shard.log
    # shellcheck disable=SC2046
    MIXTAPE_NO_CACHE=1 GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard \
      timeout "${SANITIZER_TIMEOUT:-120}" compute-sanitizer --tool "$tool" --error-exitcode 86 $(sanitizer_options "$tool") \
      "$binary" --gtest_brief=1 ${SANITIZER_FILTER:+--gtest_filter=$SANITIZER_FILTER} > "$log" 2>&1
    rc=$?
    if [ $rc -ne 0 ] || ! grep -q 'ERROR SUMMARY: 0 errors\|RACECHECK SUMMARY: 0 hazards' "$log"; then
      bad=1
      echo "$tool $name part $((shard + 1)) of $shards rc=$rc: $(grep -E 'SUMMARY|=========.*(Invalid|Uninitialized|uninitialized|hazard|Error)|^\[  FAILED' "$log" | sort | uniq -c | sort -rn | head -3 | tr '\n' ';')" | tee -a "$table"
    fi
  done
  return $bad
}

run_sanitizer() {
  command -v compute-sanitizer > /dev/null || { echo "sanitize: compute-sanitizer is not installed" | tee -a "$table"; return; }
  local tool t clean dirty
  for tool in ${SANITIZER_TOOLS:-memcheck racecheck initcheck}; do
    clean=0 dirty=0
    for t in "$dir"/tests/${SANITIZER_TESTS:-kernels_*}; do
      if sanitize "$tool" "$t"; then clean=$((clean + 1)); else dirty=$((dirty + 1)); fi
    done
    echo "$tool: $clean binaries clean, $dirty dirty" | tee -a "$table"
  done
}

run_benchmarks() {
  for b in "$dir"/bench/*; do
    local name
    name=$(basename "$b")
    timeout "${BENCH_TIMEOUT:-60}" "$b" ${BENCH_OPTIONS:-} > "$out/bench_$name.txt" 2>&1 || echo "$name rc=$?" >> "$table"
    echo "== $name" >> "$table"
    tail -n "${BENCH_LINES:-30}" "$out/bench_$name.txt" >> "$table"
  done
}

run_torch() {
  python3 -c 'import torch' 2> /dev/null || { echo "torch: not installed" >> "$table"; return; }
  python3 "$here/benchmarks/torch_peer.py" ${TORCH_OPTIONS:-} > "$out/torch.txt" 2>&1
  echo "== torch" >> "$table"
  tail -n 40 "$out/torch.txt" >> "$table"
}

# Whole training steps, one line of JSON each, and PyTorch's beside them where it is installed: by
# tests/benchmarks/WORKLOAD_peer.py, or by PEER_SCRIPT, which gets the workload first (torch_peer.py has the MLP's eager
# step). TRAIN_CASES: "workload options" lines.
default_cases="mlp --precision fp16 --batch 128
gpt2 --precision bf16 --batch 32
gpt2 --precision bf16 --batch 4
resnet --precision fp16 --batch 256"
run_training() {
  local line workload options mode peer
  while read -r line; do
    [ -n "$line" ] || continue
    workload=${line%% *} options=${line#* }
    for mode in ${TRAIN_MODES:-eager captured}; do
      timeout 120 "$dir/bench/${workload}_step_benchmark" $options --mode "$mode" 2>&1 | tail -3 | tee -a "$table"
    done
    peer=("$here/benchmarks/${workload}_peer.py")
    [ -z "${PEER_SCRIPT:-}" ] || peer=("$PEER_SCRIPT" "$workload")
    [ -f "${peer[0]}" ] && python3 -c 'import torch' 2> /dev/null || continue
    for mode in ${PEER_MODES:-eager compile}; do
      timeout 240 python3 "${peer[@]}" $options --mode "$mode" 2> "$out/peer.log" | tail -1 | tee -a "$table"
    done
  done <<< "${TRAIN_CASES:-$default_cases}"
}

# GPT-2 124M trained by PyTorch and by Mixtape from the same weights on the same tokens. PARITY_OPTIONS: of parity.py.
run_parity() {
  # shellcheck disable=SC2086
  timeout "${PARITY_TIMEOUT:-550}" python3 "$here/parity/parity.py" run --program "$dir/parity/parity_train" \
    --out "$out/parity" --device cuda --config 124m --mode captured ${PARITY_OPTIONS:-} 2>&1 | tail -5 | tee -a "$table"
}

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee -a "$table"
for part in $parts; do
  case $part in
    tests) run_tests ;;
    sanitize) run_sanitizer ;;
    bench) run_benchmarks ;;
    torch) run_torch ;;
    train) run_training ;;
    parity) run_parity ;;
    *) echo "unknown part $part"; exit 2 ;;
  esac
done
echo "---- table ----"
cat "$table"
