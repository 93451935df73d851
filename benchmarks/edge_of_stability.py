"""How long before the loss rises CurvatureHandler sees that the learning rate is too large, over many seeds.

Small trainings go 100 iterations at a learning rate that suits them; from there it grows by 4 % in each. The loss has
risen where that of 512 items exceeds twice its least so far, and does so in each of the next 10 iterations. It is seen
where the curvature (of Adam the preconditioned) exceeds a part of the limit in two looks of three, one look in four
iterations, each at the batch of that iteration. The lead is the number of iterations from the second of these looks to
the rise. Beside it stands how many of the same trainings are told so whose learning rate stays, 300 iterations long.

It takes six minutes of one core.

    PYTHONPATH=. python benchmarks/edge_of_stability.py [--seeds 10] [--only "mlp, SGD" ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from ignite.engine import Engine, Events
from noise_scale import loss_of, make

from ignite_monitor import CurvatureHandler

FIRST, GROWTH, LAST, EVERY = 100, 1.04, 300, 4
PARTS = (0.2, 0.3, 0.5, 1.0)


class Case(NamedTuple):
    """A training: the batch size and the optimizer."""

    size: int
    optimizer: Callable[[Any], torch.optim.Optimizer]


CASES = {
    "mlp, SGD, all items": Case(1797, lambda parameters: torch.optim.SGD(parameters, 0.1)),
    "mlp, SGD": Case(64, lambda parameters: torch.optim.SGD(parameters, 0.1)),
    "mlp, momentum": Case(64, lambda parameters: torch.optim.SGD(parameters, 0.03, momentum=0.9)),
    "mlp, AdamW": Case(64, lambda parameters: torch.optim.AdamW(parameters, 3e-3)),
    "cnn, SGD": Case(64, lambda parameters: torch.optim.SGD(parameters, 0.05)),
    "gpt, AdamW": Case(16, lambda parameters: torch.optim.AdamW(parameters, 3e-3)),
}


class Run(NamedTuple):
    """When the loss rose, and what part of the limit the curvature was at each look."""

    rise: int | None
    shares: dict[int, float]


def train(name: str, seed: int, grows: bool) -> Run:
    case = CASES[name]
    torch.manual_seed(seed)
    model, x, y = make(name)
    optimizer = case.optimizer(model.parameters())
    (group,) = optimizer.param_groups
    generator = torch.Generator().manual_seed(seed)
    least, above = float("inf"), 0

    def batch_loss(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return loss_of(model(x[rows]), y[rows])

    def step(engine: Engine, rows: torch.Tensor) -> None:
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
    def look(engine: Engine) -> None:
        values = {key.rpartition("/")[2]: float(value) for key, value in monitor.metrics.items()}
        largest = values.get("hessian_max_eigenvalue_preconditioned", values.get("hessian_max_eigenvalue"))
        if largest is not None and "stability_threshold" in values:
            shares[engine.state.iteration] = largest / values["stability_threshold"]

    batches = (torch.randint(len(x), (case.size,), generator=generator) for _ in range(LAST))
    trainer.run(batches, max_epochs=1, epoch_length=LAST)
    return Run(trainer.state.iteration - 10 if above > 10 else None, shares)


def seen(shares: dict[int, float], part: float) -> int | None:
    """The iteration from which on two of three looks are above a part of the limit."""
    steps, above = list(shares), [share > part for share in shares.values()]
    return next((steps[i] for i in range(1, len(steps)) if sum(above[max(0, i - 2) : i + 1]) >= 2), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--only", nargs="+", choices=CASES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    head = [
        "training",
        "part of the limit",
        "rose",
        "seen before",
        "lead: median",
        "quartiles",
        "range",
        "told wrongly",
    ]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    for name in args.only or CASES:
        growing = [train(name, seed, grows=True) for seed in range(args.seeds)]
        steady = [train(name, seed, grows=False) for seed in range(args.seeds)]
        for part in PARTS:
            rose = [run for run in growing if run.rise is not None]
            leads = sorted((run.rise or 0) - (seen(run.shares, part) or LAST) for run in rose)
            wrong = sum(seen(run.shares, part) is not None for run in steady)
            before = sum(lead > 0 for lead in leads)
            cells = [name, part, f"{len(rose)} of {len(growing)}", f"{before} of {len(rose)}"]
            if leads:
                quarter = leads[len(leads) // 4], leads[-1 - len(leads) // 4]
                cells += [f"{median(leads):g}", "{} to {}".format(*quarter), f"{leads[0]} to {leads[-1]}"]
            else:
                cells += ["-"] * 3
            print(f"| {' | '.join(map(str, [*cells, f'{wrong} of {len(steady)}']))} |", flush=True)


if __name__ == "__main__":
    main()
