"""One log line at the end of a run: steps, spikes, and how they were handled."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from ignite_monitor.monitor.base import Monitor

_logger = logging.getLogger("ignite_monitor")


class SummarizedMonitor(Monitor):
    """Logs one line at the end of a run, unless an error ends it, with what it has counted since the run's start."""

    _totals: dict[str, float | Tensor] | None = None  # at the start of the run; None before its first iteration
    _steps: float | Tensor = 0

    def run_totals(self) -> dict[str, float | Tensor]:
        """Return the counts over all runs: word -> count."""
        raise NotImplementedError

    def start_iteration(self, engine: Any) -> None:
        if self._totals is None:
            self._totals = {word: _copied(total) for word, total in self.run_totals().items()}

    def _totals_loaded(self, before: dict[str, float | Tensor]) -> None:
        """Keep the counts of this run when a loaded state has replaced those over all runs."""
        if self._totals is not None:
            loaded = self.run_totals()
            self._totals = {word: total + loaded[word] - before[word] for word, total in self._totals.items()}

    def on_run_end(self) -> None:
        self._totals, self._steps = None, 0

    def on_run_completed(self) -> None:
        if self._totals is None:
            return
        steps = float(self._steps)
        parts = [f"{steps:.0f} optimizer steps in monitored iterations"] if steps else []
        counts = {word: float(total) - float(self._totals[word]) for word, total in self.run_totals().items()}
        parts += [f"{count:.0f} {word.removesuffix('s') if count == 1 else word}" for word, count in counts.items()]
        if steps or any(counts.values()):
            _logger.info("%s: end of run: %s.", self._title, ", ".join(parts))


def _copied(value: float | Tensor) -> float | Tensor:
    return value.detach().clone() if isinstance(value, Tensor) else value
