"""Iterations between a warning of CurvatureHandler and the rise of the loss when the learning rate grows.

Small runs train 100 iterations at a suitable learning rate, which then grows by 4 % per iteration. The loss has risen
when that of 512 items exceeds twice its minimum in 10 consecutive iterations. The warning comes when the curvature (for
Adam the preconditioned one) exceeds a fraction of the stability threshold in two of three measurements, one in four
iterations, on the batch of that iteration. The lead is the number of iterations from the warning to the rise. The last
column counts warnings in the same runs with a constant learning rate, over 300 iterations.

It takes six minutes of one core.

    PYTHONPATH=. python benchmarks/edge_of_stability.py [--seeds 8] [--only "mlp, SGD" ...]
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from ignite.engine import Engine, Events
from torch import Tensor, nn
from trainings import digits, loss_of, options, print_header, print_row

from ignite_monitor import CurvatureHandler

FIRST, GROWTH, LAST, EVERY = 100, 1.04, 300, 4
PARTS = (0.2, 0.3, 1.0)


class Case(NamedTuple):
    """Batch size and optimizer of a run."""

    size: int
    optimizer: Callable[[Any], torch.optim.Optimizer]


CASES = {
    "mlp, SGD, all items": Case(1797, lambda parameters: torch.optim.SGD(parameters, 0.1)),
    "mlp, SGD": Case(64, lambda parameters: torch.optim.SGD(parameters, 0.1)),
    "mlp, momentum": Case(64, lambda parameters: torch.optim.SGD(parameters, 0.03, momentum=0.9)),
    "mlp, AdamW": Case(64, lambda parameters: torch.optim.AdamW(parameters, 3e-3)),
    "cnn, SGD": Case(64, lambda parameters: torch.optim.SGD(parameters, 0.05)),
}


def make(name: str) -> nn.Module:
    if name.startswith("mlp"):
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    first, second = nn.Conv2d(1, 8, 3, padding=1, stride=2), nn.Conv2d(8, 16, 3, padding=1, stride=2)
    shape = nn.Unflatten(1, (1, 8, 8))
    return nn.Sequential(shape, first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(64, 10))


class Run(NamedTuple):
    """Iteration at which the loss rose, and curvature over the stability threshold per iteration."""

    rise: int | None
    shares: dict[int, float]


def train(name: str, seed: int, grows: bool) -> Run:
    case = CASES[name]
    torch.manual_seed(seed)
    model, (x, y) = make(name), digits()
    optimizer = case.optimizer(model.parameters())
    (group,) = optimizer.param_groups
    generator = torch.Generator().manual_seed(seed)
    least, above = float("inf"), 0

    def batch_loss(model: nn.Module, rows: Tensor) -> Tensor:
        return loss_of(model(x[rows]), y[rows])

    def step(engine: Engine, rows: Tensor) -> None:
        nonlocal least, above
        group["lr"] *= GROWTH if grows and engine.state.iteration > FIRST else 1.0
        optimizer.zero_grad()
        batch_loss(model, rows).backward()
        with torch.no_grad():
            loss = float(loss_of(model(x[:512]), y[:512]))
        above = 0 if loss <= 2 * least else above + 1
        least = min(least, loss)
        if above > 10:
            engine.terminate()
        optimizer.step()

    trainer = Engine(step)
    monitor = CurvatureHandler(model, optimizer, loss=batch_loss)
    monitor.attach(trainer, Events.ITERATION_STARTED(every=EVERY))
    shares: dict[int, float] = {}

    @trainer.on(Events.ITERATION_COMPLETED(every=EVERY))
    def read(engine: Engine) -> None:
        values = {key.rpartition("/")[2]: float(value) for key, value in monitor.metrics.items()}
        largest = values.get("hessian_max_eigenvalue_preconditioned", values.get("hessian_max_eigenvalue"))
        if largest is not None and "stability_threshold" in values:
            shares[engine.state.iteration] = largest / values["stability_threshold"]

    batches = (torch.randint(len(x), (case.size,), generator=generator) for _ in range(LAST))
    trainer.run(batches, max_epochs=1, epoch_length=LAST)
    return Run(trainer.state.iteration - 10 if above > 10 else None, shares)


def seen(shares: dict[int, float], part: float) -> int | None:
    """The first iteration at which two of three measurements exceed a fraction of the threshold."""
    steps, above = list(shares), [share > part for share in shares.values()]
    return next((steps[i] for i in range(1, len(steps)) if sum(above[max(0, i - 2) : i + 1]) >= 2), None)


def main() -> None:
    args = options(__doc__, CASES, seeds=8).parse_args()
    print_header("run", "fraction", "loss rose", "warned before", "lead: median", "range", "false warnings")
    for name in args.only:
        growing = [train(name, seed, grows=True) for seed in range(args.seeds)]
        steady = [train(name, seed, grows=False) for seed in range(args.seeds)]
        for part in PARTS:
            rose = [run for run in growing if run.rise is not None]
            leads = sorted((run.rise or 0) - (seen(run.shares, part) or LAST) for run in rose)
            wrong = sum(seen(run.shares, part) is not None for run in steady)
            before = sum(lead > 0 for lead in leads)
            lead = [f"{median(leads):g}", f"{leads[0]} to {leads[-1]}"] if leads else ["-", "-"]
            counts = f"{len(rose)} of {len(growing)}", f"{before} of {len(rose)}"
            print_row(name, part, *counts, *lead, f"{wrong} of {len(steady)}")


if __name__ == "__main__":
    main()
