#!/usr/bin/env python3
"""Logits of ResNets in PyTorch (float64) from weights by formula: resnet_golden.py > resnet_golden.h.

The networks are written out with torchvision's structure and names, so that only torch is needed.
"""
import math

import torch
import torch.nn as nn


class Block(nn.Module):
    def __init__(self, cin, width, stride, bottleneck):
        super().__init__()
        out = 4 * width if bottleneck else width
        shapes = ([(cin, width, 1, 1), (width, width, 3, stride), (width, out, 1, 1)] if bottleneck
                  else [(cin, width, 3, stride), (width, out, 3, 1)])
        for i, (a, b, k, s) in enumerate(shapes, 1):
            setattr(self, f"conv{i}", nn.Conv2d(a, b, k, s, k // 2, bias=False))
            setattr(self, f"bn{i}", nn.BatchNorm2d(b))
        self.count = len(shapes)
        self.downsample = None
        if stride != 1 or cin != out:
            self.downsample = nn.Sequential(nn.Conv2d(cin, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        h = x
        for i in range(1, self.count + 1):
            h = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(h))
            if i < self.count:
                h = torch.relu(h)
        return torch.relu(h + (self.downsample(x) if self.downsample else x))


class ResNet(nn.Module):
    def __init__(self, layers, classes):
        super().__init__()
        bottleneck, cin = layers == 50, 64
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        for stage, blocks in enumerate({18: [2, 2, 2, 2], 34: [3, 4, 6, 3], 50: [3, 4, 6, 3]}[layers]):
            width, made = 64 << stage, []
            for i in range(blocks):
                made.append(Block(cin, width, 2 if i == 0 and stage > 0 else 1, bottleneck))
                cin = 4 * width if bottleneck else width
            setattr(self, f"layer{stage + 1}", nn.Sequential(*made))
        self.fc = nn.Linear(cin, classes)

    def forward(self, x):
        h = nn.functional.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        h = self.layer4(self.layer3(self.layer2(self.layer1(h))))
        return self.fc(h.mean((2, 3)))


def scattered(shape, scale, offset=0.0):
    """Numbers without pattern between offset - scale and offset + scale."""
    i = torch.arange(math.prod(shape), dtype=torch.int64)
    unit = ((31 * i * i + 17 * i) % 1009).double() / 504 - 1
    return (scale * unit + offset).reshape(shape).float().double()


def fill(net):
    for name, t in net.state_dict().items():
        if t.dim() == 4:
            t.copy_(scattered(t.shape, math.sqrt(6 / (t.numel() // t.shape[0]))))
        elif name == "fc.weight":
            t.copy_(scattered(t.shape, 0.05))
        elif name.endswith("running_var"):
            t.copy_(scattered(t.shape, 0.1, 1))
        elif t.dim() == 1:
            t.copy_(scattered(t.shape, 0.1, 0.5 if name.endswith("weight") else 0))


def main():
    print("// Made by resnet_golden.py: logits of two images, four classes each, row by row.\n#pragma once\n")
    print("#include <cstdint>\n#include <vector>\n\nnamespace mixtape::testing::resnet_golden {\n")
    print("struct Logits {\n  std::int64_t layers;\n  std::vector<double> evaluation, training;\n};")
    print("inline const Logits kLogits[] = {")
    for layers in (18, 50):
        net = ResNet(layers, 4).double()
        with torch.no_grad():
            fill(net)
            x = scattered((2, 3, 64, 64), 1)
            rows = [net.eval()(x), net.train()(x)]
        print(f"    {{{layers},")
        for i, row in enumerate(rows):
            values = [f"{v:.9g}" for v in row.flatten().tolist()]
            lines = [", ".join(values[:4]), ", ".join(values[4:])]
            print(f"     {{{lines[0]},\n      {lines[1]}}}{',' if i == 0 else '}'}" + (",\n" if i else "\n"), end="")
    print("};\n\n}  // namespace mixtape::testing::resnet_golden")


if __name__ == "__main__":
    main()
