"""Loss spikes: a second criterion for a bad step, besides the gradient norm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.checks import check_function
from ignite_monitor.detection.spikes import Detection, SpikeDetector
from ignite_monitor.detection.thresholds import MeanStdThreshold, State
from ignite_monitor.model.devices import move, move_like, wide_dtype
from ignite_monitor.model.modes import users_grad_mode
from ignite_monitor.monitor.ranks import Ranks

_PATIENCE = 20

NO_LOSS = (
    f"the function given as loss returned None after {_PATIENCE} backwards, so loss_spike is not reported. It should "
    "return the loss, which the train step keeps: engine.state.loss = loss.detach()."
)

LossFunction = Callable[[Any], Tensor | float | None]


class TrendThreshold(MeanStdThreshold):
    r"""A value above :math:`\ell + \mu + k \sigma` is a spike; a trend does not widen this threshold.

    :math:`\ell_i` is the exponentially weighted mean of the earlier values. :math:`\mu` and :math:`\sigma` are mean and
    sample standard deviation, with the same weights, of the steps :math:`u_i = x_i - \ell_{i-1}` away from it
    (:math:`u_1 = 0`). :math:`\ell + \mu` is the forecast of double exponential smoothing (R. G. Brown, "Smoothing,
    Forecasting and Prediction of Discrete Time Series", 1963).
    """

    def __call__(self, mean: Tensor, std: Tensor, count: Tensor) -> Tensor:
        return super().__call__(self.state["level"] + mean, std, count)

    def empty(self) -> State:
        return super().empty() | {"level": torch.zeros((), dtype=torch.float64, device="cpu")}

    def include(self, state: State, value: Tensor) -> State:
        level = torch.where(state["count"] > 0, state["level"], value)
        step = value - level
        steps = super().include(state, step)
        return steps | {"level": torch.addcdiv(level, step, steps["weight"])}


class LossDetector(SpikeDetector):
    """Detects spikes of the logarithm of a loss, by a :class:`TrendThreshold`; one of zero or less is not compared."""

    def __init__(self, k: float = 4.5, warmup: int = 20, decay: float = 0.99, **options: Any) -> None:
        super().__init__(TrendThreshold(k, warmup, decay), ignored=-math.inf, **options)

    def detect(self, value: Tensor, normalized: Tensor | None = None) -> Detection:
        """Compare the logarithm of a loss, 0-dim of any floating-point dtype; -inf if there is none."""
        wide = value.detach().to(wide_dtype(value.device))
        return super().detect(wide.log().masked_fill(wide <= 0.0, -math.inf), normalized)


class LossCollector:
    """Collects the losses of an optimizer step: what a function of the engine returns after each backward."""

    def __init__(self, function: LossFunction, ranks: Ranks) -> None:
        described = "a function of the engine that returns the loss of the last backward"
        if isinstance(function, type | nn.Module):
            raise TypeError(f"Argument loss should be {described}, but given {function}")
        check_function("loss", function, "the engine", described=described, optional=False)
        self._function, self._ranks = function, ranks
        self._missing = 0  # iterations with a gradient, as long as there was no loss
        self._shared: Tensor | None = None  # of the last backward that reached other monitored models too
        self._sum_and_count: Tensor | None = None

    def backward_ended(self, engine: Any, shared: bool) -> None:
        """Add the loss of a backward; if the backward is shared, only at the own step."""
        with users_grad_mode():
            loss = self._function(engine)
        pair = None if loss is None else _pair(loss)
        if shared:
            self._shared = pair
        else:
            self._sum_and_count = _plus(self._sum_and_count, pair)

    def add_shared(self) -> None:
        """Add the loss of a shared backward: the own step uses its gradient."""
        self._sum_and_count, self._shared = _plus(self._sum_and_count, self._shared), None

    def mean(self, device: torch.device) -> Tensor:
        """Mean of the losses over micro-batches and ranks; 0 without a loss, and under ``join()``. A collective."""
        both = torch.zeros(2, dtype=wide_dtype(device), device=device)
        if self._sum_and_count is not None:
            both = move_like(self._sum_and_count, both)
        if self._sum_and_count is not None or self._ranks.size > 1:
            self._missing = _PATIENCE + 1
        total, count = (self._ranks.sum(both) if self._ranks.all_present else torch.zeros_like(both)).unbind()
        return torch.where(count > 0, total / count, 0.0)

    def start_iteration(self, unseen: bool) -> None:
        """Drop what no gradient has used, and all losses after iterations that were not monitored."""
        self._shared = None
        if unseen:
            self._sum_and_count = None

    def drop(self, discarded: Tensor | None = None) -> None:
        """Drop the losses: their gradient has been used, or is discarded if a 0-dim bool tensor is True."""
        if discarded is None or self._sum_and_count is None:
            self._sum_and_count = None
        else:
            self._sum_and_count = self._sum_and_count.masked_fill(move(discarded, self._sum_and_count.device), 0.0)

    def is_missing(self) -> bool:
        """An iteration with a gradient has ended: return whether it is the 20th, and there was no loss so far."""
        self._missing += self._missing <= _PATIENCE
        return self._missing == _PATIENCE


@torch.no_grad()
def _pair(loss: Tensor | float) -> Tensor:
    """The mean of a loss, and 1."""
    value = loss.detach() if isinstance(loss, Tensor) else torch.tensor(float(loss), device="cpu")
    value = value.to(wide_dtype(value.device)).mean()
    return torch.stack((value, torch.ones_like(value)))


def _plus(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return other + move(one, other.device)
