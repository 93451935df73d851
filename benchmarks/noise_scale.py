"""Coverage of the interval of GradientNoiseScaleHandler in small training runs over many seeds.

The exact noise scale comes from the gradients of all single items of the data at the weights of some steps, and is
interpolated linearly between them. The items of a batch are drawn from all items or, "shuffled", without replacement
within an epoch. Each step uses four micro-batches. Every tenth step with a value, the interval is compared with

- "averaged": the ratio of the exact trace and the exact square, each averaged with the monitor's weights, which the
  interval estimates;
- "now": the exact noise scale of that step.

Errors are standard errors over the seeds. It takes five minutes of one core.

    PYTHONPATH=. python benchmarks/noise_scale.py [--seeds 10] [--iterations 400] [--only "mlp, SGD" ...]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

import torch
from ignite.engine import Engine, Events
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from trainings import Training, batches, digits, loss_of, make_model

from ignite_monitor import GradientNoiseScaleHandler

PARTS, EVERY = 4, 10
DECAYS = (0.99, 0.95)


class Case(NamedTuple):
    """A run: items per micro-batch, optimizer, and whether an epoch has every item once."""

    size: int
    optimizer: Callable[[Any], torch.optim.Optimizer]
    shuffled: bool = False


CASES = {
    "mlp, SGD": Case(8, lambda parameters: torch.optim.SGD(parameters, 0.1)),
    "mlp, SGD, shuffled": Case(8, lambda parameters: torch.optim.SGD(parameters, 0.1), shuffled=True),
    "cnn, momentum": Case(4, lambda parameters: torch.optim.SGD(parameters, 0.03, momentum=0.9)),
    "gpt, AdamW": Case(4, lambda parameters: torch.optim.AdamW(parameters, 3e-3)),
    "gpt, AdamW, shuffled": Case(4, lambda parameters: torch.optim.AdamW(parameters, 3e-3), shuffled=True),
}


def make(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A model and the inputs and labels of all items."""
    if name.startswith("gpt"):
        training = Training("gpt", 16, 1, 512, "AdamW", 3e-3)
        return make_model(training), *batches(training, torch.Generator().manual_seed(0))()
    x, y = digits()
    if name.startswith("mlp"):
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), x, y
    first, second = nn.Conv2d(1, 8, 3, padding=1, stride=2), nn.Conv2d(8, 16, 3, padding=1, stride=2)
    shape = nn.Unflatten(1, (1, 8, 8))
    return nn.Sequential(shape, first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(64, 10)), x, y


def exact(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Trace of the covariance of the gradients of all items, and squared norm of their mean."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss_of(functional_call(model, parameters, x[None]), y[None])

    squares, mean = 0.0, [torch.zeros_like(parameter, dtype=torch.float64) for parameter in parameters.values()]
    for rows in torch.arange(len(x)).split(256):
        with sdpa_kernel(SDPBackend.MATH):  # the others have no vmap
            single = list(vmap(grad(loss), (None, 0, 0))(parameters, x[rows], y[rows]).values())
        squares += sum(float(gradient.double().square().sum()) for gradient in single)
        mean = [total + gradient.double().sum(0) for total, gradient in zip(mean, single, strict=True)]
    signal = sum(float((total / len(x)).square().sum()) for total in mean)
    return squares / len(x) - signal, signal


def rows_of(items: int, size: int, shuffled: bool, generator: torch.Generator) -> Iterator[Tensor]:
    while True:
        if shuffled:
            yield from (rows for rows in torch.randperm(items, generator=generator).split(size) if len(rows) == size)
        else:
            yield torch.randint(items, (size,), generator=generator)


class Found(NamedTuple):
    """Results of one run: the fraction of steps with a value, the fraction of these per outcome, the median error."""

    known: float
    averaged: float
    too_low: float
    too_high: float
    now: float
    error: float


def measure(name: str, seed: int, iterations: int) -> list[Found]:
    """Train one run and return its results for every entry of ``DECAYS``."""
    case = CASES[name]
    torch.manual_seed(seed)
    model, x, y = make(name)
    optimizer = case.optimizer(model.parameters())
    known: dict[int, tuple[float, float]] = {}

    def step(engine: Engine, rows: Tensor) -> None:
        iteration = engine.state.iteration
        if iteration <= 20 or iteration % (5 if iteration < 100 else 10) == 0:
            known[iteration] = exact(model, x, y)
        optimizer.zero_grad()
        for part in rows.chunk(PARTS):
            (loss_of(model(x[part]), y[part]) / PARTS).backward()
        optimizer.step()

    trainer = Engine(step)
    monitors = {
        decay: GradientNoiseScaleHandler(model, optimizer, micro_batches=PARTS, decay=decay, prefix=f"noise_{decay}")
        for decay in DECAYS
    }
    published: dict[float, dict[int, dict[str, float]]] = {decay: {} for decay in DECAYS}
    for monitor in monitors.values():
        monitor.attach(trainer)

    @trainer.on(Events.ITERATION_COMPLETED(every=EVERY))
    def read(engine: Engine) -> None:
        for decay, monitor in monitors.items():
            values = {key.rpartition("/")[2]: float(value) for key, value in monitor.metrics.items()}
            published[decay][engine.state.iteration] = values

    draw = rows_of(len(x), PARTS * case.size, case.shuffled, torch.Generator().manual_seed(seed))
    trainer.run(draw, max_epochs=1, epoch_length=iterations)
    places, pairs = torch.tensor(list(known)), torch.tensor(list(known.values()), dtype=torch.float64)
    truth = between(torch.arange(1, iterations + 1), places, pairs)
    return [compare(published[decay], truth, decay) for decay in DECAYS]


def between(steps: Tensor, places: Tensor, heights: Tensor) -> Tensor:
    """Linear interpolation of ``heights`` at ``steps``."""
    right = torch.searchsorted(places, steps).clamp(1, len(places) - 1)
    part = (steps - places[right - 1]) / (places[right] - places[right - 1])
    return torch.lerp(heights[right - 1], heights[right], part.double()[:, None])


def compare(published: dict[int, dict[str, float]], truth: Tensor, decay: float) -> Found:
    rows = []
    for iteration, values in published.items():
        if "value" in values:
            past = truth[:iteration]
            trace, signal = (decay ** torch.arange(iteration - 1, -1, -1)).double() @ past
            target, now = float(trace / signal), float(past[-1, 0] / past[-1, 1])
            low, high = values["low"], values["high"]
            rows.append((low <= target <= high, high < target, low > target, low <= now <= high))
            rows[-1] += (abs(values["value"] / target - 1),)
    if not rows:
        return Found(0.0, *[math.nan] * 5)
    *shares, errors = zip(*rows, strict=True)
    return Found(len(rows) / len(published), *(fmean(map(float, share)) for share in shares), median(errors))


def cell(values: list[float]) -> str:
    values = [value for value in values if not math.isnan(value)]
    return f"{fmean(values):.2f} ± {stdev(values) / len(values) ** 0.5:.2f}" if len(values) > 1 else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=400)
    parser.add_argument("--only", nargs="+", choices=CASES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    head = ["training", "decay", "with a value", "averaged inside", "above", "below", "now inside", "median error"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    for name in args.only or CASES:
        runs = [measure(name, seed, args.iterations) for seed in range(args.seeds)]
        for decay, found in zip(DECAYS, zip(*runs, strict=True), strict=True):
            cells = [cell(list(values)) for values in zip(*found, strict=True)]
            print(f"| {name} | {decay} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
