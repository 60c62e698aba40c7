"""GPT-2 and a Llama-style model in PyTorch, with the modules' names and layouts of Hugging Face's transformers, so
that a state_dict is what their checkpoints hold. The models of examples/gpt2 are compared with these, in numbers by
tests/parity and in speed by tests/benchmarks/gpt2_peer.py.

Shapes: B batch, T tokens, C channels, H heads, G heads of keys and values, D = C / H, V vocabulary.
"""
import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass
class Gpt2Config:
    layers: int = 12
    heads: int = 12
    channels: int = 768
    context: int = 1024
    vocabulary: int = 50304


class Conv1D(nn.Module):
    """A linear layer whose weight is (in, out), as in GPT-2's checkpoints."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return F.linear(x, self.weight.t(), self.bias)


class Gpt2Attention(nn.Module):
    def __init__(self, c, linear):
        super().__init__()
        self.heads = c.heads
        self.c_attn = linear(c.channels, 3 * c.channels)
        self.c_proj = linear(c.channels, c.channels)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in self.c_attn(x).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, t, c))


class Gpt2Mlp(nn.Module):
    def __init__(self, c, linear):
        super().__init__()
        self.c_fc = linear(c.channels, 4 * c.channels)
        self.c_proj = linear(4 * c.channels, c.channels)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Gpt2Block(nn.Module):
    def __init__(self, c, linear):
        super().__init__()
        self.ln_1 = nn.LayerNorm(c.channels)
        self.attn = Gpt2Attention(c, linear)
        self.ln_2 = nn.LayerNorm(c.channels)
        self.mlp = Gpt2Mlp(c, linear)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt2(nn.Module):
    """`linear` is Conv1D for Hugging Face's layout, or nn.Linear."""

    def __init__(self, c, linear=Conv1D):
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(c.vocabulary, c.channels),
            "wpe": nn.Embedding(c.context, c.channels),
            "h": nn.ModuleList(Gpt2Block(c, linear) for _ in range(c.layers)),
            "ln_f": nn.LayerNorm(c.channels),
        })
        for name, p in self.named_parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0, 0.02 / math.sqrt(2 * c.layers) if name.endswith("c_proj.weight") else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens):  # (B, T) -> (B, T, V)
        part = self.transformer
        x = part["wte"](tokens) + part["wpe"].weight[:tokens.shape[1]]
        for block in part["h"]:
            x = block(x)
        return F.linear(part["ln_f"](x), part["wte"].weight)


@dataclasses.dataclass
class LlamaConfig:
    layers: int = 12
    heads: int = 12
    kv_heads: int = 4
    channels: int = 768
    hidden: int = 2048
    vocabulary: int = 50304
    rotary_base: float = 10000
    eps: float = 1e-5


def rotate(x, base):
    """(B, H, T, D) turned by its position: pairs are elements i and i + D/2 ("rotate half")."""
    t, d = x.shape[-2:]
    frequency = base ** (-torch.arange(0, d, 2, dtype=torch.float64, device=x.device) / d)
    angle = torch.outer(torch.arange(t, dtype=torch.float64, device=x.device), frequency)
    angle = torch.cat([angle, angle], -1)
    half = torch.cat([-x[..., d // 2:], x[..., :d // 2]], -1)
    return x * angle.cos().to(x.dtype) + half * angle.sin().to(x.dtype)


class LlamaAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        d = c.channels // c.heads
        self.q_proj = nn.Linear(c.channels, c.heads * d, bias=False)
        self.k_proj = nn.Linear(c.channels, c.kv_heads * d, bias=False)
        self.v_proj = nn.Linear(c.channels, c.kv_heads * d, bias=False)
        self.o_proj = nn.Linear(c.channels, c.channels, bias=False)

    def forward(self, x):
        b, t, c = x.shape
        d = c // self.c.heads
        q, k, v = (p(x).view(b, t, -1, d).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, self.c.rotary_base), rotate(k, self.c.rotary_base)
        repeat = self.c.heads // self.c.kv_heads
        y = F.scaled_dot_product_attention(q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1),
                                           is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, c))


class LlamaMlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c.channels, c.hidden, bias=False)
        self.up_proj = nn.Linear(c.channels, c.hidden, bias=False)
        self.down_proj = nn.Linear(c.hidden, c.channels, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.channels, eps=c.eps)
        self.self_attn = LlamaAttention(c)
        self.post_attention_layernorm = nn.RMSNorm(c.channels, eps=c.eps)
        self.mlp = LlamaMlp(c)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.model = nn.ModuleDict({
            "embed_tokens": nn.Embedding(c.vocabulary, c.channels),
            "layers": nn.ModuleList(LlamaBlock(c) for _ in range(c.layers)),
            "norm": nn.RMSNorm(c.channels, eps=c.eps),
        })
        self.lm_head = nn.Linear(c.channels, c.vocabulary, bias=False)

    def forward(self, tokens):  # (B, T) -> (B, T, V)
        x = self.model["embed_tokens"](tokens)
        for block in self.model["layers"]:
            x = block(x)
        return self.lm_head(self.model["norm"](x))


def loss_of(net, tokens, targets):
    """Mean cross-entropy of the next tokens, (B, T) against (B, T)."""
    logits = net(tokens)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
