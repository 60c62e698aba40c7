"""Weights and tokens by formula, the same in Python and C++ (formula.h), so that what is compared needs no stored
inputs; and safetensors files, read and written in a few lines. Needs numpy and torch only.
"""
import json
import pathlib
import struct

import numpy as np
import torch

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64,
          "I64": torch.int64, "I32": torch.int32}


def mixed(start, n):
    """splitmix64 of start, start + 1, ..."""
    with np.errstate(over="ignore"):
        z = (np.uint64(start) + np.arange(n, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def seed_of(name):
    """FNV-1a of the name, of which 32 bits are enough."""
    h = 0xCBF29CE484222325
    for byte in name.encode():
        h = (h ^ byte) * 0x100000001B3 % 2**64
    return h >> 32


def uniform(name, shape):
    """float32 in [-1, 1), multiples of 2^-23."""
    bits = mixed(seed_of(name), int(np.prod(shape))) >> np.uint64(40)
    return torch.from_numpy((bits.astype(np.float32) * np.float32(2**-23) - np.float32(1)).reshape(shape))


def weight(name, shape, matrix_scale, centre_of_norms=1.0, vector_scale=0.0):
    """A model's initial value: matrices around 0, norms' weights around 1, biases around 0."""
    if len(shape) > 1:
        return uniform(name, shape) * np.float32(matrix_scale)
    values = uniform(name, shape) * np.float32(vector_scale)
    return values if name.endswith("bias") else values + np.float32(centre_of_norms)


def tokens(name, n, vocabulary):
    """A text to learn: mostly each token follows from the one before, one in eight is drawn."""
    bits = mixed(seed_of(name), n)
    out, last = np.empty(n, np.int64), 0
    for i, b in enumerate(bits.tolist()):
        last = (b >> 8) % vocabulary if b % 8 == 0 else (5 * last + 3) % vocabulary
        out[i] = last
    return torch.from_numpy(out)


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, t in tensors.items():
        raw = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = next(k for k, v in DTYPES.items() if v == t.dtype)
        header[name] = {"dtype": dtype, "shape": list(t.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path):
    raw = pathlib.Path(path).read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    out = {}
    for name, e in json.loads(raw[8:8 + length]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + x for x in e["data_offsets"])
        out[name] = torch.frombuffer(bytearray(raw[begin:end]), dtype=DTYPES[e["dtype"]]).reshape(e["shape"])
    return out
