"""Telling the user that rounding to low precision takes most of what the optimizer does."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from ignite_monitor.monitor.deferred_flag import DeferredFlag

MOST = 0.5


class LostUpdates:
    """Warns once if most updates are lost in some monitored steps in a row.

    Args:
        patience: in how many.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._in_a_row: Tensor | None = None
        self._flag = DeferredFlag()
        self._is_told = False

    def restart(self) -> None:
        """The steps to come are others, of a model that may lie on another device."""
        self._in_a_row = None

    def observe(self, fraction: Tensor) -> None:
        """A step has lost a fraction of its updates, a 0-dim tensor; NaN where it made none."""
        if self._is_told:
            return
        before = torch.zeros_like(fraction) if self._in_a_row is None else self._in_a_row
        self._in_a_row = torch.where(fraction > MOST, before + 1, before * fraction.isnan())
        self._flag.set(self._in_a_row >= self._patience)

    def warn(self, logger: logging.Logger, prefix: str, wait: bool = False) -> None:
        """Warn, if that is known to be so by now.

        Args:
            wait: whether to wait for the device to know.
        """
        if not self._is_told and self._flag.take(wait):
            self._is_told = True
            logger.warning(
                "%s: more than half of the updates are lost to rounding, since the weights are in bfloat16 or float16 "
                "(lost_update_fraction). Keep the weights in float32 and use torch.autocast, or use an optimizer that "
                "keeps float32 copies of them, rounds stochastically or sums with compensation.",
                prefix,
            )
