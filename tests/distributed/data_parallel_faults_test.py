#!/usr/bin/env python3
"""data_parallel_faults_test.py MPIEXEC DATA_PARALLEL_FAULTS: runs that go wrong on one of two ranks. Every rank must
end, with a non-zero code and within the timeout, and the output must name the rank and what it did or lacked."""
import os
import subprocess
import sys
import time

TIMEOUT = 4  # seconds
# Two ranks on any machine, also for root in a container.
ENVIRONMENT = {
    **os.environ, "MIXTAPE_TIMEOUT_S": str(TIMEOUT), "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
SLACK = 40   # a busy machine starts processes slowly
FAULTS = {
    # One rank has fewer batches and no Join: the others wait in an all-reduce for a rank that waits at its end.
    "uneven": ["the run ends: rank 1", "this rank is in world: all_reduce(avg)", "gradients of b.bias to a.weight"],
    # A parameter that only the last rank stops using, after the first pass.
    "unused": ["got no gradient for b.weight, b.bias on rank 1", "the run ends: rank 1"],
    # One rank's parameter changes by itself: found by the comparison every four passes, on both ranks.
    "drift": ["values that began equal: expected the same on all ranks", "rank 0: 'b.bias'", "rank 1: 'b.bias'"],
}


def check(mpiexec, program, fault, texts):
    start = time.monotonic()
    try:
        result = subprocess.run([mpiexec, "-n", "2", program, fault], capture_output=True, text=True,
                                timeout=TIMEOUT + SLACK, stdin=subprocess.DEVNULL, env=ENVIRONMENT)
    except subprocess.TimeoutExpired as hung:
        yield f"{fault}: expected an end within {TIMEOUT + SLACK} s, got none: {hung.stderr}"
        return
    print(f"{fault}: exit code {result.returncode} after {time.monotonic() - start:.1f} s")
    if result.returncode == 0:
        yield f"{fault}: expected a non-zero exit code, got 0"
    yield from (f"{fault}: expected '{text}', got {result.stderr}" for text in texts if text not in result.stderr)


def main():
    failures = [line for fault, texts in FAULTS.items() for line in check(*sys.argv[1:], fault, texts)]
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
