"""One log line at the end of a run: steps, spikes, how they were handled, and learning rates."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ignite_monitor.model.names import learning_rates
from ignite_monitor.monitor.base import Monitor

_logger = logging.getLogger("ignite_monitor")


class SummarizedMonitor(Monitor):
    """Logs one line at the end of a run, unless an error ends it, with what it has counted since the run's start."""

    _totals: dict[str, float | Tensor] | None = None  # at the start of the run; None before its first iteration
    _steps: dict[Optimizer, float | Tensor]
    _rates: dict[Optimizer, list[float | Tensor]]  # at the first step

    def run_totals(self) -> dict[str, float | Tensor]:
        """Return the counts over all runs: word -> count."""
        raise NotImplementedError

    def start_iteration(self, engine: Any) -> None:
        if self._totals is None:
            self._totals = {word: _copied(total) for word, total in self.run_totals().items()}
            self._steps, self._rates = {}, {}

    def _totals_loaded(self, before: dict[str, float | Tensor]) -> None:
        """Keep the counts of this run when a loaded state has replaced those over all runs."""
        if self._totals is not None:
            loaded = self.run_totals()
            self._totals = {word: total + loaded[word] - before[word] for word, total in self._totals.items()}

    def _count_step(self, optimizer: Optimizer, made: bool | Tensor) -> None:
        """Count a completed step, which was made or skipped, without synchronization."""
        if optimizer not in self._steps:
            self._rates[optimizer] = [_copied(rate) for rate in _known_rates(optimizer)]
        self._steps[optimizer] = self._steps.get(optimizer, 0) + made

    def on_run_end(self) -> None:
        self._totals, self._steps, self._rates = None, {}, {}

    def on_run_completed(self) -> None:
        if self._totals is None:
            return
        parts = []
        if self._steps:
            parts.append(f"{sum(map(float, self._steps.values())):.0f} optimizer steps in monitored iterations")
        counts = {word: float(total) - float(self._totals[word]) for word, total in self.run_totals().items()}
        parts += [f"{count:.0f} {word.removesuffix('s') if count == 1 else word}" for word, count in counts.items()]
        changes: dict[str, None] = {}  # of learning rates, each once
        for optimizer, rates in self._rates.items():
            for first, last in zip(rates, _known_rates(optimizer), strict=False):
                start, end = f"{float(first):.3g}", f"{float(last):.3g}"
                changes[f"{start} at start and end" if start == end else f"{start} to {end}"] = None
        parts += [f"learning rate {', '.join(changes)}"] if changes else []
        if self._steps or any(counts.values()):
            _logger.info("%s: end of run: %s.", self._title, ", ".join(parts))


def _known_rates(optimizer: Optimizer) -> list[float | Tensor]:
    return [rate for rate in learning_rates(optimizer) if rate is not None]


def _copied(value: float | Tensor) -> float | Tensor:
    return value.detach().clone() if isinstance(value, Tensor) else value
