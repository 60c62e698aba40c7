#!/usr/bin/env python3
"""Nothing hangs: what a run does when one of its ranks fails (CASES 80, 81, 82).

failure_test.py WAYS PROGRAM OTHER_PROGRAM MPIRUN...: WAYS is a comma-separated list of the cases
below. Each starts PROGRAM (failing_rank) under MPIRUN (with its options, without the number of
ranks) or with RANK and WORLD_SIZE, and checks that all ranks end with an error, in time, and that a
surviving rank says which rank failed, in which collective, with its number and tensor.
"""

import os
import re
import socket
import subprocess
import sys
import time

TIMEOUT = 5     # seconds, MIXTAPE_TIMEOUT_S
MARGIN = 5      # beyond it
START = 15      # a busy machine takes that long to start some processes
WHERE = r"all_reduce\(sum\) #4 of 'fc.weight' float32\(10,\)"


class Run:
    """Processes that have ended, with what they wrote."""

    def __init__(self, commands, environment, limit, kill_after_first=False):
        started = time.monotonic()
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                      text=True, env={**os.environ, **extra})
                     for command, extra in zip(commands, environment)]
        self.output, self.codes, self.hung = "", [], False
        for process in processes:
            try:
                text, _ = process.communicate(timeout=max(1, started + limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.hung = True
                process.kill()
                text, _ = process.communicate()
            if kill_after_first:
                for other in processes:
                    other.kill()
            self.output += text
            self.codes.append(process.returncode)
        self.seconds = time.monotonic() - started


def mpirun(context, ranks, way, victim, extra=None):
    command = [context["mpirun"][0], "-np", str(ranks), *context["mpirun"][1:], context["program"],
               way, str(victim)]
    environment = {"MIXTAPE_TIMEOUT_S": str(TIMEOUT), **(extra or {})}
    return Run([command], [environment], START + TIMEOUT + MARGIN)


def by_hand(context, ranks, way, victim, kill_after_first=False):
    """RANK and WORLD_SIZE, as torchrun sets them: no mpirun ends the other ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = [{"MIXTAPE_TIMEOUT_S": str(TIMEOUT), "RANK": str(r), "WORLD_SIZE": str(ranks),
                    "LOCAL_RANK": str(r), "LOCAL_WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} for r in range(ranks)]
    command = [context["program"], way, str(victim), "launch"]
    return Run([command] * ranks, environment, START + TIMEOUT + MARGIN, kill_after_first)


def expect(run, *patterns, ok=False):
    problems = []
    if run.hung:
        problems.append("it hung")
    if ok != all(code == 0 for code in run.codes) or (not ok and 0 in run.codes):
        problems.append(f"exit codes {run.codes}")
    problems += [f"no {p!r}" for p in patterns if not re.search(p, run.output)]
    if problems:
        sys.exit(f"FAILED: {', '.join(problems)} in {run.seconds:.1f} s:\n{run.output}")


def case_none(c):
    expect(mpirun(c, 3, "none", 0), "rank 2 is through", ok=True)


def case_kill(c):
    run = mpirun(c, 2, "kill", 1)
    expect(run, r"the run ends: rank 1 \(\S+, pid \d+\): its connection closed: it was killed",
           WHERE)


def case_kill_rank_0(c):
    expect(mpirun(c, 3, "kill", 0), r"rank 0, or the network to it, is gone", WHERE)


def case_throw(c):
    expect(mpirun(c, 2, "throw", 1),
           r"rank 0 .*the run ends: rank 1 .* ended by an exception: a fault of this rank alone",
           WHERE)


def case_catch(c):
    expect(mpirun(c, 2, "catch", 1), r"the run ends: rank 1 .* ended with exit code 4", WHERE)


def case_exit_rank_0(c):
    expect(mpirun(c, 2, "exit", 0), r"rank 1 .*the run ends: rank 0 .* ended with exit code 3")


def case_stop(c):
    expect(mpirun(c, 3, "stop", 2),
           rf"timeout: world: {WHERE} has not finished after \d+\.\d s: rank 2 \(\S+, pid \d+\) has "
           r"not called it: it is in no collective; its last was world: barrier #3")


def case_leave(c):
    expect(mpirun(c, 2, "leave", 1), r"rank \d", WHERE)


def case_order(c):
    expect(mpirun(c, 2, "order", 1),
           rf"{WHERE} .*rank 1 .* is out of step: its #4 is world: broadcast #4 of 'fc.weight' "
           r"float32\(10,\) with root 0")


def case_size(c):
    """MPI finds the lengths different; or, with the check, all ranks do before anything moves."""
    expect(mpirun(c, 2, "size", 1), r"all_reduce\(sum\) #4 of 'fc.weight' float32\((8|10),\)",
           r"MPI_ERR_TRUNCATE|truncated|timeout")
    expect(mpirun(c, 2, "size", 1, {"MIXTAPE_CHECK_COLLECTIVES": "1"}),
           r"ranks are out of step: this rank, \d, calls all_reduce\(sum\) float32 x (8|10), rank \d "
           r"calls all_reduce\(sum\) float32 x (8|10)")


def case_dropped(c):
    """Nobody waits for the collective that fails."""
    expect(mpirun(c, 2, "dropped", 1), r"the run ends: .*(MPI_ERR_TRUNCATE|truncated|timeout)")


def case_different_builds(c):
    """Two programs in one run; the map of ranks comes from rank 0."""
    command = [c["mpirun"][0], *c["mpirun"][1:], "-np", "1", c["program"], "none", "0", ":", "-np",
               "1", c["other"]]
    run = Run([command], [{"MIXTAPE_TIMEOUT_S": str(TIMEOUT)}], START + TIMEOUT + MARGIN)
    expect(run, r"init: expected the same build of Mixtape on all ranks", r"\n  rank 1: \S+, local "
           r"rank 1, cpu")


def case_without_mpi(c):
    """The store and the watchdog alone."""
    expect(by_hand(c, 2, "none", 0), "rank 1 is through", ok=True)
    expect(by_hand(c, 3, "kill", 2), r"rank 0 .*rank 2 .* was killed.*barrier #4")
    # Whichever thread notices first: the watchdog, or the one that waits in the barrier.
    expect(by_hand(c, 3, "kill", 0), r"rank 1 .*rank 0, or the network to it, is gone.*barrier #4|"
           r"barrier #4: store: rank 0 at \S+ port \d+ does not answer")


def case_frozen(c):
    """A process that is stopped answers nobody, and is missed; this test then ends it."""
    run = by_hand(c, 2, "freeze", 1, kill_after_first=True)
    if run.codes[0] == 0 or not re.search(r"rank 1 .*(has not (been heard|called)|did not arrive)",
                                          run.output):
        sys.exit(f"FAILED: nobody misses rank 1, codes {run.codes}:\n{run.output}")


def main():
    ways, program, other, *command = sys.argv[1:]
    context = {"program": program, "other": other, "mpirun": command}
    for way in ways.split(","):
        print(way, flush=True)
        globals()["case_" + way](context)
    print("PASSED")


if __name__ == "__main__":
    main()
