"""SpikeMonitor: spikes of any scalar of the iteration."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from ignite.engine import Engine
from torch import Tensor

from ignite_monitor.checks import check_choice
from ignite_monitor.detection.monitor import DetectionMonitor, ScalarMonitor, count
from ignite_monitor.detection.spikes import Detection, SpikeDetector, largest_usable
from ignite_monitor.detection.thresholds import StaticThreshold, Threshold, as_rule
from ignite_monitor.events.monitor_events import MonitorEvents, Spike
from ignite_monitor.keys import SPIKE
from ignite_monitor.monitor.base import NoModel
from ignite_monitor.monitor.transfer import as_published

_SIGNS = {"up": (1.0,), "down": (-1.0,), "both": (1.0, -1.0)}


class SpikeMonitor(ScalarMonitor, DetectionMonitor, schema=SPIKE):
    """Detect spikes of any scalar, as ``GradMonitor`` detects those of the gradient norm.

    The value is read after the train step, when the other monitors have published. It is a spike if it is not finite,
    or exceeds the threshold that the rule estimates from earlier values (default: exponentially weighted mean + 6
    standard deviations). SPIKE_DETECTED and THRESHOLD_RESET are fired, and ``engine.state.spike`` describes the value.

    A value far below the mean updates the statistics clipped to as far below it as the threshold is above. Every rank
    uses the value of its own function. A tensor stays on its device, without synchronization.

    {keys}

    Args:
        value: function of the engine that returns a number, a tensor with one element, or None for no value.
        threshold: a threshold rule, a function ``(mean, std, count) -> threshold``, or a number. None for
            ``MeanStdThreshold()``.
        direction: ``"up"`` if large values are spikes, ``"down"`` if small values are, ``"both"`` if either are. With
            ``"down"`` and ``"both"`` the rule is applied to the negated value, and ``threshold`` must not be a number.
        max_consecutive_spikes: number of consecutive spikes that reset the rule.
        prefix: prefix of all names.
        flag: attribute of ``engine.state`` for the result: False until it is known, then a bool on the CPU, else a
            0-dim bool tensor.

    Raises:
        TypeError: if an argument has the wrong type; in a run, if the function returns anything but one number.
        ValueError: if an argument has a value that is not allowed.

    Examples:
        .. code-block:: python

            loss = SpikeMonitor(lambda engine: engine.state.output, prefix="loss", flag="loss_is_spike")
            loss.attach(trainer)
    """

    _state_dict_all_req_keys = ("statistics", "counts")

    def __init__(
        self,
        value: Callable[[Engine], float | Tensor | None],
        *,
        threshold: Threshold = None,
        direction: str = "up",
        max_consecutive_spikes: int = 10,
        prefix: str = "spike",
        flag: str = "unhealthy_value",
    ) -> None:
        super().__init__(NoModel(), prefix, flag, max_consecutive_spikes)
        self._set_value(value)
        check_choice("direction", direction, *_SIGNS)
        rule = as_rule(threshold)
        if direction != "up" and isinstance(rule, StaticThreshold):
            raise ValueError(f"Argument threshold should be a rule with direction={direction!r}, but given a number")
        self.direction, self._signs = direction, _SIGNS[direction]
        shape = (2,) if direction == "both" else ()
        # Unlike a norm, a value of 0 is one like any other.
        self._detector = SpikeDetector(
            rule, shape=shape, max_consecutive_spikes=max_consecutive_spikes, ignored=math.nan
        )
        self._statistics = {"statistics": self._detector}

    def _detect(self, engine: Engine, number: Tensor) -> None:
        # A lower threshold is an upper one of the negated value.
        numbers = torch.stack((number, -number)) if self.direction == "both" else number * self._signs[0]
        too_low = numbers < -largest_usable(number)
        detection = self._detector.detect(numbers, numbers.masked_fill(too_low, math.inf))
        # As far below the mean as the threshold is above it. Without a threshold NaN, which fmax ignores.
        lowest = detection.mean - (detection.rule_threshold - detection.mean).abs()
        raised = torch.fmax(detection.comparable, lowest).masked_fill(detection.nonfinite, self._detector.ignored)
        self._detector.observe(detection._replace(comparable=raised))
        flags = torch.stack((detection.spike, detection.nonfinite, detection.threshold_reset))
        spike, _, _ = flags = flags.any(-1) if self.direction == "both" else flags
        count(self._counts, number, *flags)
        setattr(engine.state, self.flag, as_published(spike))
        sides = [side * sign for side, sign in zip(detection.applied_threshold.reshape(-1), self._signs, strict=True)]
        thresholds = dict(zip(("threshold", "lower_threshold"), sides, strict=False))
        self.publish(value=number, spike=spike.to(number.dtype), spike_count=self._counts[0], **thresholds)
        if self._is_awaited(MonitorEvents.SPIKE_DETECTED) and torch.is_nonzero(spike):
            self._fire_spike(engine, self._describe_spike(detection), number)
        self._fire_reset(engine, detection)

    def _describe_spike(self, detection: Detection) -> Spike:
        numbers = torch.stack((detection.spike.to(detection.value.dtype), detection.applied_threshold, detection.value))
        sides = zip(*numbers.reshape(3, -1).tolist(), self._signs, strict=True)
        _, threshold, value, sign = max(sides, key=lambda side: side[0])  # the one with the spike
        value, threshold = sign * value, sign * (math.inf if math.isnan(threshold) else threshold)
        source = None if self._source is None or math.isfinite(value) else self._source.nonfinite_source
        return Spike(self, f"{self.prefix}/value", value, threshold, {}, source)
