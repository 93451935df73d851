"""Spikes of single parameters, by their own earlier gradient norms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.detection.robust import RobustThreshold
from ignite_monitor.detection.spikes import Detection, SpikeDetector

_SHARED = 0.7


class PerParameterDetector(SpikeDetector):
    r"""Compares one gradient norm per parameter with its own :class:`RobustThreshold`, all in one vector.

    A change that all parameters share is no fault of one of them. So if most norms are above their means, each is
    divided by :math:`\max(1, m)^{0.7}` first, with the median m of norm / mean (``docs/detection.md``). A norm of zero,
    as of a parameter without a gradient, updates nothing. ``options`` are those of :class:`SpikeDetector`.
    """

    def __init__(self, k: float = 8.0, **options: Any) -> None:
        super().__init__(RobustThreshold(k=k), **options)
        self.to(torch.zeros(0, dtype=torch.float64, device="cpu"))
        self.names: tuple[str, ...] = ()  # of the parameters, in the order of the state

    def detect(self, names: tuple[str, ...], norms: Tensor) -> Detection:  # type: ignore[override]
        """Compare the norms of the named parameters, a vector with 0 for no gradient; other names begin anew."""
        if names != self.names:
            self._start(names)
        if self.rule.state["mean"].device != norms.device:
            self.to(norms)
        means = self.rule.state["mean"]  # 0 before the first
        ratios = (norms / means).masked_fill(torch.minimum(norms, means) <= 0.0, math.nan)
        common = ratios.nanmedian().nan_to_num(1.0).clamp(min=1.0)
        return super().detect(norms, norms / common**_SHARED)

    def observe(self, detection: Detection, when: Tensor | None = None) -> None:
        if len(detection.value) == len(self.names):  # else another state has been loaded since
            super().observe(detection, when)

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the parameters, and their state: vectors."""
        return super().state_dict() | {"names": list(self.names)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state; a ValueError if it is of something else, and nothing has changed then."""
        state, names, before = dict(state_dict), self.names, self.snapshot()
        if "names" not in state:
            raise ValueError(f"Argument state_dict should hold names, but given {state_dict}")
        self._start(tuple(state.pop("names")))
        try:
            super().load_state_dict(state)
        except Exception:
            self.names = names
            self.restore(before)
            raise

    def _start(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.rule._rows = self.rule._initial.expand(-1, len(names))
        self.reset_threshold()
