"""One log line at the end of a run: steps, spikes, how they were handled, and learning rates."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.optim import Optimizer


class RunSummary:
    """Counts the optimizer steps of a run, and logs the line at its end.

    Args:
        optimizers: the optimizers whose learning rates are reported, read at the start and at the end.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = tuple(optimizers)
        self._first_rates = _rates(self._optimizers)
        self.steps = 0

    def log(self, logger: logging.Logger, name: str, counts: Sequence[tuple[int, str]]) -> None:
        """Log the line at INFO, unless the run made no step.

        Args:
            logger: the monitor's logger.
            name: the class of the monitor, with its prefix.
            counts: numbers with their words: ``(3, "spikes")``. Zeros are omitted.
        """
        if not self.steps:
            return
        rates = [
            f"{first:.3g} to {last:.3g}"
            for first, last in zip(self._first_rates, _rates(self._optimizers), strict=False)
        ]
        parts = [f"{self.steps} optimizer steps", *(f"{count} {word}" for count, word in counts if count)]
        parts += [f"learning rate {', '.join(dict.fromkeys(rates))}"] * bool(rates)
        logger.info("%s: end of run: %s.", name, ", ".join(parts))


def _rates(optimizers: Iterable[Optimizer]) -> list[float]:
    """Learning rates of all groups; those in device memory are skipped, since reading them would synchronize."""
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]
    return [float(rate) for rate in rates if not isinstance(rate, Tensor) or rate.device.type == "cpu"]
