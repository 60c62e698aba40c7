#!/usr/bin/env python3
"""Runs the Fashion-MNIST example as a user would: fashion_mnist_test.py BINARY options|training.

`options`: --help answers; an unknown flag or a bad value ends with one line on stderr, exit code 2
and nothing on stdout. `training`: a few epochs in each precision on a small set of images that a
linear model could separate; the printed accuracy must be far above chance and the loss curve must
be on disk. A run that goes on from a checkpoint in the middle of an epoch must end as one that never
stopped, also where a newer checkpoint is damaged.
"""

import gzip
import pathlib
import random
import re
import struct
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree

PRECISIONS = ["fp32", "bf16", "fp16"]
OPTIONS = ["--epochs", "--precision", "--device", "--data", "--seed", "--out", "--resume"]
BAD_OPTIONS = [
    (["--bogus"], "--bogus"),
    (["--precision", "int8"], "int8"),
    (["--precision"], "--precision"),
    (["--epochs", "-1"], "-1"),
    (["--epochs", "three"], "three"),
    (["--device", "tpu"], "tpu"),
    (["--seed", "1.5"], "1.5"),
    (["--data", "/nonexistent/folder"], "/nonexistent/folder"),
    (["--save-every", "-1"], "-1"),
    (["leftover"], "leftover"),
]
CLASSES, SIDE = 10, 28


def run(binary, *arguments):
    return subprocess.run([binary, *arguments], capture_output=True, text=True, timeout=500,
                          stdin=subprocess.DEVNULL)


def check_options(binary):
    result = run(binary, "--help")
    if result.returncode != 0:
        yield f"--help: exit code {result.returncode}"
    yield from (f"--help: does not mention {name}" for name in OPTIONS if name not in result.stdout)
    for arguments, text in BAD_OPTIONS:
        result = run(binary, *arguments)
        lines = result.stderr.splitlines()
        if result.returncode != 2 or len(lines) != 1 or text not in lines[0] or result.stdout:
            yield (f"{' '.join(arguments)}: expected exit code 2 and one line with '{text}', got "
                   f"{result.returncode}, stderr {result.stderr!r}, stdout {result.stdout!r}")


def write_images(folder, name, count, rng):
    """Class c brightens rows 2c+4 and 2c+5 over noise."""
    images, labels = bytearray(), bytearray()
    for i in range(count):
        label = i % CLASSES
        image = bytearray(rng.randrange(64) for _ in range(SIDE * SIDE))
        for row in (2 * label + 4, 2 * label + 5):
            image[row * SIDE:(row + 1) * SIDE] = bytes(rng.randrange(160, 256)
                                                       for _ in range(SIDE))
        images += image
        labels.append(label)
    with gzip.open(folder / f"{name}-images-idx3-ubyte.gz", "wb") as file:
        file.write(struct.pack(">4I", 0x803, count, SIDE, SIDE) + images)
    with gzip.open(folder / f"{name}-labels-idx1-ubyte.gz", "wb") as file:
        file.write(struct.pack(">2I", 0x801, count) + labels)


def check_run(binary, precision, data, out):
    result = run(binary, "--data", str(data), "--out", str(out), "--precision", precision,
                 "--epochs", "4", "--device", "cpu", "--seed", "1")
    if result.returncode != 0:
        yield f"{precision}: exit code {result.returncode}: {result.stderr}"
        return
    accuracy = re.findall(r"test accuracy\D*([0-9.]+)\s*%", result.stdout, re.IGNORECASE)
    if not accuracy or float(accuracy[-1]) < 50:
        yield f"{precision}: expected a test accuracy of at least 50 %, got {accuracy}"
    if "\r" in result.stdout or "\x1b" in result.stdout:
        yield f"{precision}: a progress bar's control characters in output to a pipe"
    events = list(out.rglob("*tfevents*"))
    if not events or events[0].stat().st_size == 0:
        yield f"{precision}: no TensorBoard event file in {out}"
    plots = list(out.rglob("*.svg"))
    if not plots:
        yield f"{precision}: no plot in {out}"
    for plot in plots:
        ElementTree.parse(plot)


def check_resume(binary, data, out):
    command = [binary, "--data", str(data), "--out", str(out), "--epochs", "2", "--device", "cpu", "--deterministic",
               "--precision", "fp16", "--save-every", "7"]
    whole = run(*command)
    last = max(out.glob("checkpoint-*.safetensors"), default=None)
    if whole.returncode != 0 or last is None or not last.name.endswith("030.safetensors"):
        yield f"resume: expected a checkpoint of step 30, got {last} from {whole}"
        return
    expected, plot = last.read_bytes(), (out / "loss.svg").read_bytes()
    last.write_bytes(expected[:len(expected) // 2])
    resumed = run(*command, "--resume")
    if "Resumed       step 28" not in resumed.stdout or "passed over" not in resumed.stderr:
        yield f"resume: expected to go on from step 28 and not from the damaged step 30, got {resumed}"
    elif last.read_bytes() != expected or (out / "loss.svg").read_bytes() != plot:
        yield "resume: expected the last checkpoint and the plot of the run that was not stopped, byte for byte"
    again = run(*command, "--resume")
    accuracies = [re.findall(r"Test accuracy +([0-9.]+)", result.stdout) for result in (whole, resumed, again)]
    if again.returncode != 0 or len(accuracies[0]) != 1 or accuracies != accuracies[:1] * 3:
        yield f"resume: expected the same test accuracy three times, got {accuracies}; the last run: {again}"


def check_training(binary):
    with tempfile.TemporaryDirectory() as folder:
        data = pathlib.Path(folder, "data")
        data.mkdir()
        rng = random.Random(7)
        write_images(data, "train", 2000, rng)
        write_images(data, "t10k", 200, rng)
        for precision in PRECISIONS:
            yield from check_run(binary, precision, data, pathlib.Path(folder, precision))
        yield from check_resume(binary, data, pathlib.Path(folder, "resume"))


def main():
    binary, group = sys.argv[1:]
    checks = {"options": check_options, "training": check_training}
    failures = list(checks[group](binary))
    print("\n".join(failures) or f"{group}: as expected")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
