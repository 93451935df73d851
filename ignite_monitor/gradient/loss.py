"""Loss spikes: a second criterion for a bad step, besides the gradient norm."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.checks import check_function
from ignite_monitor.detection.spikes import Detection, SpikeDetector
from ignite_monitor.detection.thresholds import MeanStdThreshold, State
from ignite_monitor.model._torch import backward_number
from ignite_monitor.model.devices import move, wide_dtype
from ignite_monitor.model.modes import users_grad_mode
from ignite_monitor.monitor.ranks import Ranks

_SOURCE = "the module that computes the loss (nn.MSELoss() in place of F.mse_loss), or a function of the engine"
_PATIENCE = 20

NO_LOSS = (
    f"{_PATIENCE} gradients, but no loss was seen, so loss_spike is not reported. If another module, a function or a "
    "compiled module computes the loss, give a function of the engine that returns it."
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
    """Collects the losses of an optimizer step, from the output of a module or a function of the engine.

    The output of a module belongs to the backward that goes through it: what is never back-propagated is no loss.
    """

    def __init__(self, source: LossSource | None, ranks: Ranks) -> None:
        if isinstance(source, type):
            raise TypeError(f"Argument loss should be {_SOURCE}, but given {source}")
        if not isinstance(source, nn.Module):
            check_function("loss", source, "the engine", described=_SOURCE)
        self.source, self._ranks = source, ranks
        self._missing = 0  # iterations with a gradient, as long as there was no loss
        self._outputs: dict[int, Tensor | None] = {}  # by number of the backward: sum and number of losses
        self._shared: Tensor | None = None  # of the last backward that reached other monitored models too
        self._sum_and_count: Tensor | None = None

    def contexts(self) -> list[AbstractContextManager[Any]]:
        """Contexts of a train step: a hook on the module."""
        return [self.source.register_forward_hook(self._on_output)] if isinstance(self.source, nn.Module) else []

    def backward_ended(self, engine: Any, numbers: Iterable[int], shared: bool) -> None:
        """Add the losses of a backward, by the numbers of those inside of it too, or set them aside if it is shared."""
        own: Tensor | None = None
        if isinstance(self.source, nn.Module):
            for number in numbers:
                own = _plus(own, self._outputs.pop(number, None))
        elif self.source is not None:
            with users_grad_mode():
                own = self._pair(self.source(engine))
        if shared:
            self._shared = own
        elif own is not None:
            self._sum_and_count = _plus(self._sum_and_count, own)

    def add_rest(self) -> None:
        """Add what belongs to a gradient that is detected at its step: a shared one, or one that was set by hand."""
        rest = [self._shared] if self._shared is not None else list(self._outputs.values())
        for pair in rest:
            self._sum_and_count = _plus(self._sum_and_count, pair)
        self._shared = None
        self._outputs.clear()

    def mean(self, device: torch.device) -> Tensor:
        """Mean of the losses over micro-batches and ranks, in one collective if there are several; 0 without a loss.

        Every rank calls it after every backward. Under ``join()`` some ranks may be gone: then it is 0.
        """
        wide = wide_dtype(device)
        both = torch.zeros(2, dtype=wide, device=device)
        if self._sum_and_count is not None:
            self._missing = _PATIENCE + 1
            both = move(self._sum_and_count.to(wide), device)
        both = self._ranks.sum(both) if self._ranks.all_present else torch.zeros_like(both)
        total, count = both.unbind()
        return torch.where(count > 0, total / count, 0.0)

    def start_iteration(self, unseen: bool) -> None:
        """Drop what no gradient has used, and all losses after iterations that were not monitored."""
        self._outputs.clear()
        self._shared = None
        self._sum_and_count = None if unseen else self._sum_and_count

    def clear(self) -> None:
        """Drop the losses: the gradient has been used."""
        self._sum_and_count = None
        self._outputs.clear()

    def take(self) -> Tensor | None:
        """Remove and return the losses: the gradient may have been discarded, or may be accumulated into."""
        taken, self._sum_and_count = self._sum_and_count, None
        return taken

    def give_back(self, taken: Tensor | None, accumulated: Tensor) -> None:
        """Count what :meth:`take` returned if the gradient was accumulated into, a 0-dim bool tensor."""
        if taken is not None:
            self._sum_and_count = _plus(self._sum_and_count, torch.where(move(accumulated, taken.device), taken, 0.0))

    def is_missing(self) -> bool:
        """An iteration with a gradient has ended: return whether it is the 20th, and there was no loss so far."""
        self._missing += self._missing <= _PATIENCE
        return self._missing == _PATIENCE

    def _on_output(self, module: nn.Module, args: Any, output: Any) -> None:
        # What is evaluated without gradients belongs to no backward.
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(functools.partial(self._back_propagated, self._pair(output)))

    def _back_propagated(self, pair: Tensor | None, gradient: Tensor) -> None:
        number = backward_number()
        self._outputs[number] = _plus(self._outputs.get(number), pair)

    def _pair(self, loss: Any) -> Tensor | None:
        """The mean of a loss, and 1; None for None."""
        if loss is None:
            return None
        value = loss.detach() if isinstance(loss, Tensor) else torch.tensor(float(loss), device="cpu")
        with torch.no_grad():
            value = value.to(wide_dtype(value.device)).mean()
            return torch.stack((value, torch.ones_like(value)))


def _plus(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return other + move(one, other.device)
