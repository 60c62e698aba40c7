#!/usr/bin/env python3
"""One epoch of examples/fashion_mnist in PyTorch on the same CPU threads: the same network, optimizer, batch
and precision, with the images already in memory and batched by one gather, so that PyTorch's loader plays no
part. With --program it runs the example too, and prints the ratio of the times per epoch.

  python3 tests/benchmarks/fashion_mnist_peer.py --data DIR [--threads 2] [--precision bf16,fp32]
      [--program build/cpu/examples/fashion_mnist]
"""
import argparse
import gzip
import json
import pathlib
import re
import subprocess
import tempfile
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class Cnn(nn.Module):
    def __init__(s):
        super().__init__()
        s.conv1, s.conv2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        s.hidden, s.out = nn.Linear(32 * 7 * 7, 128), nn.Linear(128, 10)

    def forward(s, x):
        x = F.max_pool2d(F.relu(s.conv1(x)), 2)
        x = F.max_pool2d(F.relu(s.conv2(x)), 2)
        return s.out(F.relu(s.hidden(x.flatten(1))))


def idx(folder, name, offset):
    path = pathlib.Path(folder) / name
    data = path.read_bytes() if path.exists() else gzip.open(str(path) + '.gz').read()
    return np.frombuffer(data, np.uint8, offset=offset)


def epoch(images, labels, precision, batch):
    torch.manual_seed(1)
    net = Cnn()
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.01, fused=True)
    half = {'bf16': torch.bfloat16, 'fp16': torch.float16}.get(precision)
    scaler = torch.amp.GradScaler('cpu', enabled=precision == 'fp16')
    times = []
    for _ in range(2):  # the first warms up
        order = torch.randperm(len(labels))
        start = time.perf_counter()
        for at in range(0, len(labels) - batch + 1, batch):
            rows = order[at:at + batch]
            x, y = images[rows].float().div_(255), labels[rows]
            with torch.autocast('cpu', dtype=half or torch.bfloat16, enabled=half is not None):
                loss = F.cross_entropy(net(x).float(), y)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad(set_to_none=True)
        times.append(time.perf_counter() - start)
    return times[-1]


def example(program, data, precision, batch):
    with tempfile.TemporaryDirectory() as out:
        text = subprocess.run([program, '--epochs', '2', '--precision', precision, '--device', 'cpu', '--data', data,
                               '--batch', str(batch), '--out', out], check=True, capture_output=True, text=True).stdout
    seconds = float(re.search(r'\(2 epochs in ([0-9.]+) s\)', text).group(1))
    return seconds / 2, re.search(r'Test accuracy +([0-9.]+)', text).group(1)


def main():
    p = argparse.ArgumentParser()
    p.add_argument('--data', required=True)
    p.add_argument('--threads', type=int, default=2)
    p.add_argument('--precision', default='bf16,fp32')
    p.add_argument('--batch', type=int, default=128)
    p.add_argument('--program', action='append', default=[])
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    images = torch.from_numpy(idx(a.data, 'train-images-idx3-ubyte', 16).copy()).view(-1, 1, 28, 28)
    labels = torch.from_numpy(idx(a.data, 'train-labels-idx1-ubyte', 8).astype(np.int64))
    for precision in a.precision.split(','):
        torch_s = epoch(images, labels, precision, a.batch)
        print(json.dumps(dict(bench='fashion_mnist', engine='torch ' + torch.__version__, precision=precision,
                              threads=a.threads, epoch_s=round(torch_s, 2))), flush=True)
        for program in a.program:
            s, accuracy = example(program, a.data, precision, a.batch)  # evaluation and loading included
            print(json.dumps(dict(bench='fashion_mnist', engine=program, precision=precision, epoch_s=round(s, 2),
                                  ratio=round(s / torch_s, 3), accuracy=accuracy)), flush=True)


if __name__ == '__main__':
    main()
