"""Losses and learning rates under MaxPScheduler and under static muP: residual MLPs and a pre-norm GPT.

Both train at several prefactors, from the same initial weights and on the same batches for a seed. Printed are the mean
loss of the last 20 steps with its standard error over seeds, and the smallest and largest learning rate of any layer in
any step over static muP's. The second command takes ten minutes of one core.

    PYTHONPATH=. python benchmarks/max_p.py mlp --blocks 2
    PYTHONPATH=. python benchmarks/max_p.py gpt --blocks 24 --seeds 3 --prefactors 0.0125,0.025,0.05
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
from torch import Tensor, nn
from trainings import digits, mean_and_error, options

from ignite_monitor.scaling import MaxPScheduler, Parametrization, parametrize

LENGTH, CHARACTERS, HEADS = 32, 64, 4
METHODS = ("static muP", "MaxPScheduler")


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
        self.blocks = nn.Sequential(*(block for _ in range(blocks) for block in (AttentionBlock(n), MLPBlock(n, 4))))
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
        x, y = digits(8.0)
        for _ in range(steps):
            rows = torch.randint(len(x), (64,), generator=generator)
            yield x[rows] - 1, y[rows]
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


def train(kind: str, parametrization: Parametrization, steps: int, seed: int, measured: bool) -> list[float]:
    """Mean loss of the last 20 steps, and the smallest and largest ratio of a learning rate to static muP's."""
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
    return [loss if math.isfinite(loss) else 99.0, min(ratios), max(ratios)]


def main() -> None:
    parser = options(__doc__, blocks=2, width=64, steps=150, seeds=6)
    parser.add_argument("kind", choices=("mlp", "gpt"))
    parser.add_argument("--prefactors", default="0.01,0.02,0.03,0.05,0.1,0.2,0.3")
    args = parser.parse_args()
    name = f"{args.kind}, {args.blocks} blocks, width {args.width}, {args.steps} steps"
    starts = [make(args.kind, args.blocks, args.width, seed) for seed in range(args.seeds)]
    best = {}
    for method in METHODS:
        results = []
        for prefactor in map(float, args.prefactors.split(",")):
            runs = []
            for seed, start in enumerate(starts):
                parametrization = copy.deepcopy(start)
                parametrization.lr_prefactor = prefactor
                runs.append(train(args.kind, parametrization, args.steps, seed + 10, method == "MaxPScheduler"))
            losses, low, high = zip(*runs, strict=True)
            results.append((statistics.fmean(losses), prefactor, min(low), max(high), losses))
            print(f"  {method} at {prefactor:g}: loss {mean_and_error(losses)}", flush=True)
        _, prefactor, low, high, best[method] = min(results)
        print(
            f"{name}: {method} {mean_and_error(best[method])} at {prefactor:g}, learning rates {low:.3g} to {high:.3g} "
            "times static muP's"
        )
    differences = [measured - static for static, measured in zip(*best.values(), strict=True)]
    print(f"{name}: MaxPScheduler less static muP by seed: {mean_and_error(differences)}")


if __name__ == "__main__":
    main()
