"""Loss spikes: a second criterion for a bad step, besides the gradient norm."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.checks import check_function
from ignite_monitor.detection.spikes import Detection, SpikeDetector
from ignite_monitor.detection.thresholds import MeanStdThreshold, State
from ignite_monitor.model.devices import move, wide_dtype
from ignite_monitor.model.modes import users_grad_mode
from ignite_monitor.monitor.ranks import all_take_part, sum_over_ranks, world_size

_SOURCE = "the module that computes the loss (nn.MSELoss() in place of F.mse_loss), or a function of the engine"
_PATIENCE = 20

NO_LOSS = (
    f"iteration %d: {_PATIENCE} gradients, but no loss was seen, so loss_spike is not reported. Likely "
    "cause: another module, a function or a compiled module computes it: give a function of the engine that returns it."
)

LossSource = nn.Module | Callable[[Any], Any]


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
    """Detects spikes of the logarithm of a loss, by a :class:`TrendThreshold`.

    A loss of zero or less has no logarithm: it is not compared and updates nothing. ``options`` are those of
    :class:`SpikeDetector`.
    """

    def __init__(self, k: float = 4.5, warmup: int = 20, decay: float = 0.99, **options: Any) -> None:
        super().__init__(TrendThreshold(k, warmup, decay), ignored=-math.inf, **options)

    def detect(self, value: Tensor, normalized: Tensor | None = None) -> Detection:
        """Compare the logarithm of a loss, 0-dim of any floating-point dtype; -inf if there is none."""
        wide = value.detach().to(wide_dtype(value.device))
        return super().detect(wide.log().masked_fill(wide <= 0.0, -math.inf), normalized)


class LossCollector:
    """Collects the losses of an optimizer step, from the output of a module or a function of the engine."""

    def __init__(self, source: LossSource | None, model: nn.Module) -> None:
        if isinstance(source, type):
            raise TypeError(f"Argument loss should be {_SOURCE}, but given {source}")
        if not isinstance(source, nn.Module):
            check_function("loss", source, "the engine", described=_SOURCE)
        self.source, self._model = source, model
        self._missing = 0  # iterations with a gradient, as long as there was no loss
        self._sum_and_count: Tensor | None = None
        self._postponed: Tensor | None = None  # of a gradient that may have been discarded, or may be accumulated into

    def contexts(self) -> list[AbstractContextManager[Any]]:
        """Contexts of a train step: a hook on the module."""
        return [self.source.register_forward_hook(self._on_output)] if isinstance(self.source, nn.Module) else []

    def backward_ended(self, engine: Any) -> None:
        """Call the function."""
        if self.source is not None and not isinstance(self.source, nn.Module):
            with users_grad_mode():
                self._add(self.source(engine))

    def mean(self, device: torch.device) -> Tensor:
        """Mean of the losses over micro-batches and ranks, in one collective if there are several; 0 without a loss.

        Every rank calls it after every backward. Under ``join()`` some ranks may be gone: then it is 0.
        """
        wide = wide_dtype(device)
        both = torch.zeros(2, dtype=wide, device=device)
        if self._sum_and_count is not None:
            both = move(self._sum_and_count.to(wide), device)
        if world_size() > 1:
            both = sum_over_ranks(both) if all_take_part(self._model) else torch.zeros_like(both)
        total, count = both.unbind()
        return torch.where(count > 0, total / count, 0.0)

    def clear(self) -> None:
        """Drop the losses: the gradient has been used."""
        self._sum_and_count = self._postponed = None

    def postpone(self) -> None:
        """Set the losses aside: the gradient may have been discarded, or may be accumulated into."""
        self._postponed, self._sum_and_count = self._sum_and_count, None

    def resolve(self, accumulated: Tensor) -> None:
        """Count the losses set aside if the gradient was accumulated into, a 0-dim bool tensor."""
        earlier, self._postponed = self._postponed, None
        if earlier is not None:
            self._include(torch.where(move(accumulated, earlier.device), earlier, 0.0))

    def is_missing(self) -> bool:
        """An iteration with a gradient has ended: return whether it is the 20th, and there was no loss so far."""
        self._missing += self.source is not None and self._missing <= _PATIENCE
        return self._missing == _PATIENCE

    def _on_output(self, module: nn.Module, args: Any, output: Any) -> None:
        # What is evaluated without gradients belongs to no backward.
        if isinstance(output, Tensor) and output.requires_grad:
            self._add(output)

    def _add(self, loss: Any) -> None:
        if loss is None:
            return
        self._missing = _PATIENCE + 1
        value = loss.detach() if isinstance(loss, Tensor) else torch.tensor(float(loss), device="cpu")
        with torch.no_grad():
            value = value.to(wide_dtype(value.device)).mean()
            self._include(torch.stack((value, torch.ones_like(value))))

    def _include(self, both: Tensor) -> None:
        if self._sum_and_count is not None:
            both = both + move(self._sum_and_count, both.device)
        self._sum_and_count = both
