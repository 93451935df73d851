"""One log line at the end of a run: steps, spikes, how they were handled, and learning rates."""

from __future__ import annotations

import logging
from collections.abc import Mapping
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

    def step(self, optimizer: Optimizer, made: bool | Tensor) -> None:
        """Count a completed step, which was made or skipped."""
        if optimizer not in self.steps:
            self.rates[optimizer] = [_copied(rate) for rate in _rates(optimizer)]
        self.steps[optimizer] = self.steps.get(optimizer, 0) + made


def log_run_summary(monitor: Any) -> None:
    """Log one line with what a monitor counted in a run, and drop its summary; nothing if it counted nothing."""
    summary, monitor.run_summary = monitor.run_summary, None
    if summary is None:
        return
    parts = []
    if summary.steps:
        parts.append(f"{sum(map(float, summary.steps.values())):.0f} optimizer steps in monitored iterations")
    counts = {word: float(total) - float(summary.totals[word]) for word, total in monitor.run_totals().items()}
    parts += [f"{count:.0f} {word.removesuffix('s') if count == 1 else word}" for word, count in counts.items()]
    changes: dict[str, None] = {}  # of learning rates, each once
    for optimizer, rates in summary.rates.items():
        for first, last in zip(rates, _rates(optimizer), strict=False):
            start, end = f"{float(first):.3g}", f"{float(last):.3g}"
            changes[f"{start} at start and end" if start == end else f"{start} to {end}"] = None
    parts += [f"learning rate {', '.join(changes)}"] if changes else []
    if summary.steps or any(counts.values()):
        _logger.info("%s: end of run: %s.", monitor._title, ", ".join(parts))


def _rates(optimizer: Optimizer) -> list[float | Tensor]:
    return [rate for rate in learning_rates(optimizer) if rate is not None]


def _copied(value: float | Tensor) -> float | Tensor:
    return value.detach().clone() if isinstance(value, Tensor) else value
