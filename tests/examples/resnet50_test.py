#!/usr/bin/env python3
"""Runs the ResNet example as a user would: resnet50_test.py BINARY options|training.

`options`: --help answers; an unknown flag or a bad value ends with one line on stderr and exit code 2; a
damaged image ends with a line that names its file. `training`: ResNet-18 learns to tell made-up images
apart in two precisions and layouts, and a folder of PNG files of two colours; a run that was stopped goes
on from its checkpoint.
"""
import pathlib
import random
import re
import struct
import subprocess
import sys
import tempfile
import zlib

OPTIONS = ["--model", "--data", "--synthetic", "--batch", "--epochs", "--steps", "--precision", "--device",
           "--channels-last", "--seed", "--out", "--resume"]
BAD_OPTIONS = [(["--bogus"], "--bogus"), ([], "--data and --synthetic"), (["--data", "/nonexistent"], "/nonexistent"),
               (["--synthetic", "--model", "resnet19"], "resnet19"), (["--synthetic", "--batch", "0"], "0"),
               (["--synthetic", "--precision", "int8"], "int8"), (["--synthetic", "--steps", "many"], "many"),
               (["--synthetic", "--device", "tpu"], "tpu"), (["--synthetic", "leftover"], "leftover")]
SMALL = ["--model", "resnet18", "--device", "cpu", "--workers", "1", "--seed", "3"]


def run(binary, *arguments):
    return subprocess.run([binary, *arguments], capture_output=True, text=True, timeout=500,
                          stdin=subprocess.DEVNULL)


def png(width, height, pixel):
    """An RGB PNG file; pixel(row, column) gives three numbers."""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    rows = b"".join(b"\0" + bytes(v for x in range(width) for v in pixel(y, x)) for y in range(height))
    header = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


def write_images(folder, count, rng):
    """Reddish and bluish noise."""
    for label, name in enumerate(("red", "blue")):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            def pixel(_row, _column):
                bright, dark = rng.randrange(128, 256), rng.randrange(96)
                return (dark, dark, bright) if label else (bright, dark, dark)
            (folder / name / f"{i}.png").write_bytes(png(24 + i, 20, pixel))


def check_options(binary, folder):
    result = run(binary, "--help")
    if result.returncode != 0:
        yield f"--help: exit code {result.returncode}"
    yield from (f"--help: does not mention {name}" for name in OPTIONS if name not in result.stdout)
    for arguments, text in BAD_OPTIONS:
        result = run(binary, *arguments)
        lines = result.stderr.splitlines()
        if result.returncode != 2 or len(lines) != 1 or text not in lines[0] or result.stdout:
            yield f"{arguments}: expected exit code 2 and one line with '{text}', got {result}"
    data = folder / "damaged"
    write_images(data, 2, random.Random(1))
    victim = data / "blue" / "1.png"
    victim.write_bytes(victim.read_bytes()[:200])
    for content, text in ((victim.read_bytes(), str(victim)), (b"not an image", "JPEG or PNG")):
        victim.write_bytes(content)
        result = run(binary, "--data", str(data), "--size", "16", "--batch", "2", "--epochs", "2", *SMALL,
                     "--out", str(folder / "out"))
        if result.returncode != 1 or text not in result.stderr or len(result.stderr.splitlines()) != 1:
            yield f"a damaged image: expected exit code 1 and one line with '{text}', got {result}"


def check_resume(command, out):
    """A run that goes on in the middle of an epoch, after its newest checkpoint was damaged, ends as the whole one."""
    whole = run(*command, "--out", str(out))
    last = max(out.glob("checkpoint-*.safetensors"), default=None)
    if whole.returncode != 0 or last is None or not last.name.endswith("010.safetensors"):
        yield f"resume: expected a checkpoint of step 10, got {last} from {whole}"
        return
    expected = last.read_bytes()
    last.write_bytes(expected[:len(expected) // 2])
    resumed = run(*command, "--out", str(out), "--resume")
    if "Resumed       step 9" not in resumed.stdout or "passed over" not in resumed.stderr:
        yield f"resume: expected to go on from step 9 and not from the damaged step 10, got {resumed}"
    elif last.read_bytes() != expected:
        yield "resume: expected the last checkpoint of the run that was not stopped, byte for byte"


def check_training(binary, folder):
    synthetic = ["--synthetic", "--size", "32", "--classes", "2", "--batch", "20", "--epochs", "2", "--lr", "0.02"]
    for precision, layout in (("fp32", "--no-channels-last"), ("fp16", "--channels-last")):
        out = folder / precision
        result = run(binary, *synthetic, *SMALL, "--precision", precision, layout, "--out", str(out))
        epochs = re.findall(r"epoch \d+  loss ([0-9.]+)  top-1 accuracy ([0-9.]+) %", result.stdout)
        # Guessing gives log 2 = 0.69 and 50 %.
        if result.returncode != 0 or len(epochs) != 2 or not float(epochs[-1][0]) < 0.3 or float(epochs[-1][1]) < 90:
            yield f"{precision}: expected a loss below 0.3 and 90 % of the last epoch, got {epochs}: {result}"
        if "\r" in result.stdout or "\x1b" in result.stdout:
            yield f"{precision}: control characters of a live bar in output to a pipe"
        if not list(out.rglob("*tfevents*")):
            yield f"{precision}: no TensorBoard event file in {out}"
    yield from check_resume([binary, *synthetic, *SMALL, "--deterministic", "--save-every", "3"], folder / "resume")
    write_images(folder / "train", 20, random.Random(7))
    write_images(folder / "validation", 4, random.Random(8))
    result = run(binary, "--data", str(folder / "train"), "--validation", str(folder / "validation"), "--size", "32",
                 "--batch", "4", "--epochs", "5", "--lr", "0.005", *SMALL, "--out", str(folder / "out"))
    accuracy = re.findall(r"Validation +top-1 accuracy ([0-9.]+) %", result.stdout)
    if result.returncode != 0 or not accuracy or float(accuracy[0]) < 90:
        yield f"image folder: expected a validation accuracy of at least 90 %, got {accuracy}: {result}"


def main():
    binary, group = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        check = {"options": check_options, "training": check_training}[group]
        failures = list(check(binary, pathlib.Path(folder)))
    print("\n".join(failures) or f"{group}: as expected")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
