#!/usr/bin/env python3
"""ResNet training steps of Mixtape and PyTorch, run by turns on one machine, and their ratio.

  python3 tests/benchmarks/resnet_peer.py BINARY [--model resnet18] [--device cpu] [--batch 32] [--threads 2]
                                          [--mode eager,captured] [--rounds 3]

BINARY is resnet_step_benchmark. The model is the one of tests/examples/resnet_golden.py, on 224 x 224 images,
with SGD; fp16, channels-last and a GradScaler on CUDA, where PyTorch also runs under torch.compile if
--compile is given. Prints a JSON line for each run and, for each mode, the ratio of the best step times.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))
from resnet_golden import ResNet  # noqa: E402


def torch_step_ms(a, steps, warmup):
    cuda = a.device == "cuda"
    torch.manual_seed(1337)
    layout = torch.channels_last if a.layout == "channels-last" else torch.contiguous_format
    net = ResNet(int(a.model[6:]), 1000).to(a.device, memory_format=layout)
    run = torch.compile(net) if a.compile else net
    opt = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler(a.device, enabled=a.precision == "fp16")
    low = torch.float16 if a.precision == "fp16" else torch.bfloat16
    x = torch.randn(a.batch, 3, 224, 224, device=a.device).to(memory_format=layout)
    y = torch.randint(0, 1000, (a.batch,), device=a.device)

    def step():
        with torch.autocast(a.device, dtype=low, enabled=a.precision != "fp32"):
            loss = F.cross_entropy(run(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad(set_to_none=True)

    def now():
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    for _ in range(warmup):
        step()
    times = []
    for _ in range(steps):
        start = now()
        step()
        times.append(1e3 * (now() - start))
    return sorted(times)[len(times) // 2]


def mixtape_step_ms(a, mode, steps, warmup):
    options = dict(model=a.model, device=a.device, batch=a.batch, precision=a.precision, layout=a.layout, mode=mode,
                   steps=steps, warmup=warmup, threads=a.threads)
    words = [word for k, v in options.items() for word in ("--" + k, str(v))]
    out = subprocess.run([a.binary, *words], capture_output=True, text=True, check=True).stdout
    print(out.strip(), flush=True)
    return json.loads(out)["step_ms"]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("binary")
    p.add_argument("--model", default="resnet50")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--batch", type=int, default=256)
    p.add_argument("--threads", type=int, default=0)
    p.add_argument("--precision")
    p.add_argument("--layout")
    p.add_argument("--mode", default="eager")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--steps", type=int)
    p.add_argument("--compile", action="store_true")
    a = p.parse_args()
    cuda = a.device == "cuda"
    a.precision = a.precision or ("fp16" if cuda else "fp32")
    a.layout = a.layout or ("channels-last" if cuda else "contiguous")
    steps, warmup = a.steps or (50 if cuda else 3), 15 if cuda else 1
    if a.threads:
        torch.set_num_threads(a.threads)
    best = {}
    for _ in range(a.rounds):
        for mode in a.mode.split(","):
            ms = mixtape_step_ms(a, mode, steps, warmup)
            best[mode] = min(ms, best.get(mode, ms))
        ms = torch_step_ms(a, steps, warmup)
        print(json.dumps(dict(workload=a.model, engine="torch", torch=torch.__version__, compiled=a.compile,
                              precision=a.precision, batch=a.batch, step_ms=round(ms, 4),
                              rate=round(a.batch / ms * 1e3))), flush=True)
        best["torch"] = min(ms, best.get("torch", ms))
    for mode in a.mode.split(","):
        print(json.dumps(dict(workload=a.model, mode=mode, ratio=round(best[mode] / best["torch"], 3))), flush=True)


if __name__ == "__main__":
    main()
