#!/usr/bin/env python3
"""Runs the examples on several ranks as a user would.

data_parallel_test.py MPIEXEC FASHION_MNIST GPT2 options|equal|resume|recovery [--kills N]

`options`: what does not fit ends with one line that says so. `equal`: two ranks train to the losses of one
process with the same batches; rank 0 alone prints and writes; MIXTAPE_CHECK_SYNC compares the ranks' parameters
on the way. `resume`: a run that goes on from its checkpoint ends with the bytes of one that never stopped.
`recovery`: the same for a run whose ranks are killed at random steps, N times, and started again each time as
docs/data_parallel.md says.
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
    def __init__(self, mpiexec, fashion_mnist, gpt2, folder):
        self.mpiexec, self.fashion_mnist = mpiexec, fashion_mnist
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


def ranks_of(launcher):
    """Process ids of the ranks below a launcher, which may have started them through a daemon of its own."""
    children = {}
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue
        parent = int(stat[stat.rindex(")") + 2:].split()[1])
        children.setdefault(parent, []).append((int(entry.name), stat[stat.index("(") + 1:stat.rindex(")")]))
    found, below = [], [launcher]
    while below:
        for pid, name in children.get(below.pop(), []):
            below.append(pid)
            if name == "gpt2":
                found.append(pid)
    return found


def start_and_kill(programs, command, out, rng):
    """Starts the job and kills a random rank after a random number of further checkpoints. True if it ended whole."""
    known = newest(out)
    job = subprocess.Popen(programs.launched(command, RANKS), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                           stdin=subprocess.DEVNULL, env=programs.environment)
    wanted = rng.randrange(1, 4)
    while wanted > 0 and job.poll() is None:
        time.sleep(0.002)
        if newest(out) != known:
            known, wanted = newest(out), wanted - 1
    time.sleep(rng.uniform(0, 0.1))
    ranks = ranks_of(job.pid)
    if ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rng.choice(ranks), signal.SIGKILL)
    return job.wait(timeout=120) == 0


def check_recovery(programs, folder, kills):
    rng = random.Random(time.time_ns() if kills > 3 else 11)
    # Steps for so many kills at up to three checkpoints each, and some to spare.
    command = [*programs.gpt2, "--dp", "--dropout", "0.1", "--steps", str(20 + 12 * kills), "--save-every", "3",
               "--eval-every", "1000"]
    undisturbed = programs.run([*command, "--out", str(folder / "whole")], RANKS)
    if undisturbed.returncode != 0:
        yield f"recovery: {undisturbed}"
        return
    out = folder / "killed"
    killed = 0
    while killed < kills:
        if start_and_kill(programs, [*command, "--out", str(out), "--resume"], out, rng):
            yield f"recovery: the run ended after {killed} kills, expected {kills}"
            return
        killed += 1
    last = programs.run([*command, "--out", str(out), "--resume"], RANKS)
    if last.returncode != 0 or "Resumed" not in last.stdout:
        yield f"recovery: {last}"
    elif newest(out).read_bytes() != newest(folder / "whole").read_bytes():
        yield f"recovery: after {killed} kills, expected the last checkpoint of the undisturbed run, byte for byte"
    print(f"killed a rank {killed} times")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("mpiexec")
    parser.add_argument("fashion_mnist")
    parser.add_argument("gpt2")
    parser.add_argument("group", choices=["options", "equal", "resume", "recovery"])
    parser.add_argument("--kills", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        programs = Programs(arguments.mpiexec, arguments.fashion_mnist, arguments.gpt2, folder)
        checks = {"options": check_options, "equal": check_equal, "resume": check_resume}
        if arguments.group == "recovery":
            failures = list(check_recovery(programs, folder, arguments.kills))
        else:
            failures = list(checks[arguments.group](programs, folder))
    print("\n".join(failures) or f"{arguments.group}: as expected")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
