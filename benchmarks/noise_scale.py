"""How often the interval of GradientNoiseScaleHandler holds the noise scale, in small trainings over many seeds.

The exact noise scale comes from the gradients of all single items of the data, at the weights of some steps, in between
on a line. The items of a batch are drawn from all, or "shuffled" from those that are left in the epoch, as a DataLoader
does. Each step is made from four micro-batches. Compared are, every tenth step where there is a value,

- "averaged": the ratio of the exact trace and the exact square, each averaged with the monitor's weights, which is what
  the interval is about;
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
from record_norms import Training, batches, build
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ignite_monitor import GradientNoiseScaleHandler

PARTS, EVERY = 4, 10
DECAYS = (0.99, 0.95)


class Case(NamedTuple):
    """A training: the items of a micro-batch, the optimizer, and whether an epoch has each item once."""

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
    """A model, and the inputs and labels of all items."""
    if name.startswith("gpt"):
        training = Training("gpt", 16, 1, 512, "AdamW", 3e-3)
        return build(training), *batches(training, torch.Generator().manual_seed(0))()
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16.0, dtype=torch.float32), torch.tensor(digits.target)
    if name.startswith("mlp"):
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), x, y
    first, second = nn.Conv2d(1, 8, 3, padding=1, stride=2), nn.Conv2d(8, 16, 3, padding=1, stride=2)
    shape = nn.Unflatten(1, (1, 8, 8))
    return nn.Sequential(shape, first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(64, 10)), x, y


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def exact(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """The trace of the covariance of the gradients of all items, and the square of their mean."""
    parameters = {name: each.detach() for name, each in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss_of(functional_call(model, parameters, x[None]), y[None])

    squares, mean = 0.0, [torch.zeros_like(each, dtype=torch.float64) for each in parameters.values()]
    for rows in torch.arange(len(x)).split(256):
        with sdpa_kernel(SDPBackend.MATH):  # the others have no vmap
            single = list(vmap(grad(loss), (None, 0, 0))(parameters, x[rows], y[rows]).values())
        squares += sum(float(each.double().square().sum()) for each in single)
        mean = [old + each.double().sum(0) for old, each in zip(mean, single, strict=True)]
    signal = sum(float((each / len(x)).square().sum()) for each in mean)
    return squares / len(x) - signal, signal


def rows_of(items: int, size: int, shuffled: bool, generator: torch.Generator) -> Iterator[Tensor]:
    while True:
        if shuffled:
            yield from (rows for rows in torch.randperm(items, generator=generator).split(size) if len(rows) == size)
        else:
            yield torch.randint(items, (size,), generator=generator)


class Found(NamedTuple):
    """Of one training: the share of looks with a value, and of these that with each outcome; the median error."""

    known: float
    averaged: float
    too_low: float
    too_high: float
    now: float
    error: float


def measure(name: str, seed: int, iterations: int) -> list[Found]:
    """What there is with each of ``DECAYS``."""
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
    def look(engine: Engine) -> None:
        for decay, monitor in monitors.items():
            values = {key.rpartition("/")[2]: float(value) for key, value in monitor.metrics.items()}
            published[decay][engine.state.iteration] = values

    draw = rows_of(len(x), PARTS * case.size, case.shuffled, torch.Generator().manual_seed(seed))
    trainer.run(draw, max_epochs=1, epoch_length=iterations)
    places, pairs = torch.tensor(list(known)), torch.tensor(list(known.values()), dtype=torch.float64)
    truth = between(torch.arange(1, iterations + 1), places, pairs)
    return [judged(published[decay], truth, decay) for decay in DECAYS]


def between(steps: Tensor, places: Tensor, heights: Tensor) -> Tensor:
    """What is known at some steps, in between on a line."""
    right = torch.searchsorted(places, steps).clamp(1, len(places) - 1)
    part = (steps - places[right - 1]) / (places[right] - places[right - 1])
    return torch.lerp(heights[right - 1], heights[right], part.double()[:, None])


def judged(published: dict[int, dict[str, float]], truth: Tensor, decay: float) -> Found:
    rows = []
    for iteration, each in published.items():
        if "value" in each:
            past = truth[:iteration]
            trace, signal = (decay ** torch.arange(iteration - 1, -1, -1)).double() @ past
            target, now = float(trace / signal), float(past[-1, 0] / past[-1, 1])
            low, high = each["low"], each["high"]
            rows.append((low <= target <= high, high < target, low > target, low <= now <= high))
            rows[-1] += (abs(each["value"] / target - 1),)
    if not rows:
        return Found(0.0, *[math.nan] * 5)
    *shares, errors = zip(*rows, strict=True)
    return Found(len(rows) / len(published), *(fmean(map(float, share)) for share in shares), median(errors))


def cell(values: list[float]) -> str:
    values = [each for each in values if not math.isnan(each)]
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
            cells = [cell(list(each)) for each in zip(*found, strict=True)]
            print(f"| {name} | {decay} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
