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

# Changes the gradient of one iteration, given model, norm and whether the batch is bad; returns whether to step.
Reaction = Callable[[nn.Module, float, bool], bool]


def nothing(model: nn.Module, norm: float, bad: bool) -> bool:
    return True


def oracle(model: nn.Module, norm: float, bad: bool) -> bool:
    return not bad


def clip_to_one(model: nn.Module, norm: float, bad: bool) -> bool:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return True


def zclip() -> Reaction:
    clipped = ZClip()

    def react(model: nn.Module, norm: float, bad: bool) -> bool:
        limit = clipped(norm)
        for parameter in model.parameters() if limit < norm else ():
            if parameter.grad is not None:
                parameter.grad.mul_(limit / norm)
        return True

    return react


# Name -> function that makes the reaction, and arguments of GradMonitor.
REACTIONS: dict[str, tuple[Callable[[], Reaction], dict[str, Any]]] = {
    "nothing": (lambda: nothing, {}),
    "`clip_grad_norm_(1.0)`": (lambda: clip_to_one, {}),
    "ZClip": (zclip, {}),
    "skip by the default rule": (lambda: nothing, {"on_spike": "skip"}),
    "skip by `RobustThreshold()`": (lambda: nothing, {"on_spike": "skip", "threshold": RobustThreshold()}),
    "clip to the threshold": (lambda: nothing, {"on_spike": "clip"}),
    "oracle's skip": (lambda: oracle, {}),
}


def final_loss(training: Training, seed: int, iterations: int, rate: float, name: str) -> float:
    """The held-out loss at the end of one run."""
    torch.manual_seed(seed)
    draw = batches(training, torch.Generator().manual_seed(seed), end=0.8)
    draw_held_out = batches(training, torch.Generator().manual_seed(0), start=0.8)
    model, noise = make_model(training), torch.Generator().manual_seed(seed)
    (make_reaction, arguments), optimizer = REACTIONS[name], make_optimizer(training, model)
    react = make_reaction()
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
        if react(model, float(engine.state.grad_norm), bad):
            optimizer.step()

    trainer = Engine(step)
    GradMonitor(model, optimizer, **arguments).attach(trainer)
    trainer.run(range(iterations), max_epochs=1)
    model.eval()
    with torch.no_grad():
        held_out = (draw_held_out() for _ in range(HELD_OUT))
        return fmean(loss_of(model(inputs), labels).item() for inputs, labels in held_out)


def cell(rises: list[float]) -> str:
    """Mean and standard error of the finite values, and the number of the others."""
    lost = len(rises) - sum(map(math.isfinite, rises))
    return f"{mean_and_error(rises, sign='+')}{f', {lost} of {len(rises)} lost' if lost else ''}"


def main() -> None:
    args = options(__doc__, (training.name for training in TRAININGS), seeds=3, iterations=300).parse_args()
    if args.quick:
        args.only, args.seeds, args.iterations = ["mlp"], 1, 90
    print_header("training", "bad batches", *REACTIONS)
    for training in (training for training in TRAININGS if training.name in args.only):
        clean = [final_loss(training, seed, args.iterations, 0.0, "nothing") for seed in range(args.seeds)]
        for rate in RATES:
            cells = []
            for name in REACTIONS:
                rises = [
                    0.0
                    if rate == 0.0 and name in ("nothing", "oracle's skip")
                    else final_loss(training, seed, args.iterations, rate, name) - clean[seed]
                    for seed in range(args.seeds)
                ]
                cells.append(cell(rises))
            print_row(f"{training.name} ({fmean(clean):.3f})", f"{100 * rate:g} %", *cells)


if __name__ == "__main__":
    main()
