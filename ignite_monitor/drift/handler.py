"""DriftMonitor: slow changes of any scalar of the iteration."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from ignite.engine import Engine
from torch import Tensor

from ignite_monitor.checks import check_choice
from ignite_monitor.detection.monitor import ScalarMonitor, count
from ignite_monitor.detection.spikes import largest_usable
from ignite_monitor.detection.state import Statistics
from ignite_monitor.detection.thresholds import NEGLIGIBLE
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.keys import DRIFT
from ignite_monitor.model.devices import move
from ignite_monitor.monitor.base import NoModel
from ignite_monitor.monitor.transfer import DeferredFlag

_SIDES = {"up": (1.0, 0.0), "down": (0.0, 1.0), "both": (1.0, 1.0)}


class DriftMonitor(ScalarMonitor, schema=DRIFT):
    r"""Detect a slow rise or fall of any scalar by a two-sided CUSUM of its deviation from its trend.

    The reference is an exponentially weighted mean (decay 0.995), continued by its linear trend. The upward sum ignores
    a falling trend, the downward sum a rising one: a loss that falls or flattens does not raise the upward sum.
    DRIFT_DETECTED is fired when a sum exceeds 12; then all statistics are reset. The first 150 values are a warm-up.

    Non-finite values are ignored. Every rank uses the value of its own function. A tensor stays on its device, without
    synchronization. (E. S. Page, "Continuous inspection schemes", Biometrika 41, 1954.)

    {keys}

    Args:
        value: function of the engine that returns a number, a tensor with one element, or None for no value.
        direction: ``"up"`` to detect a rise, ``"down"`` for a fall, ``"both"`` for either.
        prefix: prefix of all names.

    Raises:
        TypeError: if an argument has the wrong type; in a run, if the function returns anything but one number.
        ValueError: if an argument has a value that is not allowed.

    Examples:
        .. code-block:: python

            drift = DriftMonitor(lambda engine: engine.state.output, prefix="loss_drift")
            drift.attach(trainer)
    """

    _state_dict_all_req_keys = ("statistics", "counts")
    _NAMES = ("count", "weight", "mean", "smoothed_mean", "variance", "sum_up", "sum_down")
    # Chosen by simulation and recordings: docs/monitors/drift.md.
    _DECAY = 0.995
    _WARMUP = 150  # values before the sums start
    _CLIP = 4.0  # standard deviations that a value counts for at most
    _CLIPPED_FROM = 20  # values before that are not clipped
    _ALLOWANCE = 0.75  # standard deviations that a value may deviate without raising a sum
    _LIMIT = 12.0

    def __init__(
        self,
        value: Callable[[Engine], float | Tensor | None],
        *,
        direction: str = "up",
        prefix: str = "drift",
    ) -> None:
        super().__init__(NoModel(), prefix)
        self._set_value(value)
        check_choice("direction", direction, *_SIDES)
        self.direction = direction
        self._trend = Statistics(dict.fromkeys(self._NAMES, torch.zeros((), device="cpu")))
        self._statistics = {"statistics": self._trend}
        self._sides: Tensor | None = None  # signs and weights of the sums, on the device of the values
        self.reset_run_state()

    def on_run_end(self) -> None:
        self._report_drift(synchronize=True)

    def reset_run_state(self) -> None:
        self._drifts = DeferredFlag()

    def _detect(self, engine: Engine, number: Tensor) -> None:
        self._trend.move_like(number)
        rows = self._trend.rows
        if self._sides is None or self._sides.device != number.device:
            sides = torch.tensor([(1.0, -1.0), _SIDES[self.direction]], dtype=number.dtype, device="cpu")
            self._sides = move(sides, number.device)
        signs, watched = self._sides
        finite = number.abs() <= largest_usable(number)
        after, sums = self._update(rows, torch.where(finite, number, rows[2]), signs)
        after = torch.where(finite, after, rows)
        sums = torch.where(finite, sums, rows[5:])
        drift = (sums * watched).max() > self._LIMIT
        self._trend.rows = after.masked_fill(drift, 0.0)
        # A drift counts as a spike and as a reset.
        count(self._counts, number, drift, ~finite, drift)
        self._drifts.set(drift)
        self.publish(drift=drift.to(number.dtype), sum_up=sums[0], sum_down=sums[1])
        awaited = self._source is not None and self._source.is_awaited(MonitorEvents.DRIFT_DETECTED)
        if self._report_drift(synchronize=awaited) and awaited and self._source is not None:
            self._source.fire(MonitorEvents.DRIFT_DETECTED)

    def _update(self, rows: Tensor, value: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the statistics after one more finite value, and the sums with it."""
        count, weight, mean, smoothed, variance = rows[:5].unbind()
        std, delta = variance.sqrt(), value - mean
        is_spread = std > NEGLIGIBLE * mean.abs()
        # A mean lags behind its trend by what it is ahead of its own mean: R. G. Brown's double exponential smoothing.
        deviations = torch.minimum(signs * delta, signs * (delta - (mean - smoothed))) / std
        raised = (rows[5:] + deviations.clamp(-self._CLIP, self._CLIP) - self._ALLOWANCE).clamp(min=0.0)
        sums = torch.where(is_spread & (count >= self._WARMUP), raised, rows[5:])
        bound = (self._CLIP * std).masked_fill(~is_spread | (count < self._CLIPPED_FROM), math.inf)
        delta = torch.minimum(torch.maximum(delta, -bound), bound)
        weight = self._DECAY * weight + 1.0
        rate = 1.0 / weight
        mean = mean + rate * delta
        smoothed = smoothed + rate * (mean - smoothed)
        variance = (1.0 - rate) * (variance + rate * delta.square())
        return torch.cat((torch.stack((count + 1.0, weight, mean, smoothed, variance)), sums)), sums

    def _report_drift(self, synchronize: bool) -> bool:
        drifted = self._drifts.take(synchronize)
        if drifted:
            direction = {"both": "up or down"}.get(self.direction, self.direction)
            text = f"the value drifts {direction} from its trend; resetting its statistics"
            self.report("drift", text, once=False)
        return drifted
