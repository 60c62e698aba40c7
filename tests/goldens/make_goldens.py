#!/usr/bin/env python3
"""Values and gradients of every op as PyTorch computes them, for golden_test.cpp to replay.

    python3 tests/goldens/make_goldens.py --device cuda --out tests/goldens/data

Each op of ops/ops.def has one file OP.golden. Its cases are run in float32, and under
torch.autocast in float16 and bfloat16: once from float32 inputs (amp_f16, amp_bf16), once with the
inputs that stand for activations already in 16 bits (amp_f16_low, amp_bf16_low). The files in the
repository come from CUDA, whose autocast policy is the one to compare with; a run on the CPU writes
'device cpu' and serves to develop this script. Needs torch and numpy only.

Format: a text header, then raw little-endian data. Lines of the header, words separated by spaces:

    mixtape-golden 1
    op NAME
    torch VERSION
    device cuda NAME OF THE GPU
    case NAME                           the lines below it, up to the next case, belong to it
    attr NAME VALUE...                  arguments of the op; `length`: additions behind one element;
                                        `low`: inputs that are 16-bit in *_low; `orderI`: input I lies
                                        in memory with its dimensions in this order
    array NAME DTYPE RANK SIZE... AT    inI (inputs), dyI (gradient of output I, exact in every
                                        dtype), RUN.outI, RUN.gradI; AT: byte offset in the data
    data                                last line; equal arrays share their bytes

To add an op: a function in golden_cases.py, named as in ops.def, that returns its cases, and its run
function in golden_runs.cpp. Options go into `attrs`, from which both sides read them.
"""
import argparse
import pathlib
import re
import sys
import traceback
import zlib

import numpy as np
import torch

from golden_cases import OPS

MAX_FILE_BYTES = 64 * 1024
RUNS = ("f32", "amp_f16", "amp_bf16", "amp_f16_low", "amp_bf16_low")
DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float64: "f64",
          torch.int64: "i64", torch.bool: "b8"}


def low_dtype(run):
    return torch.float16 if "_f16" in run else torch.bfloat16


def inputs_of(case, run, device):
    tensors = []
    for i, array in enumerate(case.inputs):
        t = torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape)).to(device)
        if run.endswith("_low") and i in case.low:
            t = t.to(low_dtype(run))
        if i in case.orders:
            order = case.orders[i]
            t = t.permute(order).contiguous().permute([order.index(d) for d in range(len(order))])
        if t.is_floating_point():
            t = t.detach().requires_grad_()
        tensors.append(t)
    return tensors


def cotangent(rng, shape):
    """Multiples of 1/16 between 1/2 and 1 in size: exact in every dtype."""
    k = rng.integers(8, 17, shape) * rng.choice([-1, 1], shape)
    return np.asarray(k / 16, np.float32)


def outputs_and_gradients(case, run, device, cotangents):
    inputs = inputs_of(case, run, device)
    with torch.autocast(device, dtype=low_dtype(run), enabled=run != "f32"):
        out = case.run(*inputs)
    out = out if isinstance(out, tuple) else (out,)
    floating = [y for y in out if y.is_floating_point()]
    if not cotangents:
        rng = np.random.default_rng(zlib.crc32(case.name.encode()))
        cotangents += [cotangent(rng, tuple(y.shape)) for y in floating]
    leaves = [t for t in inputs if t.requires_grad]
    gradients = [None] * len(inputs)
    if floating and leaves:
        dys = [torch.from_numpy(c).to(device, y.dtype) for c, y in zip(cotangents, floating, strict=True)]
        found = torch.autograd.grad(floating, leaves, dys)
        for leaf, g in zip(leaves, found, strict=True):
            assert g.shape == leaf.shape and g.dtype == leaf.dtype
            gradients[next(i for i, t in enumerate(inputs) if t is leaf)] = g
    return [y.detach() for y in out], gradients


def kept_elements(case, run, device, cotangents):
    """Of dropout: value and gradient of every element, from a draw that kept it."""
    (y,), (dx,) = outputs_and_gradients(case, run, device, cotangents)
    for _ in range(1000):
        missing = y == 0
        if not missing.any():
            return [y], [dx]
        (more,), (dmore,) = outputs_and_gradients(case, run, device, cotangents)
        y, dx = torch.where(missing, more, y), torch.where(missing, dmore, dx)
    raise RuntimeError("an element was never kept")


class Writer:
    def __init__(self, op, device):
        name = "cpu" if device == "cpu" else f"cuda {torch.cuda.get_device_name()}"
        self.lines = ["mixtape-golden 1", f"op {op}", f"torch {torch.__version__}", f"device {name}"]
        self.data, self.places = bytearray(), {}

    def array(self, name, tensor):
        t = tensor.detach().cpu().contiguous()
        bits = t.view(torch.int16) if t.dtype in (torch.float16, torch.bfloat16) else t
        raw = bits.numpy().tobytes()
        key = (t.dtype, raw)
        if key not in self.places:
            self.data.extend(b"\0" * (-len(self.data) % 8))
            self.places[key] = len(self.data)
            self.data.extend(raw)
        sizes = "".join(f" {n}" for n in t.shape)
        self.lines.append(f"array {name} {DTYPES[t.dtype]} {t.dim()}{sizes} {self.places[key]}")

    def case(self, case, device):
        self.lines.append(f"case {case.name}")
        attrs = {"length": case.length, "low": case.low, **case.attrs,
                 **{f"order{i}": order for i, order in case.orders.items()}}
        for name, value in attrs.items():
            words = value if isinstance(value, (tuple, list)) else [value]
            self.lines.append(" ".join(["attr", name, *map(str, words)]))
        for i, array in enumerate(case.inputs):
            self.array(f"in{i}", torch.from_numpy(np.asarray(array)))
        cotangents = []
        for run in RUNS:
            compute = kept_elements if case.attrs.get("mask") else outputs_and_gradients
            out, gradients = compute(case, run, device, cotangents)
            if run == RUNS[0]:
                for i, c in enumerate(cotangents):
                    self.array(f"dy{i}", torch.from_numpy(c))
            for i, y in enumerate(out):
                self.array(f"{run}.out{i}", y)
            for i, g in enumerate(gradients):
                if g is not None:
                    self.array(f"{run}.grad{i}", g)

    def bytes(self):
        return ("\n".join(self.lines) + "\ndata\n").encode() + bytes(self.data)


def listed_ops():
    """The names in ops/ops.def and kernels/elementwise.def."""
    root = pathlib.Path(__file__).resolve().parents[2]
    names = []
    for path, macros in (("kernels/elementwise.def", "MT_UNARY|MT_BINARY"), ("ops/ops.def", "MT_OP")):
        text = (root / path).read_text()
        names += re.findall(rf"^(?:{macros})\((\w+)", text, re.MULTILINE)
    return names


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--only", help="comma-separated ops")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("make_goldens: expected a CUDA device for --device cuda, got none")
    # float32 means float32, and 16-bit products accumulate in float32 throughout.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    torch.manual_seed(1)

    args.out.mkdir(parents=True, exist_ok=True)
    listed = listed_ops()
    for name in OPS.keys() - listed:
        print(f"{name}: not in ops.def, left out")
    failures = [f"{name}: in ops.def, but not in golden_cases.py" for name in listed if name not in OPS]
    wanted = args.only.split(",") if args.only else [name for name in OPS if name in listed]
    total = 0
    for name in wanted:
        try:
            writer = Writer(name, args.device)
            cases = [c for c in OPS[name]() if args.device == "cuda" or not c.cuda_only]
            assert len({c.name for c in cases}) == len(cases), "two cases of one name"
            for case in cases:
                writer.case(case, args.device)
            content = writer.bytes()
            assert len(content) <= MAX_FILE_BYTES, f"expected at most {MAX_FILE_BYTES} bytes, got {len(content)}"
            (args.out / f"{name}.golden").write_bytes(content)
            total += len(content)
            print(f"{name}: {len(cases)} cases, {len(content)} bytes", flush=True)
        except Exception:  # report every op's failure, not the first one's only
            traceback.print_exc()
            failures.append(f"{name}: failed")
    print(f"{len(wanted)} ops, {total} bytes, {args.device}, torch {torch.__version__}")
    for failure in failures:
        print(failure, file=sys.stderr)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
