"""The loss as a second sign of a bad batch, beside the norm of its gradient."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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

LossSource = nn.Module | Callable[[Any], Any]


class TrendThreshold(MeanStdThreshold):
    r"""A value above :math:`\ell + \mu + k \sigma` is a spike, which a trend does not widen.

    :math:`\ell_i` is the exponentially weighted mean of the values so far, and :math:`\mu` and :math:`\sigma` are the
    mean and the sample standard deviation, weighted alike, of the steps :math:`u_i = x_i - \ell_{i-1}` away from it
    (:math:`u_1 = 0`). Under a steady trend the steps are as wide as the noise alone, while the deviation around the
    mean of falling values is mostly that of the fall. :math:`\ell + \mu` is what double exponential smoothing expects
    next (R. G. Brown, "Smoothing, Forecasting and Prediction of Discrete Time Series", 1963).
    """

    def __call__(self, mean: Tensor, std: Tensor, count: Tensor) -> Tensor:
        return super().__call__(self.state["level"] + mean, std, count)

    _is_number = True

    def empty(self) -> State:
        return super().empty() | {"level": torch.zeros((), dtype=torch.float64, device="cpu")}

    def include(self, state: State, norm: Tensor) -> State:
        level = torch.where(state["count"] > 0, state["level"], norm)
        step = norm - level
        steps = super().include(state, step)
        return steps | {"level": torch.addcdiv(level, step, steps["weight"])}


class LossSignal:
    """A loss is a spike where its logarithm is, by the :class:`TrendThreshold` of the logarithms before it.

    A spike enters as in every :class:`SpikeDetector`. Together with the norm it finds more harm at nearly the same
    false alarms. (``docs/detection.md`` has how much.)

    A loss of zero or less has no logarithm: it is no spike, and does not enter. A non-finite one is a spike, unless a
    GradScaler looks after it, and does not enter either. Where losses fall to the rounding of their dtype (1e-7 in
    float32) their logarithms vary so much that nothing is a spike any more; the norm goes on detection.

    Args:
        k: how many deviations above what the trend leads to expect.
        warmup: how many losses go in before any is judged, 2 at least.
        decay: weight of the past at every new loss, in (0, 1).
        max_consecutive_spikes: how many spikes in a row mean a new level.
        overflow_is_spike: whether a non-finite loss is a spike.

    Raises:
        TypeError: if an argument is not a number of the kind it should be.
        ValueError: if an argument is out of its range.
    """

    def __init__(
        self,
        k: float = 4.5,
        warmup: int = 20,
        decay: float = 0.99,
        *,
        max_consecutive_spikes: int = 10,
        overflow_is_spike: bool = True,
    ) -> None:
        self.detector = SpikeDetector(
            TrendThreshold(k, warmup, decay),
            max_consecutive_spikes=max_consecutive_spikes,
            overflow_is_spike=overflow_is_spike,
        )

    def judge(self, loss: Tensor) -> Detection:
        """Compare a loss with those before it; changes nothing.

        Args:
            loss: the loss, 0-dim of any floating-point dtype.

        Returns:
            Of its logarithm; -inf stands for that of a loss of zero or less.
        """
        wide = loss.detach().to(wide_dtype(loss.device))
        # -inf is below any limit. The logarithm of a negative number would be NaN, and so count as an overflow.
        return self.detector.judge(wide.log().masked_fill(wide <= 0.0, -math.inf))

    def observe(self, detection: Detection, when: Tensor | None = None) -> None:
        """Let a judged loss enter, where a 0-dim bool tensor is True; None is true."""
        judged = detection.norm != -math.inf
        self.detector.observe(detection, judged if when is None else judged & when)

    def go_back(self, earlier: LossSignal, when: Tensor | None = None) -> None:
        """Forget the losses since a copy was made, where a 0-dim bool tensor is True; None is true."""
        if when is None:
            self.detector = earlier.detector
        else:
            self.detector.go_back(earlier.detector, when)

    def reset_threshold(self) -> None:
        """Forget the level; the counts go on."""
        self.detector.reset_threshold()

    def __copy__(self) -> LossSignal:
        twin = object.__new__(type(self))
        twin.detector = copy.copy(self.detector)
        return twin

    def state_dict(self) -> dict[str, Any]:
        """That of its detector."""
        return {"detector": self.detector.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state; that of a rule of another kind is a ValueError."""
        self.detector.load_state_dict(state_dict["detector"])


class Losses:
    """Collects losses from one step of the optimizer to the next.

    Attributes:
        source: a module whose output is the loss, or a function of the engine that is asked when a backward has ended;
            None where none are collected.

    Args:
        model: the model, whose wrapper says whether every rank takes part.

    Raises:
        TypeError: if the source is neither.
    """

    def __init__(self, source: LossSource | None, model: nn.Module) -> None:
        if isinstance(source, type):
            raise TypeError(f"Argument loss should be {_SOURCE}, but given {source}")
        if not isinstance(source, nn.Module):
            check_function("loss", source, "the engine", described=_SOURCE)
        self.source, self._model = source, model
        self._sum_and_count: Tensor | None = None
        self._earlier: Tensor | None = None  # of a gradient that may have been given up, or may grow

    @contextmanager
    def listening(self) -> Iterator[None]:
        """What has to be around a train step."""
        if not isinstance(self.source, nn.Module):
            yield
            return
        handle = self.source.register_forward_hook(lambda module, arguments, output: self._add_output(output))
        try:
            yield
        finally:
            handle.remove()

    def backward_ended(self, engine: Any) -> None:
        """A backward has ended: ask the function, if it is one."""
        if self.source is not None and not isinstance(self.source, nn.Module):
            with users_grad_mode():
                self._add(self.source(engine))

    def mean(self, device: torch.device) -> Tensor:
        """The mean of what there is, over ranks too, in one collective if there are several; 0 if there is nothing.

        Every rank calls it after every backward. Under ``join()`` some may be gone: then there is nothing.
        """
        wide = wide_dtype(device)
        both = torch.zeros(2, dtype=wide, device=device)
        if self._sum_and_count is not None:
            both = move(self._sum_and_count.to(wide), device)
        if world_size() > 1:
            both = sum_over_ranks(both) if all_take_part(self._model) else torch.zeros_like(both)
        total, count = both.unbind()
        return torch.where(count > 0, total / count, 0.0)

    def forget(self) -> None:
        """The gradient is used up."""
        self._sum_and_count = self._earlier = None

    def set_aside(self) -> None:
        """The gradient may have been given up, or may grow."""
        self._earlier, self._sum_and_count = self._sum_and_count, None

    def decided(self, grows: Tensor) -> None:
        """Whether it grows is known, a 0-dim bool tensor."""
        earlier, self._earlier = self._earlier, None
        if earlier is not None:
            self._include(torch.where(move(grows, earlier.device), earlier, 0.0))

    def _add_output(self, output: Any) -> None:
        # What is evaluated without gradients belongs to none.
        if isinstance(output, Tensor) and output.requires_grad:
            self._add(output)

    def _add(self, loss: Any) -> None:
        if loss is None:
            return
        value = loss.detach() if isinstance(loss, Tensor) else torch.tensor(float(loss), device="cpu")
        with torch.no_grad():
            value = value.to(wide_dtype(value.device)).mean()
            self._include(torch.stack((value, torch.ones_like(value))))

    def _include(self, both: Tensor) -> None:
        if self._sum_and_count is not None:
            both = both + move(self._sum_and_count, both.device)
        self._sum_and_count = both
