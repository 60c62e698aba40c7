#!/usr/bin/env python3
"""Runs the examples on several ranks as a user would.

data_parallel_test.py MPIEXEC FASHION_MNIST GPT2 options|equal|resume|recovery|damaged [--mixtape MIXTAPE] [--kills N]

`options`: what does not fit ends with one line that says so. `equal`: two ranks train to the losses of one
process with the same batches; rank 0 alone prints and writes; MIXTAPE_CHECK_SYNC compares the ranks' parameters
on the way. `resume`: a run that goes on from its checkpoint ends with the bytes of one that never stopped.
`recovery`: under `mixtape run`, which starts the run again each time, a random rank is killed at a random step,
N times: the losses of all steps and the last checkpoint are those of a run that nobody disturbed, to the bit.
`damaged`: the same where the newest checkpoint is damaged too: the run goes on from the one before it.
"""
import argparse
import contextlib
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

import fashion_mnist_test

SENTENCE = "the quick brown fox jumps over the lazy dog\n"
RANKS = 2
# Any number of ranks on any machine, also for root in a container; one thread for each rank.
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    "MIXTAPE_CHECK_SYNC": "3", "MIXTAPE_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TERM": "dumb",
}


class Programs:
    def __init__(self, mpiexec, fashion_mnist, gpt2, mixtape, folder):
        self.mpiexec, self.fashion_mnist, self.mixtape = mpiexec, fashion_mnist, mixtape
        self.environment = {**os.environ, **ENVIRONMENT}
        self.text = folder / "text.txt"
        self.text.write_text(SENTENCE * 400)
        self.gpt2 = [gpt2, "--text", str(self.text), "--layers", "2", "--heads", "2", "--channels", "32", "--context",
                     "24", "--batch", "8", "--accumulate", "2", "--lr", "0.005", "--device", "cpu", "--sample", "0",
                     "--precision", "fp32", "--deterministic"]

    def launched(self, command, ranks):
        return [self.mpiexec, "-n", str(ranks), *command] if ranks else command

    def run(self, command, ranks=0):
        return subprocess.run(self.launched(command, ranks), capture_output=True, text=True, timeout=200,
                              stdin=subprocess.DEVNULL, env=self.environment)


def check_options(programs, folder):
    out = ["--out", str(folder / "out")]
    for ranks, flags, text in ((2, [], "launched with 2 ranks; pass --dp"),
                               (3, ["--dp"], "expected a --batch that 3 ranks can share, got 8")):
        result = programs.run([*programs.gpt2, *out, *flags], ranks)
        if result.returncode == 0 or text not in result.stderr or "Tokens/s" in result.stdout:
            yield f"expected an error with '{text}', got {result}"


def numbers(pattern, text):
    return [float(n) for n in re.findall(pattern, text)]


def near(got, expected, tolerance):
    return len(got) == len(expected) > 0 and all(abs(a - b) <= tolerance for a, b in zip(got, expected))


def check_equal(programs, folder):
    fashion_mnist_test.write_images(folder, "train", 600, random.Random(7))
    fashion_mnist_test.write_images(folder, "t10k", 101, random.Random(8))
    common = [programs.fashion_mnist, "--data", str(folder), "--device", "cpu", "--precision", "fp32", "--batch", "60",
              "--epochs", "2"]
    results = {}
    for ranks in (0, RANKS):
        out = folder / f"fashion-{ranks}"
        results[ranks] = programs.run([*common, "--out", str(out), *(["--dp"] if ranks else [])], ranks)
        result = results[ranks]
        if result.returncode != 0 or result.stdout.count("Fashion-MNIST:") != 1 or len(list(out.glob("*tfevents*"))) != 1:
            yield f"fashion_mnist on {ranks or 1}: expected one rank's output, got {result}"
            return
    # Losses are printed with four decimals, accuracies in percent.
    for what, pattern, tolerance in (("loss", r"\bloss (\d[0-9.]*)  acc.*\d:\d\d\n", 1e-3),
                                     ("test accuracy", r"Test accuracy +([0-9.]+)", 1.0)):
        expected, got = (numbers(pattern, results[ranks].stdout) for ranks in (0, RANKS))
        if not near(got[-2:], expected[-2:], tolerance):
            yield f"fashion_mnist: {what}: expected {expected}, got {got} from {results[RANKS].stdout}"
    if "Efficiency" not in results[RANKS].stdout or "Bus bandwidth" not in results[RANKS].stdout:
        yield f"fashion_mnist: no summary of communication in {results[RANKS].stdout}"

    losses = {}
    for ranks in (0, RANKS):
        result = programs.run([*programs.gpt2, "--steps", "20", "--eval-every", "10", "--out", str(folder / f"gpt2-{ranks}"),
                               *(["--dp"] if ranks else [])], ranks)
        losses[ranks] = numbers(r"validation loss ([0-9.]+)", result.stdout)
        if result.returncode != 0 or result.stdout.count("gpt2:") != 1:
            yield f"gpt2 on {ranks or 1}: expected one rank's output, got {result}"
    if not near(losses[RANKS], losses[0], 1e-3) or len(losses[0]) != 2:
        yield f"gpt2: expected the validation losses {losses[0]}, got {losses[RANKS]}"


def newest(folder):
    return max(folder.glob("checkpoint-*.safetensors"), default=None)


def check_resume(programs, folder):
    out = folder / "out"
    command = [*programs.gpt2, "--dp", "--dropout", "0.1", "--steps", "12", "--save-every", "6", "--out", str(out)]
    whole = programs.run(command, RANKS)
    if whole.returncode != 0 or newest(out) is None:
        yield f"resume: {whole}"
        return
    expected = newest(out).read_bytes()
    newest(out).unlink()  # as if it had been stopped after step 6
    resumed = programs.run([*command, "--resume"], RANKS)
    if resumed.returncode != 0 or "Resumed       step 6" not in resumed.stdout:
        yield f"resume: {resumed}"
    elif newest(out).read_bytes() != expected:
        yield "resume: expected the last checkpoint of the run that was not stopped, byte for byte"


def losses(out):
    """The loss of each step as the run's event files have it, float32 bits, from its last attempt that got there."""
    found = {}
    for path in sorted(out.glob("*tfevents*"), key=lambda path: path.stat().st_mtime_ns):
        content, at = path.read_bytes(), 0
        while at + 16 <= len(content):  # a killed writer may leave a part of a record
            length = int.from_bytes(content[at:at + 8], "little")
            event, at = content[at + 12:at + 12 + length], at + 16 + length
            value = re.search(rb"\x0a\x0aloss/train\x15(.{4})", event, re.DOTALL)
            if value and at <= len(content):
                found[step_of(event)] = value[1]
    return found


def step_of(event):
    """Event { double wall_time = 1; int64 step = 2; ... } of TensorFlow's event.proto."""
    assert event[0] == 0x09 and event[9] == 0x10, event
    step = shift = 0
    for byte in event[10:]:
        step |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return step
    raise ValueError(event)


def rank_below(ancestor, rank):
    """The process that is this rank of a run which `ancestor` started; None if there is none."""
    parents, found = {}, []
    for entry in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                stat = (entry / "stat").read_text()
                parents[int(entry.name)] = int(stat[stat.rindex(")") + 2:].split()[1])
                if stat[stat.index("(") + 1:stat.rindex(")")] == "gpt2":
                    found.append(int(entry.name))
    for pid in found:
        above = pid
        while above not in (0, ancestor):
            above = parents.get(above, 0)
        with contextlib.suppress(OSError):
            variables = pathlib.Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
            if above == ancestor and (f"OMPI_COMM_WORLD_RANK={rank}".encode() in variables or
                                      f"PMI_RANK={rank}".encode() in variables):
                return pid
    return None


class Disturbed:
    """A run under `mixtape run`, of which ranks are killed when it has taken some more steps."""

    def __init__(self, programs, command, out, restarts):
        self.out, self.log = out, out.with_suffix(".log")
        with self.log.open("w") as log:
            self.job = subprocess.Popen(
                [programs.mixtape, "run", "-n", str(RANKS), "--mpirun", programs.mpiexec, "--max-restarts", str(restarts),
                 "--backoff", "0", "--checkpoints", str(out), "--give-up", "3", "--", *command, "--out", str(out), "--resume"],
                stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=programs.environment)

    def text(self):
        return self.log.read_text()

    def wait_for(self, condition):
        """False if the run ends first."""
        while not condition():
            if self.job.poll() is not None:
                return False
            time.sleep(0.002)
        return True

    def kill(self, rank, checkpoints, delay, between=None):
        """Kills the rank that many checkpoints from now and a little later, and waits for the restart. `between` is
        called when no rank is left and none has been started. False if the run ends first, or has no such rank."""
        known = newest(self.out)
        for _ in range(checkpoints):
            if not self.wait_for(lambda: newest(self.out) != known):
                return False
            known = newest(self.out)
        time.sleep(delay)
        restarts = self.text().count("; restarts in")
        pid = rank_below(self.job.pid, rank)
        if pid is None:
            return False
        if between:
            self.job.send_signal(signal.SIGSTOP)  # its ranks and mpirun are in groups of their own
        os.kill(pid, signal.SIGKILL)
        if between:
            self.wait_for(lambda: all(rank_below(self.job.pid, r) is None for r in range(RANKS)))
            between()
            self.job.send_signal(signal.SIGCONT)
        return self.wait_for(lambda: self.text().count("; restarts in") > restarts)

    def end(self):
        self.job.wait(timeout=120)
        return self.job.returncode


def compare_runs(name, run, expected, whole):
    """What a disturbed run has to share with the one in `whole`: every loss and the last checkpoint, to the bit."""
    found = losses(run.out)
    differing = [step for step in sorted(expected) if found.get(step) != expected[step]]
    if differing or len(found) != len(expected):
        yield f"{name}: expected the losses of the undisturbed run, got others at steps {differing}"
    if newest(run.out).read_bytes() != newest(whole).read_bytes():
        yield f"{name}: expected the last checkpoint of the undisturbed run, byte for byte"


def run_and_kill(programs, folder, name, kills, steps, kill):
    """An undisturbed run and one with kills, compared; kill(run, i) does the i-th. Returns failures and the run."""
    command = [*programs.gpt2, "--dp", "--dropout", "0.1", "--steps", str(steps), "--save-every", "1", "--eval-every", "1"]
    whole = folder / "whole"
    undisturbed = programs.run([*command, "--out", str(whole)], RANKS)
    expected = losses(whole)
    if undisturbed.returncode != 0 or sorted(expected) != list(range(1, steps + 1)):
        return [f"{name}: expected {steps} losses, got {sorted(expected)} from {undisturbed}"], None
    run = Disturbed(programs, command, folder / "killed", kills + 5)
    for i in range(kills):
        if not kill(run, i):
            run.job.terminate()
            return [f"{name}: the run ended or had no such rank at kill {i + 1} of {kills}: {run.text()}"], run
    if run.end() != 0 or run.text().count("Resumed ") != kills:
        return [f"{name}: expected success after {kills} restarts, got {run.job.returncode}: {run.text()}"], run
    return list(compare_runs(name, run, expected, whole)), run


def check_recovery(programs, folder, kills):
    rng = random.Random(11)
    # Steps for so many kills, each up to three checkpoints after the last, and some to spare.
    failures, _ = run_and_kill(programs, folder, "recovery", kills, 20 + 5 * kills, lambda run, _: run.kill(
        rng.randrange(RANKS), rng.randrange(1, 4), rng.uniform(0, 0.05)))
    print(f"killed a rank {kills} times")
    yield from failures


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def change_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 1
    path.write_bytes(content)


def check_damaged(programs, folder, _):
    ways = [truncate, change_a_bit, lambda path: os.truncate(path, 0)]
    # Two checkpoints are kept, so that the second one of an attempt has one before it.
    failures, run = run_and_kill(programs, folder, "damaged", len(ways), 60, lambda run, i: run.kill(
        i % RANKS, 2, 0, lambda: ways[i](newest(run.out))))
    if run and not failures and run.text().count("passed over") != len(ways):
        yield f"damaged: expected {len(ways)} checkpoints to be passed over, got {run.text()}"
    yield from failures


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("mpiexec")
    parser.add_argument("fashion_mnist")
    parser.add_argument("gpt2")
    parser.add_argument("group", choices=["options", "equal", "resume", "recovery", "damaged"])
    parser.add_argument("--mixtape", help="for recovery and damaged")
    parser.add_argument("--kills", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        programs = Programs(arguments.mpiexec, arguments.fashion_mnist, arguments.gpt2, arguments.mixtape, folder)
        checks = {"options": check_options, "equal": check_equal, "resume": check_resume}
        if arguments.group in checks:
            failures = list(checks[arguments.group](programs, folder))
        else:
            check = check_recovery if arguments.group == "recovery" else check_damaged
            failures = list(check(programs, folder, arguments.kills))
    print("\n".join(failures) or f"{arguments.group}: as expected")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
