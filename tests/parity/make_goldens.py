#!/usr/bin/env python3
"""What PyTorch computes on the CPU for the tests of this folder, from weights and tokens by formula (formula.py):

    python3 tests/parity/make_goldens.py tests/parity/data

models.safetensors: logits, losses and gradients of a tiny GPT-2 and a tiny Llama in Hugging Face's layout, and of
nn.MultiheadAttention. curves.safetensors: losses of 100 steps of a small GPT-2 in float32 and under autocast.
"""
import pathlib
import sys

import torch
from torch import nn

from formula import tokens, uniform, weight, write_safetensors
from parity import SMALL, losses, small_model
from torch_models import Gpt2, Gpt2Config, Llama, LlamaConfig, loss_of

TINY_GPT2 = Gpt2Config(layers=2, heads=2, channels=16, context=8, vocabulary=24)
TINY_LLAMA = LlamaConfig(layers=2, heads=4, kv_heads=2, channels=16, hidden=24, vocabulary=24, eps=1e-5)


def model_results(prefix, net):
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(weight(name, p.shape, 0.5, vector_scale=0.25))
    text = tokens(prefix, 2 * 8, 24).view(2, 8)
    x, y = text[:, :7], text[:, 1:]
    loss = loss_of(net, x, y)
    loss.backward()
    out = {f"{prefix}.logits": net(x).detach(), f"{prefix}.loss": loss.detach()}
    out |= {f"{prefix}.norm.{name}": p.grad.norm() for name, p in net.named_parameters()}
    return out


def attention_results(prefix, attention, q, k, v, mask=None):
    with torch.no_grad():
        for name, p in attention.named_parameters():
            p.copy_(weight(f"{prefix}.{name}", p.shape, 0.5, vector_scale=0.25))
    inputs = {n: t.requires_grad_() for n, t in {"q": q, "k": k, "v": v}.items()}
    y, _ = attention(q, k, v, attn_mask=mask, need_weights=False)
    (y * uniform(f"{prefix}.dy", y.shape)).sum().backward()
    out = {f"{prefix}.y": y.detach()}
    out |= {f"{prefix}.d{n}": t.grad for n, t in inputs.items()}
    return out | {f"{prefix}.d{name}": p.grad for name, p in attention.named_parameters()}


def attention_cases():
    x = uniform("self.x", (2, 5, 8))
    causal = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)  # here True masks
    yield "self", nn.MultiheadAttention(8, 2, batch_first=True), x, x.clone(), x.clone(), causal
    q, k, v = uniform("cross.q", (2, 3, 8)), uniform("cross.k", (2, 4, 6)), uniform("cross.v", (2, 4, 10))
    added = uniform("cross.mask", (3, 4))
    yield "cross", nn.MultiheadAttention(8, 4, kdim=6, vdim=10, batch_first=True), q, k, v, added
    q, memory = uniform("memory.q", (2, 3, 8)), uniform("memory.k", (2, 6, 8))
    yield "memory", nn.MultiheadAttention(8, 2, bias=False, batch_first=True), q, memory, memory.clone(), None


def main():
    folder = pathlib.Path(sys.argv[1])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    results = model_results("gpt2", Gpt2(TINY_GPT2)) | model_results("llama", Llama(TINY_LLAMA))
    for prefix, attention, *arguments in attention_cases():
        results |= attention_results(prefix, attention, *arguments)
    write_safetensors(folder / "models.safetensors", results)
    curves = {p: torch.tensor(losses(*small_model(), SMALL, p, torch.device("cpu")))
              for p in ("fp32", "bf16", "fp16")}
    write_safetensors(folder / "curves.safetensors", curves)
    for precision, curve in curves.items():
        print(precision, [round(float(x), 4) for x in curve[::9]])


if __name__ == "__main__":
    main()
