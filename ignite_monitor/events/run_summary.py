"""One log line at the end of a run: steps, spikes, how they were handled, and learning rates."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ignite_monitor.model.names import learning_rates

_logger = logging.getLogger("ignite_monitor")


class RunSummary:
    """The optimizer steps that a monitor saw in a run, without synchronization, from its totals before."""

    def __init__(self, totals: Mapping[str, float | Tensor]) -> None:
        self.totals = {word: _copied(total) for word, total in totals.items()}
        self.rates: dict[Optimizer, list[float | Tensor]] = {}
        self.steps: dict[Optimizer, float | Tensor] = {}

    def step(self, optimizer: Optimizer, made: bool | Tensor = True) -> None:
        """Count a completed step, which was made or skipped."""
        if optimizer not in self.steps:
            self.rates[optimizer] = [_copied(rate) for rate in _rates(optimizer)]
        self.steps[optimizer] = self.steps.get(optimizer, 0) + made


def log_run_summary(monitors: Iterable[Any]) -> None:
    """Log one line for all monitors with a summary, and drop the summaries; nothing if no step was seen."""
    summarized = sorted((item for item in monitors if item.run_summary is not None), key=lambda item: item._title)
    counts: dict[str, float] = {}
    steps: dict[Optimizer, float] = {}
    changes: dict[str, None] = {}  # of learning rates, each once
    for monitor in summarized:
        summary, monitor.run_summary = monitor.run_summary, None
        for optimizer, made in summary.steps.items():  # not every monitor knows of a skipped step
            steps[optimizer] = min(float(made), steps.get(optimizer, float(made)))
            for first, last in zip(summary.rates[optimizer], _rates(optimizer), strict=False):
                start, end = f"{float(first):.3g}", f"{float(last):.3g}"
                changes[f"{start} at start and end" if start == end else f"{start} to {end}"] = None
        for word, total in monitor.run_totals().items():
            counts[word] = counts.get(word, 0.0) + float(total) - float(summary.totals[word])
    if steps:
        parts = [f"{sum(steps.values()):.0f} optimizer steps in monitored iterations"]
        parts += [f"{count:.0f} {word.removesuffix('s') if count == 1 else word}" for word, count in counts.items()]
        parts += [f"learning rate {', '.join(changes)}"] if changes else []
        _logger.info("%s: end of run: %s.", ", ".join(monitor._title for monitor in summarized), ", ".join(parts))


def _rates(optimizer: Optimizer) -> list[float | Tensor]:
    return [rate for rate in learning_rates(optimizer) if rate is not None]


def _copied(value: float | Tensor) -> float | Tensor:
    return value.detach().clone() if isinstance(value, Tensor) else value
