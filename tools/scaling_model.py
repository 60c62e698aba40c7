#!/usr/bin/env python3
"""Predicts step time, memory and communication of GPT training on 1 to 1,024 GPUs.

    scaling_model.py                      the tables of docs/scaling.md
    scaling_model.py --check FILE         exit 1 unless FILE holds exactly these tables
    scaling_model.py --nvlink 400 ...     other inputs; --help lists them

The model is the usual one: products at a measured rate, collectives as latency plus bytes over
bandwidth (alpha-beta), data-parallel traffic hidden behind backward as far as it fits. docs/scaling.md
derives each formula and says which inputs are measured and which are data-sheet figures.

Legend: N parameters, L layers, d channels, V vocabulary, T tokens a sequence.
"""

import argparse
import dataclasses
import math
import sys

GIB = 2.0**30
PEAK = 989e12  # 16-bit products of an H200 a second, by its data sheet
COPY = 4.26e12  # bytes a second that the memory gives, measured


@dataclasses.dataclass(frozen=True)
class Model:
    name: str
    layers: int
    channels: int
    vocabulary: int
    context: int
    hidden: int  # of the feed-forward layer, counting a gated one's two inputs as 1.5 of one
    tokens: int  # a GPU and step

    @property
    def block_parameters(self):
        return 4 * self.channels**2 + 2 * self.channels * self.hidden

    @property
    def parameters(self):
        return self.layers * self.block_parameters + self.vocabulary * self.channels

    @property
    def flops_per_token(self):
        """Forward and backward; attention's two products counted in full, as llm.c counts them."""
        return 6 * self.parameters + 12 * self.layers * self.channels * self.context


MODELS = [
    Model("124M", 12, 768, 50304, 1024, 3072, 32 * 1024),
    Model("1558M", 48, 1600, 50304, 1024, 6400, 16 * 1024),
    Model("7B", 32, 4096, 32000, 4096, 16512, 4 * 4096),
    Model("13B", 40, 5120, 32000, 4096, 20736, 4 * 4096),
    Model("70B", 80, 8192, 32000, 4096, 43008, 2 * 4096),
]
GPUS = [1, 8, 64, 256, 1024]


@dataclasses.dataclass(frozen=True)
class Machine:
    gpus_per_node: int
    memory: float  # bytes usable on a GPU
    tflops: dict  # achieved on a whole step, by model: measured for two, the larger's for the rest
    nvlink: float  # bytes/s of a collective's bus bandwidth within a node
    network: float  # bytes/s a GPU between nodes
    alpha_nvlink: float  # seconds a hop
    alpha_network: float
    recompute_tokens: float = 1 / 3  # extra forward work of full recomputation, of a step's


@dataclasses.dataclass(frozen=True)
class Plan:
    """Who holds what: `tensor` GPUs share each layer's products, `shard` GPUs share states."""

    tensor: int
    zero: int  # 0: replicas; 1: optimizer; 2: and gradients; 3: and parameters
    recompute: str  # "none", "gelu" (the activation only), "full" (whole blocks)

    def __str__(self):
        parts = ["DP" if self.zero == 0 else f"ZeRO-{self.zero}"]
        if self.tensor > 1:
            parts.append(f"TP {self.tensor}")
        if self.recompute != "none":
            parts.append("recompute " + self.recompute)
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True)
class Prediction:
    step: float  # seconds
    exposed: float  # seconds of the step in which only communication runs
    memory: float  # bytes on a GPU
    traffic: float  # bytes that a GPU sends in a step


def state_bytes(model, plan, gpus):
    """fp32 parameters and gradients, Adam's two moments, a 16-bit copy for the products."""
    replicas = gpus // plan.tensor
    share = [replicas if plan.zero >= level else 1 for level in (1, 2, 3)]
    optimizer, gradients, weights = 8 / share[0], 4 / share[1], 4 / share[2]
    copy = 2 / share[2]
    gathered = 0.0
    if plan.zero == 3:  # two layers whole at a time: the one that runs and the one that arrives
        gathered = 2 * 2 * model.block_parameters / plan.tensor
    return model.parameters / plan.tensor * (optimizer + gradients + weights + copy) + gathered


def activation_bytes(model, plan):
    """What a 16-bit block keeps for backward, and the logits."""
    d, hidden = model.channels, model.hidden
    kept = {
        # two residual sums and two normalised copies; q, k, v; attention's output; two of `hidden`
        "none": 2 * (4 * d + 3 * d + d + 2 * hidden),
        "gelu": 2 * (4 * d + 3 * d + d + hidden),
        "full": 2 * 2 * d,
    }[plan.recompute]
    shared = 2 * 4 * d if plan.recompute != "full" else 2 * 2 * d  # not split by tensor parallelism
    per_layer = shared + (kept - shared) / plan.tensor
    one_block = 2 * (8 * d + 2 * hidden) / plan.tensor if plan.recompute == "full" else 0
    logits = 2 * model.vocabulary / plan.tensor
    return model.tokens * (model.layers * per_layer + one_block + logits)


def ring_seconds(machine, bytes_each, gpus, passes):
    """`passes` of (n - 1)/n of the bytes: 1 for gather or scatter, 2 for all-reduce. Within the node
    over NVLink, then between nodes with each GPU carrying its share."""
    if gpus == 1:
        return 0.0
    local = min(gpus, machine.gpus_per_node)
    nodes = max(1, gpus // machine.gpus_per_node)
    seconds = passes * ((local - 1) / local * bytes_each / machine.nvlink
                        + (local - 1) * machine.alpha_nvlink)
    if nodes > 1:
        seconds += passes * ((nodes - 1) / nodes * (bytes_each / local) / machine.network
                             + math.log2(nodes) * machine.alpha_network)
    return seconds


def predict(machine, model, plan, gpus):
    """A Prediction, or None where the plan does not fit."""
    if gpus % plan.tensor or plan.tensor > machine.gpus_per_node:
        return None
    memory = state_bytes(model, plan, gpus) + activation_bytes(model, plan)
    if memory > machine.memory:
        return None
    # Tensor-parallel GPUs work on the same tokens: a group has the tokens of all its members.
    tokens = model.tokens
    rate = machine.tflops.get(model.name, machine.tflops["1558M"]) * 1e12
    compute = tokens * model.flops_per_token / (plan.tensor * rate)
    if plan.recompute == "full":
        compute *= 1 + machine.recompute_tokens
    elif plan.recompute == "gelu":
        compute += 2 * 2 * tokens * model.layers * model.hidden / plan.tensor / COPY
    # Two all-reduces a layer in forward and two in backward, of (tokens, d).
    reduces = 4 * model.layers * (1.5 if plan.recompute == "full" else 1)
    one = 2 * tokens * model.channels
    tensor = reduces * ring_seconds(machine, one, plan.tensor, 2)
    replicas = gpus // plan.tensor
    # Replicas lie one to a node when a tensor-parallel group fills it.
    spread = dataclasses.replace(machine, gpus_per_node=max(1, machine.gpus_per_node // plan.tensor))
    own = model.parameters / plan.tensor
    # fp32 gradients: all-reduce, or reduce-scatter where they or the optimizer are sharded. 16-bit
    # weights: gathered after the step (ZeRO-1 and 2), or in forward and again in backward (3).
    gradient_passes = 1 if plan.zero else 2
    weight_passes = (0, 1, 1, 2)[plan.zero]
    gradients = ring_seconds(spread, 4 * own, replicas, gradient_passes)
    weights = ring_seconds(spread, 2 * own, replicas, weight_passes)
    # Gradients hide behind the two thirds of a step that are backward, all but the last bucket;
    # gathered weights behind the layers before, ZeRO-1 and 2's gather behind the next forward.
    hidden_behind = compute * (1 if plan.zero else 2 / 3)
    last = gradients / max(model.layers, 1)
    exposed = tensor + max(gradients + weights - hidden_behind, last if replicas > 1 else 0.0)
    around = (replicas - 1) / replicas
    traffic = (around * own * (4 * gradient_passes + 2 * weight_passes)
               + reduces * 2 * (plan.tensor - 1) / plan.tensor * one)
    return Prediction(compute + exposed, exposed, memory, traffic)


def plans(machine):
    for recompute in ("none", "gelu", "full"):
        for zero in (0, 1, 2, 3):
            tensor = 1
            while tensor <= machine.gpus_per_node:
                yield Plan(tensor, zero, recompute)
                tensor *= 2


def tokens_per_second(model, plan, gpus, step):
    return model.tokens * (gpus // plan.tensor) / step


def best(machine, model, gpus):
    """The plan with the most tokens a second; among equals (1 %) the one first in plans(), simplest."""
    found = None
    for plan in plans(machine):
        result = predict(machine, model, plan, gpus)
        if result is None:
            continue
        rate = tokens_per_second(model, plan, gpus, result.step)
        if found is None or rate > 1.01 * found[0]:
            found = (rate, plan, result)
    return found


def table(machine):
    lines = ["| model | GPUs | plan | step ms | of it exposed | sent GB | memory GiB | tokens/s | MFU |",
             "|---|---|---|---|---|---|---|---|---|"]
    for model in MODELS:
        for gpus in GPUS:
            found = best(machine, model, gpus)
            if found is None:
                lines.append(f"| {model.name} | {gpus} | does not fit | | | | | | |")
                continue
            rate, plan, p = found
            mfu = rate * model.flops_per_token / gpus / PEAK
            lines.append(
                f"| {model.name} | {gpus} | {plan} | {1e3 * p.step:.1f} | {1e3 * p.exposed:.1f} | "
                f"{p.traffic / 1e9:.2f} | {p.memory / GIB:.1f} | {rate:,.0f} | {100 * mfu:.0f} % |")
    return "\n".join(lines)


def calibration(machine):
    """The model beside what was measured on one GPU."""
    measured = {  # docs/performance.md: ms, GiB reserved
        ("124M", "none"): (57.5, 14.5),
        ("1558M", "none"): (307.0, 66.6),
    }
    lines = ["| model, one GPU | predicted ms | measured ms | predicted GiB | measured GiB |",
             "|---|---|---|---|---|"]
    for (name, recompute), (ms, gib) in measured.items():
        model = next(m for m in MODELS if m.name == name)
        p = predict(machine, model, Plan(1, 0, recompute), 1)
        lines.append(f"| {name} | {1e3 * p.step:.1f} | {ms} | {p.memory / GIB:.1f} | {gib} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--memory", type=float, default=134, help="GiB a GPU can use")
    parser.add_argument("--nvlink", type=float, default=360, help="GB/s bus bandwidth in a node")
    parser.add_argument("--network", type=float, default=45, help="GB/s a GPU between nodes")
    parser.add_argument("--alpha-nvlink", type=float, default=3, help="microseconds a hop")
    parser.add_argument("--alpha-network", type=float, default=15, help="microseconds a hop")
    parser.add_argument("--tflops-124m", type=float, default=489, help="of a whole step")
    parser.add_argument("--tflops", type=float, default=549, help="of a whole step, larger models")
    parser.add_argument("--check", metavar="FILE", help="compare with the tables in FILE")
    options = parser.parse_args()
    machine = Machine(options.gpus_per_node, options.memory * GIB,
                      {"124M": options.tflops_124m, "1558M": options.tflops},
                      options.nvlink * 1e9, options.network * 1e9,
                      options.alpha_nvlink * 1e-6, options.alpha_network * 1e-6)
    tables = [calibration(machine), table(machine)]
    if options.check:
        with open(options.check, encoding="utf-8") as file:
            text = file.read()
        for t in tables:
            if t not in text:
                print(f"{options.check}: its table is not what scaling_model.py prints:\n{t}")
                return 1
        return 0
    print("\n\n".join(tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())
