#!/usr/bin/env python3
"""PyTorch's figures for what the benchmarks of this folder measure, on the same machine and in the same
call, one JSON line each: matrix products at GPT-2's and the MLP's shapes, the eager MLP step (fp16 with
GradScaler), the device copy rate, and the caching allocator's peak for the MLP.

  python3 tests/benchmarks/torch_peer.py [--device cuda|cpu] [--threads N] [--only matmul,mlp,copy]
"""
import argparse
import json
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

SHAPES = [(8192, 8192, 8192), (32768, 2304, 768), (32768, 768, 768), (32768, 3072, 768),
          (32768, 768, 3072), (32768, 50304, 768), (768, 3072, 32768), (128, 1024, 784),
          (128, 1024, 1024), (128, 10, 1024)]


def timed(f, cuda, repeats=30, warm=10, warm_s=0):
    """Median milliseconds after `warm` calls and at least `warm_s` seconds of them."""
    start = time.perf_counter()
    while True:
        for _ in range(warm):
            f()
        if cuda:
            torch.cuda.synchronize()
        if time.perf_counter() - start >= warm_s:
            break
    times = []
    for _ in range(repeats):
        if cuda:
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            f()
            b.record()
            times.append((a, b))
        else:
            t = time.perf_counter()
            f()
            times.append(1e3 * (time.perf_counter() - t))
    if cuda:
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) for a, b in times]
    return statistics.median(times)


def matmul(device, cuda):
    for dtype in (torch.float16, torch.bfloat16) if cuda else (torch.float32, torch.bfloat16):
        for m, n, k in SHAPES if cuda else SHAPES[-3:]:
            a = torch.randn(m, k, device=device, dtype=dtype)
            b = torch.randn(n, k, device=device, dtype=dtype).t()
            ms = timed(lambda: a @ b, cuda, warm_s=0.4 if cuda else 0)  # as kernel_benchmark warms
            print(json.dumps(dict(bench='matmul', engine='torch', dtype=str(dtype)[6:], m=m, n=n, k=k, ms=round(ms, 5),
                                  tflops=round(2 * m * n * k / ms / 1e9, 1))), flush=True)


def mlp(device, cuda, batch=128):
    torch.manual_seed(1337)
    net = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)).to(device)
    opt = torch.optim.AdamW(net.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=cuda)
    scaler = torch.amp.GradScaler(device, enabled=cuda)
    x, y = torch.randn(batch, 784, device=device), torch.randint(0, 10, (batch,), device=device)

    def step():
        with torch.autocast(device, dtype=torch.float16 if cuda else torch.bfloat16):
            loss = F.cross_entropy(net(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad(set_to_none=True)

    for _ in range(30):
        step()
    blocks = []
    for _ in range(10):
        if cuda:
            torch.cuda.synchronize()
        t = time.perf_counter()
        for _ in range(20):
            step()
        if cuda:
            torch.cuda.synchronize()
        blocks.append((time.perf_counter() - t) / 20 * 1e3)
    peak = dict(peak_mib=round(torch.cuda.max_memory_allocated() / 2**20, 1),
                reserved_mib=round(torch.cuda.max_memory_reserved() / 2**20, 1)) if cuda else {}
    print(json.dumps(dict(bench='mlp', engine='torch', batch=batch, step_ms=round(statistics.median(blocks), 4), **peak)), flush=True)


def copy(device, cuda):
    a = torch.randn(1 << 28, device=device) if cuda else torch.randn(1 << 24)
    b = torch.empty_like(a)
    ms = timed(lambda: b.copy_(a), cuda)
    print(json.dumps(dict(bench='copy', engine='torch', gbps=round(2 * a.nbytes / ms / 1e6, 1))), flush=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    p.add_argument('--threads', type=int)
    p.add_argument('--only', default='mlp,copy,matmul')
    a = p.parse_args()
    if a.threads:
        torch.set_num_threads(a.threads)
    print(json.dumps(dict(torch=torch.__version__, device=torch.cuda.get_device_name() if a.device == 'cuda' else 'cpu')))
    for name in a.only.split(','):
        dict(matmul=matmul, mlp=mlp, copy=copy)[name](a.device, a.device == 'cuda')


if __name__ == '__main__':
    main()
