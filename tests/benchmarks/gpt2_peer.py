#!/usr/bin/env python3
"""One training step of GPT-2 in PyTorch (fused AdamW, clipping to 1), eager or compiled: the peer of
gpt2_step_benchmark, with its options, data and line of JSON, for a ratio measured on one machine.

    python3 tests/benchmarks/gpt2_peer.py --precision bf16 --batch 32 --mode compile
    python3 tests/benchmarks/gpt2_peer.py --layers 48 --channels 1600 --heads 25 --batch 16 --mode compile

bf16 and fp16 run under autocast, fp16 with a GradScaler. step_ms and host_ms are medians; peak_gib is what tensors
used at most, reserved_gib what the process held.
"""
import argparse
import json
import pathlib
import statistics
import sys
import time

import torch
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "parity"))
from torch_models import Gpt2, Gpt2Config, loss_of  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="bf16")
    parser.add_argument("--mode", choices=["eager", "compile"], default="eager")
    for name, value in (("batch", 32), ("layers", 12), ("channels", 768), ("heads", 12), ("ctx", 1024),
                        ("vocab", 50304), ("steps", 30), ("warmup", 10)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def make_step(o):
    """A function that trains one step and returns its loss, on the device."""
    net = Gpt2(Gpt2Config(o.layers, o.heads, o.channels, o.ctx, o.vocab), nn.Linear).to(o.device)
    opt = torch.optim.AdamW(net.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    scaler = torch.amp.GradScaler(o.device, enabled=o.precision == "fp16")
    x, y = (torch.randint(0, min(o.vocab, 50257), (o.batch, o.ctx), device=o.device) for _ in range(2))

    def forward():
        with torch.autocast(o.device, DTYPES.get(o.precision, torch.bfloat16), enabled=o.precision != "fp32"):
            return loss_of(net, x, y)

    if o.mode == "compile":
        forward = torch.compile(forward)

    def step():
        loss = forward()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad(set_to_none=True)
        return loss.detach()

    return step


class Clock:
    """Marks in the device's stream of work, and the milliseconds between them."""

    def __init__(self, device):
        self.cuda, self.marks = device == "cuda", []

    def mark(self):
        if self.cuda:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def between(self):
        if self.cuda:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in zip(self.marks, self.marks[1:])]
        return [1e3 * (b - a) for a, b in zip(self.marks, self.marks[1:])]


def measure(step, o):
    begin = time.perf_counter()
    first = step().item()
    first_ms = 1e3 * (time.perf_counter() - begin)
    for _ in range(o.warmup - 1):
        step()
    if o.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    clock, host = Clock(o.device), []
    clock.mark()
    for _ in range(o.steps):
        t = time.perf_counter()
        loss = step()
        host.append(1e3 * (time.perf_counter() - t))
        clock.mark()
    step_ms = statistics.median(clock.between())
    return {"step_ms": round(step_ms, 4), "host_ms": round(statistics.median(host), 4), "first_ms": round(first_ms),
            "rate": round(o.batch * o.ctx / step_ms * 1e3), "unit": "tokens/s", "loss_first": round(first, 4),
            "loss_last": round(loss.item(), 4)}


def main():
    o = parse()
    torch.manual_seed(1337)
    result = {"workload": "gpt2", "engine": "torch", "mode": o.mode, "precision": o.precision, "batch": o.batch}
    result |= measure(make_step(o), o)
    if o.device == "cuda":
        result |= {"peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3),
                   "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 3)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
