"""Iterations between the warnings of several signals and the doubling of the loss when the learning rate grows.

Small runs train 300 iterations at a suitable learning rate, which then grows by 2 or 5 % per iteration for up to
300 iterations, or stays as it is (the control). The loss has doubled when the mean of 10 losses exceeds twice the
smallest such mean. A fifth of the labels of the CNN is random, so that its loss does not approach 0. Every signal but
the last two is followed by a ``DriftMonitor`` with its defaults. The last two are spikes of ``GradMonitor``, and a
curvature (for AdamW the preconditioned one) above half the stability threshold in two of three measurements, one in
five iterations. In a control, warnings after iteration 150 are counted, all of them false alarms.

    PYTHONPATH=. python benchmarks/early_warning.py
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator
from statistics import median

import torch
from ignite.engine import Engine, Events
from torch import Tensor, nn
from trainings import Training, batches, loss_of, make_model, make_optimizer, options, print_header, print_row

import ignite_monitor as im

FIRST, WARMUP, LAST, EVERY, CONTROL = 300, 150, 600, 5, 1.0
GROWTHS, SEEDS = (1.02, 1.05), range(3)
TRAININGS = [
    Training("gpt, AdamW", 32, 2, 8, "AdamW", 3e-3),
    Training("gpt, SGD", 32, 2, 8, "SGD", 0.3),
    Training("cnn, AdamW", 8, 2, 64, "AdamW", 3e-3),
    Training("cnn, SGD", 8, 2, 64, "SGD", 0.05),
]
LOSS, SPIKE, CURVATURE = "loss", "spike of the gradient norm", "curvature"
# Name -> how its keys begin; the largest value counts.
SIGNALS = {
    "gradient norm": "grad/norm",
    "largest attention logit": "activation/attention_logit_max/",
    "second-moment RMS": "optimizer/rms_median",
    "kurtosis of activations": "activation/activation/",
}
Run = tuple[int | None, dict[str, list[int]]]
COLUMNS = (LOSS, *SIGNALS, SPIKE, CURVATURE)


def kurtosis(x: Tensor) -> Tensor:
    return (x - x.mean()).pow(4).mean() / x.var(correction=0).square()


def largest(start: str) -> Callable[[Engine], float | None]:
    return lambda engine: max((v for k, v in engine.state.metrics.items() if k.startswith(start)), default=None)


def train(training: Training, seed: int, growth: float) -> Run:
    """Return the iteration at which the loss doubled, and the iterations of warnings by signal."""
    torch.manual_seed(seed)
    model = make_model(training)
    optimizer = make_optimizer(training, model)
    generator = torch.Generator().manual_seed(seed)
    draw, means, losses = batches(training, generator), list[float](), list[float]()
    warnings: dict[str, list[int]] = {}  # without signals that do not exist
    doubled: int | None = None
    high: list[bool] = []

    def data() -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(LAST):
            inputs, labels = draw()
            if not training.is_gpt:
                noise = torch.rand(labels.shape, generator=generator) < 0.2
                labels[noise] = torch.randint(10, labels.shape, generator=generator)[noise]
            yield inputs, labels

    def step(engine: Engine, batch: tuple[Tensor, Tensor]) -> float:
        optimizer.param_groups[0]["lr"] *= growth if engine.state.iteration > FIRST else 1.0
        optimizer.zero_grad()
        loss = loss_on(model, batch)
        loss.backward()
        optimizer.step()
        return loss.item()

    def loss_on(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_of(model(batch[0]), batch[1])

    trainer = Engine(step)
    im.GradMonitor(model, optimizer).attach(trainer)
    im.OptimizerStateHandler(model, optimizer).attach(trainer)
    im.ActivationHandler(
        model, activations={"kurtosis": im.Metric(kurtosis)}, attention=training.is_gpt, prefix="activation"
    ).attach(trainer)
    every = Events.ITERATION_STARTED(event_filter=lambda _, i: i > WARMUP and i % EVERY == 0)
    im.CurvatureHandler(model, optimizer, loss=loss_on, lanczos_steps=1).attach(trainer, every)
    values = {LOSS: lambda engine: engine.state.output, **{name: largest(start) for name, start in SIGNALS.items()}}
    monitors = {name: im.DriftMonitor(value, prefix=f"drift{i}") for i, (name, value) in enumerate(values.items())}
    for monitor in monitors.values():
        monitor.attach(trainer)

    @trainer.on(Events.ITERATION_COMPLETED)
    def note(engine: Engine) -> None:
        nonlocal doubled
        iteration, metrics = engine.state.iteration, engine.state.metrics
        keys = {SPIKE: "grad/spike", **{name: f"{monitor.prefix}/drift" for name, monitor in monitors.items()}}
        warns = {name: metrics[key] for name, key in keys.items() if key in metrics}
        if "curvature/stability_threshold" in metrics:
            plain = metrics.get("curvature/along_gradient", math.nan)
            value = metrics.get("curvature/along_gradient_preconditioned", plain)
            high.append(value > 0.5 * metrics["curvature/stability_threshold"])
            warns[CURVATURE] = high[-1] and sum(high[-3:]) >= 2
        for name, is_warning in warns.items():
            warnings.setdefault(name, []).extend([iteration] if is_warning and iteration > WARMUP else [])
        losses.append(engine.state.output)
        means.append(sum(losses[-10:]) / 10 if len(losses) >= 10 else math.inf)
        if iteration > FIRST and not means[-1] <= 2 * min(means):
            doubled = iteration
            engine.terminate()

    trainer.run(data(), max_epochs=1, epoch_length=LAST)
    return doubled, warnings


def cell(name: str, runs: list[Run], growth: float) -> str:
    """Number of false alarms, or of runs with a warning before the loss doubled and the median lead."""
    if all(name not in warnings for _, warnings in runs):
        return "-"
    if growth == CONTROL:
        return str(sum(len(warnings[name]) for _, warnings in runs))
    ends = [(doubled, warnings[name]) for doubled, warnings in runs if doubled is not None]
    leads = [doubled - early[0] for doubled, at in ends if (early := [i for i in at if FIRST < i < doubled])]
    return f"{len(leads)}, {median(leads):.0f}" if leads else "0"


def main() -> None:
    trainings, growths, seeds = TRAININGS, (CONTROL, *GROWTHS), SEEDS
    if options(__doc__).parse_args().quick:
        global FIRST, WARMUP, LAST
        FIRST, WARMUP, LAST = 30, 20, 60
        trainings, growths, seeds = TRAININGS[-1:], (CONTROL, 1.5), range(1)
    logging.disable(logging.WARNING)
    print_header("run", "growth", "doubled", *COLUMNS)
    for training, growth in itertools.product(trainings, growths):
        runs = [train(training, seed, growth) for seed in seeds]
        doubled = sum(at is not None for at, _ in runs)
        words = "none: false alarms" if growth == CONTROL else f"{growth - 1:.0%}"
        cells = [cell(name, runs, growth) for name in COLUMNS]
        print_row(training.name, words, f"{doubled} of {len(runs)}", *cells)


if __name__ == "__main__":
    main()
