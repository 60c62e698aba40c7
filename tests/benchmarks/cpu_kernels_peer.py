#!/usr/bin/env python3
"""PyTorch's rates for what cpu_kernels_benchmark measures: same names, one line each, best of many runs.

  python3 tests/benchmarks/cpu_kernels_peer.py [--threads N] [--only SUBSTRING]
"""
import argparse
import time

import torch
import torch.nn.functional as F

PRODUCTS = [('layer1_y', 128, 1024, 784, 0, 1), ('layer1_dw', 1024, 784, 128, 1, 0),
            ('layer2_y', 128, 1024, 1024, 0, 1), ('layer2_dx', 128, 1024, 1024, 0, 0),
            ('layer2_dw', 1024, 1024, 128, 1, 0), ('layer3_y', 128, 10, 1024, 0, 1),
            ('layer3_dw', 10, 1024, 128, 1, 0), ('square_1024', 1024, 1024, 1024, 0, 0)]
LAYERS = [('conv1', 128, 1, 28, 16, 3, 1), ('conv2', 128, 16, 14, 32, 3, 1), ('conv64', 32, 64, 28, 64, 3, 1)]
DTYPES = dict(f32=torch.float32, bf16=torch.bfloat16, f16=torch.float16)


def report(name, amount, unit, f):
    if ONLY not in name:
        return
    f()
    best, spent = float('inf'), 0.0
    while spent < 0.5:
        start = time.perf_counter()
        f()
        t = time.perf_counter() - start
        best, spent = min(best, t), spent + t
    print(f'{name:36s} {1e6 * best:10.1f} us  {amount / best / 1e9:8.1f} G{unit}', flush=True)


def conv_pass(x, w, dy, padding, mask):
    return torch.ops.aten.convolution_backward(dy, x, w, None, [1, 1], [padding] * 2, [1, 1], False, [0, 0], 1, mask)


def main():
    for text, dtype in DTYPES.items():
        for name, m, n, k, ta, tb in PRODUCTS:
            a = torch.randn(k, m, dtype=dtype).t() if ta else torch.randn(m, k, dtype=dtype)
            b = torch.randn(n, k, dtype=dtype).t() if tb else torch.randn(k, n, dtype=dtype)
            out = torch.empty(m, n, dtype=dtype)
            report(f'matmul/{text}/{name}', 2 * m * n * k, 'FLOP/s', lambda: torch.mm(a, b, out=out))
        for name, n, c, h, o, k, p in LAYERS:
            x, w, bias = torch.randn(n, c, h, h, dtype=dtype), torch.randn(o, c, k, k, dtype=dtype), torch.randn(o, dtype=dtype)
            y = F.conv2d(x, w, bias, padding=p)
            flops = 2 * y.numel() * c * k * k
            report(f'conv_y/{text}/{name}', flops, 'FLOP/s', lambda: F.conv2d(x, w, bias, padding=p).relu_())
            for what, mask in (('dx', [True, False, False]), ('dw', [False, True, False])):
                report(f'conv_{what}/{text}/{name}', flops, 'FLOP/s', lambda: conv_pass(x, w, y, p, mask))
        x = torch.randn(128, 16, 28, 28, dtype=dtype)
        y, index = F.max_pool2d(x, 2, return_indices=True)
        size = x.element_size() * (x.numel() + y.numel()) + 4 * y.numel()
        report(f'max_pool_y/{text}', size, 'B/s', lambda: F.max_pool2d(x, 2, return_indices=True))
        report(f'max_pool_dx/{text}', size, 'B/s', lambda: torch.ops.aten.max_pool2d_with_indices_backward(
            y, x, [2, 2], [2, 2], [0, 0], [1, 1], False, index))
        x = torch.randn(8192, 512, dtype=dtype)
        report(f'softmax/{text}/8192x512', 2 * x.numel() * x.element_size(), 'B/s', lambda: torch.softmax(x, -1))
        x, t = torch.randn(64, 50304, dtype=dtype), torch.zeros(64, dtype=torch.int64)
        report(f'cross_entropy/{text}/64x50304', x.numel() * x.element_size(), 'B/s', lambda: F.cross_entropy(x, t))
        x = torch.randn(4096, 768, dtype=dtype)
        w, b = torch.ones(768, dtype=dtype), torch.zeros(768, dtype=dtype)
        y, mean, rstd = torch.ops.aten.native_layer_norm(x, [768], w, b, 1e-5)
        report(f'layer_norm_y/{text}', 2 * x.numel() * x.element_size(), 'B/s',
               lambda: torch.ops.aten.native_layer_norm(x, [768], w, b, 1e-5))
        report(f'layer_norm_dx/{text}', 3 * x.numel() * x.element_size(), 'B/s',
               lambda: torch.ops.aten.native_layer_norm_backward(y, x, [768], mean, rstd, w, b, [True, True, True]))
    if ONLY in 'adam/f32/16M':
        p = torch.zeros(1 << 24)
        p.grad = torch.zeros_like(p)
        optimizer = torch.optim.AdamW([p], lr=1e-3, fused=True)
        report('adam/f32/16M', 7 * 4 * p.numel(), 'B/s', optimizer.step)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument('--threads', type=int, default=2)
parser.add_argument('--only', default='', help='names that contain this')
arguments = parser.parse_args()
ONLY = arguments.only
torch.set_num_threads(arguments.threads)
main()
