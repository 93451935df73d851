"""A spike whose step has not come."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ignite_monitor.events.accumulation import AccumulationProbe
from ignite_monitor.events.gradient_tracker import GradientTracker
from ignite_monitor.gradient.detection import GradientDetection
from ignite_monitor.monitor.ranks import Ranks


@dataclass(eq=False)
class PostponedSpike:
    """A spike that no step has used: its gradient was discarded, or the next backward accumulates into it.

    It updates the statistics in the first case only.
    """

    detection: GradientDetection
    is_spike: Tensor  # whether it is one, 0-dim
    losses: Tensor | None  # sum and number of its losses
    probe: AccumulationProbe | None = None

    def contexts(self, tracker: GradientTracker, optimizer: Optimizer | None) -> list[AbstractContextManager[Any]]:
        """Contexts of a train step that measure whether it accumulates into the gradient."""
        if self.probe is not None and self.probe.accumulates is not None:  # measured in a backward under no_sync()
            return []
        self.probe = AccumulationProbe(tracker, optimizer)
        return [self.probe]

    def accumulated(self, ranks: Ranks) -> Tensor:
        """Return whether a backward of any rank has accumulated into the gradient, a 0-dim bool tensor."""
        accumulated = None if self.probe is None else self.probe.accumulates
        if accumulated is None:
            accumulated = torch.zeros_like(self.is_spike)
        return ranks.any(accumulated)
