#!/usr/bin/env python3
"""Runs the GPT-2 example as a user would: gpt2_test.py BINARY options|training|profile.

`options`: bad options end with one line on stderr and exit code 2. `training`: small models, GPT-2 in each
precision and the Llama-style one, learn a text of one repeated sentence until their samples repeat words of
it; weights that are exported are where a run with --init starts; a run that is stopped half way and resumed
ends with the loss of one that was not. `profile`: the trace is strict JSON and names ops.
"""
import json
import pathlib
import re
import subprocess
import sys
import tempfile

SENTENCE = "the quick brown fox jumps over the lazy dog\n"
COMMON = ["--heads", "2", "--context", "48", "--batch", "8", "--device", "cpu"]
SIZES = ["--layers", "2", "--channels", "64"]
MODEL = [*COMMON, *SIZES, "--lr", "0.005"]
RUNS = [("gpt2", "fp32", []), ("gpt2", "bf16", []), ("gpt2", "fp16", []),
        ("llama", "bf16", ["--kv-heads", "1", "--recompute"])]


def run(binary, *arguments):
    return subprocess.run([binary, *arguments], capture_output=True, text=True, timeout=500,
                          stdin=subprocess.DEVNULL)


def check_options(binary, folder):
    given = ["--text", __file__]
    for arguments, text in ((["--bogus"], "--bogus"), ([], "--text and --tokens"), (["--text", "/nonexistent"], "/nonexistent"),
                            ([*given, "--precision", "int8"], "int8"), ([*given, "--steps", "0"], "0"),
                            ([*given, "--model", "bert"], "bert"), ([*given, "--kv-heads", "2"], "--kv-heads"),
                            ([*given, "--model", "llama", "--dropout", "0.1"], "--dropout"),
                            ([*given, "--init", __file__], "--heads"), ([*given, "--init", "/nonexistent"], "/nonexistent"),
                            ([*given, "--init", __file__, "--heads", "2", "--layers", "2"], "--layers"),
                            ([*given, "--export", "/nonexistent/w.safetensors"], "/nonexistent")):
        result = run(binary, *arguments)
        lines = result.stderr.splitlines()
        if result.returncode != 2 or len(lines) != 1 or text not in lines[0] or result.stdout:
            yield f"{arguments}: expected exit code 2 and one line with '{text}', got {result}"
    result = run(binary, "--text", __file__, "--context", "1000000", "--out", str(folder))
    if result.returncode != 1 or len(result.stderr.splitlines()) != 1:
        yield f"a text shorter than the context: expected exit code 1 and one line, got {result}"


def damage(path):
    """Changes one bit of the file's last quarter, which holds values."""
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 1
    path.write_bytes(content)


def last_loss(out, steps):
    found = re.findall(rf"step {steps}  validation loss ([0-9.]+)", out)
    return float(found[-1]) if found else None


def reject(text):
    raise ValueError(f"{text} is not JSON")


def check_profile(binary, folder):
    text = folder / "text.txt"
    text.write_text(SENTENCE * 400)
    result = run(binary, "--text", str(text), *MODEL, "--steps", "12", "--sample", "0", "--out", str(folder / "out"),
                 "--profile", str(folder / "profile"))
    for expected in ("self_attention (backward)", "matrix products", "Where 3 steps"):
        if expected not in result.stdout:
            yield f"profile: expected '{expected}' in the output, got {result}"
    trace = json.loads((folder / "profile" / "trace.json").read_bytes().decode("utf-8"), parse_constant=reject)
    names = {(event["name"], event.get("args", {}).get("direction")) for event in trace["traceEvents"]}
    for expected in (("self_attention", "forward"), ("self_attention", "backward"), ("adamw", None)):
        if expected not in names:
            yield f"profile: expected {expected} in the trace"


def check_run(binary, folder, text, model, precision, more):
    """Trains, samples, exports; then starts from what was exported, with a rate too small to move it far."""
    name, out = f"{model} {precision}", folder / f"{model}-{precision}"
    weights = folder / f"{model}-{precision}.safetensors"
    start = [binary, "--text", str(text), "--model", model, "--precision", precision, "--out"]
    result = run(*start, str(out), *MODEL, *more, "--steps", "120", "--accumulate", "2", "--prompt", "the quick ",
                 "--sample", "80", "--temperature", "0.1", "--export", str(weights))
    if result.returncode != 0:
        yield f"{name}: {result}"
        return
    loss = last_loss(result.stdout, 120)
    if loss is None or not loss < 0.2:
        yield f"{name}: expected a validation loss below 0.2, got {loss}"
    if "brown fox" not in result.stdout.split("Sample")[-1]:
        yield f"{name}: expected the sample to go on with 'brown fox', got {result.stdout[-200:]!r}"
    if not list(out.glob("checkpoint-*.safetensors")):
        yield f"{name}: no checkpoint in {out}"
    again = run(*start, str(out) + "-init", *COMMON, "--init", str(weights), "--steps", "1", "--lr", "1e-9", "--sample", "0")
    found = last_loss(again.stdout, 1)
    if found is None or abs(found - loss) > 1e-3 * loss:
        yield f"{name}: expected --init to start from the exported weights' loss {loss}, got {found}: {again.stderr}"


def check_training(binary, folder):
    text = folder / "text.txt"
    text.write_text(SENTENCE * 400)
    for model, precision, more in RUNS:
        yield from check_run(binary, folder, text, model, precision, more)
    common = [binary, "--text", str(text), *MODEL, "--precision", "bf16", "--dropout", "0.1", "--sample", "0",
              "--eval-every", "20", "--save-every", "20"]
    whole = run(*common, "--steps", "40", "--out", str(folder / "whole"))
    for path in (folder / "whole").glob("checkpoint-*40.safetensors"):
        damage(path)
    resumed = run(*common, "--steps", "40", "--out", str(folder / "whole"), "--resume")
    if "Resumed       step 20" not in resumed.stdout or "passed over" not in resumed.stderr:
        yield f"resume: {resumed}"
    if last_loss(whole.stdout, 40) is None or last_loss(whole.stdout, 40) != last_loss(resumed.stdout, 40):
        yield f"resume: expected the loss {last_loss(whole.stdout, 40)}, got {last_loss(resumed.stdout, 40)}"
    for path in (folder / "whole").glob("checkpoint-*.safetensors"):
        damage(path)
    none = run(*common, "--steps", "40", "--out", str(folder / "whole"), "--resume")
    if none.returncode != 1 or "expected a whole checkpoint" not in none.stderr:
        yield f"resume: expected an error where every checkpoint is damaged, got {none}"


def main():
    binary, group = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        check = {"options": check_options, "training": check_training, "profile": check_profile}[group]
        failures = list(check(binary, pathlib.Path(folder)))
    for failure in failures:
        print(failure)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
