"""Losses and learning rates under MaxPScheduler and under static muP: residual MLPs and a pre-norm GPT.

Each method is trained at several prefactors and seeds. Printed are the mean loss of the last 20 steps with its standard
error over seeds, and the smallest and largest learning rate of any layer in any step over static muP's.

    PYTHONPATH=. python benchmarks/max_p.py mlp --blocks 2
    PYTHONPATH=. python benchmarks/max_p.py gpt --blocks 24 --steps 150 --prefactors 0.05,0.1,0.2
"""

from __future__ import annotations

import argparse
import ast
import collections
import copy
import inspect
import math
import statistics
import typing
from collections import Counter
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from sklearn.datasets import load_digits
from torch import Tensor, nn

from ignite_monitor.scaling import MaxPScheduler, Parametrization, parametrize

LENGTH, CHARACTERS, HEADS = 32, 64, 4


class MLPBlock(nn.Module):
    """A pre-norm residual block."""

    def __init__(self, n: int, factor: int = 2) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(n), nn.Linear(n, factor * n), nn.Linear(factor * n, n)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class AttentionBlock(nn.Module):
    """Causal attention with scores that are divided by the head's dimension."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(n), nn.Linear(n, 3 * n, bias=False), nn.Linear(n, n, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=8 / q.shape[-1])
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """A language model of characters."""

    def __init__(self, n: int, blocks: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(CHARACTERS, n), nn.Embedding(LENGTH, n)
        self.blocks = nn.Sequential(*(each for _ in range(blocks) for each in (AttentionBlock(n), MLPBlock(n, 4))))
        self.norm, self.head = nn.LayerNorm(n), nn.Linear(n, CHARACTERS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def make_mlp(n: int, blocks: int) -> nn.Module:
    layers = [MLPBlock(n) for _ in range(blocks)]
    return nn.Sequential(nn.Linear(64, n), *layers, nn.LayerNorm(n), nn.Linear(n, 10))


def batches(kind: str, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    if kind == "mlp":
        digits = load_digits()
        x, y = torch.tensor(digits.data, dtype=torch.float32) / 8 - 1, torch.tensor(digits.target)
        for _ in range(steps):
            rows = torch.randint(len(x), (64,), generator=generator)
            yield x[rows], y[rows]
        return
    text = "".join(inspect.getsource(module) for module in (argparse, ast, collections, typing, inspect))
    codes = {character: i % CHARACTERS for i, (character, _) in enumerate(Counter(text).most_common())}
    data = torch.tensor([codes[character] for character in text])
    for _ in range(steps):
        rows = torch.randint(len(data) - LENGTH - 1, (16, 1), generator=generator) + torch.arange(LENGTH + 1)
        yield data[rows][:, :-1], data[rows][:, 1:]


def make(kind: str, blocks: int, width: int, seed: int) -> Parametrization:
    torch.manual_seed(seed)
    x = torch.zeros(1, 64) if kind == "mlp" else torch.zeros(1, LENGTH, dtype=torch.long)
    kinds = {"mlp": make_mlp, "gpt": GPT}
    return parametrize(lambda n: kinds[kind](n, blocks), (16, width), sample_input=x)


def train(
    kind: str, parametrization: Parametrization, steps: int, seed: int, measured: bool
) -> tuple[float, float, float]:
    """Loss of the last 20 steps, and the smallest and largest ratio of a learning rate to static muP's."""
    model = parametrization.model
    optimizer = torch.optim.Adam(parametrization.param_groups)
    static = [group["lr"] for group in optimizer.param_groups]
    losses: list[float] = []
    ratios: list[float] = []

    def train_step(engine: Engine, batch: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    def compare() -> None:
        ratios.extend(group["lr"] / lr for group, lr in zip(optimizer.param_groups, static, strict=True))

    trainer = Engine(train_step)
    if measured:
        MaxPScheduler(parametrization, optimizer, solve_interval=5).attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, compare)
    trainer.run(list(batches(kind, steps, seed)), max_epochs=1)
    loss = statistics.fmean(losses[-20:])
    return loss if math.isfinite(loss) else 99.0, min(ratios), max(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description="MaxPScheduler against static muP.")
    parser.add_argument("kind", choices=("mlp", "gpt"))
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prefactors", default="0.03,0.1,0.3")
    args = parser.parse_args()
    torch.set_num_threads(1)
    starts = [make(args.kind, args.blocks, args.width, seed) for seed in range(args.seeds)]
    for method in ("static muP", "MaxPScheduler"):
        results = []
        for prefactor in map(float, args.prefactors.split(",")):
            runs = []
            for seed, start in enumerate(starts):
                parametrization = copy.deepcopy(start)
                parametrization.lr_prefactor = prefactor
                runs.append(train(args.kind, parametrization, args.steps, seed + 10, method != "static muP"))
            losses, low, high = zip(*runs, strict=True)
            error = statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else math.nan
            results.append((statistics.fmean(losses), error, prefactor, min(low), max(high)))
            print(f"  {method} at {prefactor:g}: loss {results[-1][0]:.3f} ± {error:.3f}", flush=True)
        loss, error, prefactor, low, high = min(results)
        print(
            f"{args.kind}, {args.blocks} blocks, width {args.width}, {args.steps} steps: {method} {loss:.3f} "
            f"± {error:.3f} at {prefactor:g}, learning rates {low:.3g} to {high:.3g} times static muP's",
            flush=True,
        )


if __name__ == "__main__":
    main()
