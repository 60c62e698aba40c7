#!/usr/bin/env python3
"""GPT-2 trained by PyTorch and by Mixtape from the same weights on the same tokens, and the two loss curves compared.

    python3 tests/parity/parity.py run --program BUILD/tests/parity/parity_train --out DIR [--config 124m|small]
        [--steps 100] [--device cuda|cpu] [--precisions fp32,bf16,fp16] [--mode eager|captured] [--seed TEXT]
    python3 tests/parity/parity.py train --out DIR --config small --precision bf16   PyTorch's part alone
    python3 tests/parity/parity.py compare --out DIR --precisions fp32,bf16,fp16     from the files of a run

The bars: in fp32 no loss differs from PyTorch's by more than 1e-3 of it; in bf16 and fp16 the curve is as close to
PyTorch's fp32 curve as PyTorch's own autocast run is: the ratio of the two root mean squares of relative differences is
printed. One run's ratio scatters, because 100 successive differences are few: five seeds of the small configuration gave
0.9 to 1.3 in bf16. The bar is therefore --slack, 1.5; a significand shorter by one bit would give 2. Two Mixtape runs
in deterministic mode must agree in every bit. Exit code 1 if a bar is missed.
"""
import argparse
import dataclasses
import pathlib
import subprocess
import sys

import torch

from formula import read_safetensors, tokens, weight, write_safetensors
from torch_models import Gpt2, Gpt2Config, loss_of


@dataclasses.dataclass
class Setting:
    model: Gpt2Config
    batch: int
    lr: float
    steps: int = 100
    matrix_scale: float = 0.035  # of the uniform initial weights; the standard deviation is 0.02


SMALL = Setting(Gpt2Config(layers=2, heads=4, channels=64, context=64, vocabulary=128), batch=8, lr=2e-3)
CONFIGS = {"small": SMALL, "124m": Setting(Gpt2Config(), batch=4, lr=3e-4)}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def make(setting, seed=""):
    """Initial weights by Hugging Face's names, and all tokens (steps, batch, context + 1)."""
    net = Gpt2(setting.model)
    weights = {name: weight(seed + name, p.shape, setting.matrix_scale) for name, p in net.named_parameters()}
    shape = (setting.steps, setting.batch, setting.model.context + 1)
    count = shape[0] * shape[1] * shape[2]
    return weights, tokens(seed + "text", count, min(setting.model.vocabulary, 50257)).view(shape)


def small_model():
    return make(SMALL)


def losses(weights, text, setting, precision, device):
    """PyTorch's losses of the steps that `text` holds."""
    net = Gpt2(setting.model).to(device)
    net.load_state_dict(weights)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    opt = torch.optim.AdamW(net.parameters(), lr=setting.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    curve = []
    for batch in text.to(device):
        with torch.autocast(device.type, DTYPES.get(precision, torch.bfloat16), enabled=precision != "fp32"):
            loss = loss_of(net, batch[:, :-1], batch[:, 1:])
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        curve.append(loss.item())
    return curve


def write_curve(path, curve):
    path.write_text("".join(f"{x!r}\n" for x in curve))


def read_curve(path):
    return [float(line) for line in path.read_text().split()]


def train_torch(o, setting, precision):
    weights, text = make(setting, o.seed)
    write_curve(o.out / f"torch_{precision}.txt", losses(weights, text, setting, precision, torch.device(o.device)))


def train_mixtape(o, setting, precision, name):
    m = setting.model
    subprocess.run([o.program, "--init", str(o.out / "init.safetensors"), "--tokens", str(o.out / "tokens.safetensors"),
                    "--losses", str(o.out / name), "--layers", str(m.layers), "--heads", str(m.heads),
                    "--channels", str(m.channels), "--vocab", str(m.vocabulary), "--lr", repr(setting.lr),
                    "--precision", precision, "--mode", o.mode, "--device", o.device], check=True)


def relative(a, b):
    return [abs(x - y) / abs(y) for x, y in zip(a, b, strict=True)]


def rms(values):
    return (sum(v * v for v in values) / len(values)) ** 0.5


def compare(o):
    """Prints the differences of every precision; returns whether all are within the bars."""
    reference = read_curve(o.out / "torch_fp32.txt")
    fine = True
    for precision in o.precisions:
        ours = read_curve(o.out / f"mixtape_{precision}.txt")
        again = read_curve(o.out / f"mixtape_{precision}_again.txt")
        to_fp32 = relative(ours, reference)
        if precision == "fp32":
            got, bar, what = max(to_fp32), 1e-3, "largest relative difference to PyTorch"
        else:
            theirs = relative(read_curve(o.out / f"torch_{precision}.txt"), reference)
            got, bar = rms(to_fp32) / rms(theirs), o.slack
            what = (f"rms difference to PyTorch fp32 {rms(to_fp32):.2e} (largest {max(to_fp32):.2e}), of PyTorch's "
                    f"autocast {rms(theirs):.2e} (largest {max(theirs):.2e}), ratio")
        ok = got <= bar and ours == again
        fine &= ok
        print(f"{precision}: {len(ours)} steps, loss {ours[0]:.4f} to {ours[-1]:.4f}; {what}: {got:.3g}, "
              f"bar {bar:g}; two runs {'bit-identical' if ours == again else 'DIFFER'}: {'pass' if ok else 'FAIL'}")
    return fine


def run(o, setting):
    o.out.mkdir(parents=True, exist_ok=True)
    weights, text = make(setting, o.seed)
    write_safetensors(o.out / "init.safetensors", weights)
    write_safetensors(o.out / "tokens.safetensors", {"tokens": text})
    for precision in dict.fromkeys(["fp32", *o.precisions]):
        train_torch(o, setting, precision)
    for precision in o.precisions:
        train_mixtape(o, setting, precision, f"mixtape_{precision}.txt")
        train_mixtape(o, setting, precision, f"mixtape_{precision}_again.txt")
    return compare(o)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "train", "compare"])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--program", help="the binary parity_train")
    parser.add_argument("--config", choices=CONFIGS, default="small")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", default="", help="any text: other weights and tokens")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--precisions", type=lambda s: s.split(","), default=["fp32", "bf16", "fp16"])
    parser.add_argument("--mode", choices=["eager", "captured"], default="eager")
    parser.add_argument("--slack", type=float, default=1.5)
    o = parser.parse_args()
    setting = dataclasses.replace(CONFIGS[o.config], steps=o.steps)
    if o.action == "run" and not o.program:
        parser.error("run needs --program")
    if o.action == "train":
        o.out.mkdir(parents=True, exist_ok=True)
        train_torch(o, setting, o.precision)
        return 0
    return 0 if (run(o, setting) if o.action == "run" else compare(o)) else 1


if __name__ == "__main__":
    sys.exit(main())
