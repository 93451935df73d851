"""Held-out loss after bad batches, with and without reactions to them.

In small training runs 0, 1 % or 5 % of the batches are bad (random labels, a constant input, or the loss times 10).
Each run is repeated with seven reactions, on the same batches from the same initial weights. The table has the held-out
loss at the end minus that of the run without bad batches and without a reaction, in nats: mean and standard error over
the seeds. A run whose loss is not a number at the end is lost and counted separately.

    python benchmarks/bad_batches.py [--seeds 3] [--iterations 300] [--only cnn mlp ...]
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch
from ignite.engine import Engine
from torch import nn
from trainings import (
    Training,
    ZClip,
    batches,
    loss_of,
    make_model,
    make_optimizer,
    mean_and_error,
    options,
    print_header,
    print_row,
    spoil,
)

from ignite_monitor import GradMonitor, RobustThreshold

TRAININGS = (
    Training("gpt_adamw", 32, 1, 6, "AdamW", 3e-3, 50, "cosine", {"weight_decay": 0.1}),
    Training("gpt_sgd", 32, 1, 6, "SGD", 0.2, 50, "cosine", {"momentum": 0.9}),
    Training("cnn", 8, 2, 16, "AdamW", 2e-3, 0, "cosine"),
    Training("mlp", 64, 2, 16, "SGD", 0.1, 0, "cosine"),
)
RATES = (0.0, 0.01, 0.05)
BAD = ("random_labels", "constant_input", "loss_x10")
FIRST = 50
HELD_OUT = 100


def clip_to_one(model: nn.Module, norm: float) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def zclip() -> Callable[[nn.Module, float], None]:
    clipped = ZClip()

    def react(model: nn.Module, norm: float) -> None:
        limit = clipped(norm)
        for parameter in model.parameters() if limit < norm else ():
            if parameter.grad is not None:
                parameter.grad.mul_(limit / norm)

    return react


NOTHING, ORACLE = "nothing", "oracle's skip"
# Name -> function that makes a change of the gradients, and arguments of GradMonitor.
REACTIONS: dict[str, tuple[Callable[[], Callable[[nn.Module, float], None]] | None, dict[str, Any]]] = {
    NOTHING: (None, {}),
    "`clip_grad_norm_(1.0)`": (lambda: clip_to_one, {}),
    "ZClip": (zclip, {}),
    "skip by the default rule": (None, {"on_spike": "skip"}),
    "skip by `RobustThreshold()`": (None, {"on_spike": "skip", "threshold": RobustThreshold()}),
    "clip to the threshold": (None, {"on_spike": "clip"}),
    ORACLE: (None, {}),
}


def final_loss(training: Training, seed: int, iterations: int, rate: float, name: str) -> float:
    """The held-out loss at the end of one run."""
    torch.manual_seed(seed)
    draw = batches(training, torch.Generator().manual_seed(seed), end=0.8)
    draw_held_out = batches(training, torch.Generator().manual_seed(0), start=0.8)
    model, noise = make_model(training), torch.Generator().manual_seed(seed)
    (make_reaction, arguments), optimizer = REACTIONS[name], make_optimizer(training, model)
    react = make_reaction() if make_reaction else lambda model, norm: None
    chance = random.Random(seed)
    # Fewer bad batches are a part of more.
    luck = [(chance.random(), chance.choice(BAD)) for _ in range(iterations)]

    def step(engine: Engine, iteration: int) -> None:
        inputs, labels = draw()
        share, kind = luck[iteration]
        bad = iteration >= FIRST and share < rate
        if bad:
            inputs, labels = spoil(kind, inputs, labels, training.classes, noise)
        training.set_lr(optimizer, iteration, iterations)
        optimizer.zero_grad()
        (loss_of(model(inputs), labels) * (10.0 if bad and kind == "loss_x10" else 1.0)).backward()
        react(model, float(engine.state.grad_norm))
        if not (bad and name == ORACLE):
            optimizer.step()

    trainer = Engine(step)
    GradMonitor(model, optimizer, **arguments).attach(trainer)
    trainer.run(range(iterations), max_epochs=1)
    model.eval()
    with torch.no_grad():
        held_out = (draw_held_out() for _ in range(HELD_OUT))
        return fmean(loss_of(model(inputs), labels).item() for inputs, labels in held_out)


def main() -> None:
    args = options(__doc__, (training.name for training in TRAININGS), seeds=3, iterations=300).parse_args()
    if args.quick:
        args.only, args.seeds, args.iterations = ["mlp"], 1, 90
    print_header("training", "bad batches", *REACTIONS)
    for training in (training for training in TRAININGS if training.name in args.only):
        seeds = range(args.seeds)
        clean = [final_loss(training, seed, args.iterations, 0.0, NOTHING) for seed in seeds]
        for rate in RATES[-1:] if args.quick else RATES:
            cells = []
            for name in REACTIONS:
                rises = [final_loss(training, seed, args.iterations, rate, name) - clean[seed] for seed in seeds]
                lost = len(rises) - sum(map(math.isfinite, rises))
                cells.append(mean_and_error(rises, sign="+") + f", {lost} of {len(rises)} lost" * bool(lost))
            print_row(f"{training.name} ({fmean(clean):.3f})", f"{rate:.0%}", *cells)


if __name__ == "__main__":
    main()
