"""Held-out loss after bad batches, with and without reactions to them.

In small training runs 0, 1 % or 5 % of the batches are bad (random labels, a constant input, or the loss times 10).
Each run is repeated with seven reactions, on the same batches from the same initial weights. The table has the held-out
loss at the end minus that of the run without bad batches and without a reaction, in nats: mean and standard error over
the seeds. A run whose loss is not a number at the end is lost and counted separately.

    PYTHONPATH=. python benchmarks/bad_batches.py
"""

from __future__ import annotations

import math
import random
from statistics import fmean
from typing import Any

import torch
from ignite.engine import Engine
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
SEEDS, ITERATIONS, FIRST, HELD_OUT = 3, 300, 50, 100  # the first bad batch, and the number of held-out batches


NOTHING, CLIP, ZCLIP, ORACLE = "nothing", "`clip_grad_norm_(1.0)`", "ZClip", "oracle's skip"
REACTIONS: dict[str, dict[str, Any]] = {  # name -> arguments of GradMonitor
    NOTHING: {},
    CLIP: {},
    ZCLIP: {},
    "skip by the default rule": {"on_spike": "skip"},
    "skip by `RobustThreshold()`": {"on_spike": "skip", "threshold": RobustThreshold()},
    "clip to the threshold": {"on_spike": "clip"},
    ORACLE: {},
}


def final_loss(training: Training, seed: int, iterations: int, rate: float, name: str) -> float:
    """The held-out loss at the end of one run."""
    torch.manual_seed(seed)
    draw = batches(training, torch.Generator().manual_seed(seed), end=0.8)
    draw_held_out = batches(training, torch.Generator().manual_seed(0), start=0.8)
    model, noise = make_model(training), torch.Generator().manual_seed(seed)
    optimizer, limits = make_optimizer(training, model), {CLIP: lambda norm: 1.0, ZCLIP: ZClip()}
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
        if name in limits:
            limit = limits[name](float(engine.state.grad_norm))
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        if not (bad and name == ORACLE):
            optimizer.step()

    trainer = Engine(step)
    GradMonitor(model, optimizer, **REACTIONS[name]).attach(trainer)
    trainer.run(range(iterations), max_epochs=1)
    model.eval()
    with torch.no_grad():
        held_out = (draw_held_out() for _ in range(HELD_OUT))
        return fmean(loss_of(model(inputs), labels).item() for inputs, labels in held_out)


def main() -> None:
    trainings, rates, seeds, iterations = TRAININGS, RATES, range(SEEDS), ITERATIONS
    if options(__doc__).parse_args().quick:
        trainings, rates, seeds, iterations = TRAININGS[-1:], RATES[-1:], range(1), 90
    print_header("training", "bad batches", *REACTIONS)
    for training in trainings:
        clean = [final_loss(training, seed, iterations, 0.0, NOTHING) for seed in seeds]
        for rate in rates:
            cells = []
            for name in REACTIONS:
                rises = [final_loss(training, seed, iterations, rate, name) - clean[seed] for seed in seeds]
                lost = len(rises) - sum(map(math.isfinite, rises))
                cells.append(mean_and_error(rises, sign="+") + f", {lost} of {len(rises)} lost" * bool(lost))
            print_row(f"{training.name} ({fmean(clean):.3f})", f"{rate:.0%}", *cells)


if __name__ == "__main__":
    main()
