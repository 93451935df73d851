"""SpikeMonitor: spikes of any scalar of the iteration."""

from __future__ import annotations

import functools
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from ignite.engine import Engine
from torch import Tensor

from ignite_monitor.checks import check_function
from ignite_monitor.detection.monitor import DetectionMonitor
from ignite_monitor.detection.spikes import Detection, SpikeDetector, largest_usable
from ignite_monitor.detection.thresholds import Threshold, as_rule
from ignite_monitor.events.monitor_events import MonitorEvents, Spike
from ignite_monitor.keys import SPIKE
from ignite_monitor.model.devices import move_like, wide_dtype
from ignite_monitor.monitor.base import Handlers, NoModel
from ignite_monitor.monitor.transfer import as_published


class SpikeMonitor(DetectionMonitor, schema=SPIKE):
    """Detect spikes of any scalar, as ``GradMonitor`` detects those of the gradient norm.

    The value is read after the train step, when the other monitors have published. It is a spike if it is not finite,
    or exceeds the threshold that the rule estimates from earlier values (default: exponentially weighted mean + 6
    standard deviations). SPIKE_DETECTED and THRESHOLD_RESET are fired, and ``engine.state.spike`` describes the value.

    A value far below the mean updates the statistics clipped to as far below it as the threshold is above. Every rank
    uses the value of its own function. A tensor stays on its device, without synchronization.

    {keys}

    Args:
        value: function of the engine that returns a number, a tensor with one element, or None for no value.
        threshold: a threshold rule (copied), a function ``(mean, std, count) -> threshold``, or a number. None for
            ``MeanStdThreshold()``.
        max_consecutive_spikes: number of consecutive spikes that reset the rule.
        prefix: prefix of all names.
        flag: attribute of ``engine.state`` for the result: False until it is known, then a bool on the CPU, else a
            0-dim bool tensor.

    Raises:
        TypeError: if an argument is of another type; in a run, if the function returns anything but one number.
        ValueError: if an argument has a value that is not allowed.

    Examples:
        .. code-block:: python

            loss = SpikeMonitor(lambda engine: engine.state.output, prefix="loss", flag="loss_is_spike")
            loss.attach(trainer)
    """

    _state_dict_all_req_keys = ("detector", "counts")
    _PATIENCE = 50

    def __init__(
        self,
        value: Callable[[Engine], float | Tensor | None],
        *,
        threshold: Threshold = None,
        max_consecutive_spikes: int = 10,
        prefix: str = "spike",
        flag: str = "unhealthy_value",
    ) -> None:
        super().__init__(NoModel(), prefix, flag, max_consecutive_spikes)
        check_function("value", value, "the engine", optional=False)
        self.value = value
        # Unlike a norm, a value of 0 is one like any other.
        self._detector = SpikeDetector(
            as_rule(threshold), max_consecutive_spikes=self.max_consecutive_spikes, ignored=math.nan
        )
        self._counts = torch.zeros(3, dtype=torch.float64, device="cpu")  # as those of :meth:`counts`
        self._missing = 0  # iterations without a value, as long as there was none

    def counts(self) -> Tensor:
        return self._counts

    def reset_threshold(self) -> None:
        self._detector.reset_threshold()

    def state_dict(self) -> OrderedDict[str, Any]:
        return OrderedDict(detector=self._detector.state_dict(), counts=self._counts)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        counts = torch.as_tensor(state_dict["counts"], dtype=torch.float64, device="cpu").reshape(3).clone()
        self._detector.load_state_dict(state_dict["detector"])
        self._counts = counts

    def handlers(self) -> Handlers:
        return [(MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed)]

    def _on_train_step_completed(self, engine: Engine) -> Callable[[], None] | None:
        # Once all monitors have published: the value may be one of theirs.
        return functools.partial(self._detect, engine) if self._is_running else None

    def _detect(self, engine: Engine) -> None:
        self._iteration, value = engine.state.iteration, self.value(engine)
        if value is None:
            self._report_missing()
            return
        self._missing = self._PATIENCE
        number = _as_number(value)
        too_low = number < -largest_usable(number)
        detection = self._detector.detect(number, number.masked_fill(too_low, math.inf))
        # As far below the mean as the threshold is above it. Without a threshold NaN, which fmax ignores.
        lowest = detection.mean - (detection.limit - detection.mean).abs()
        raised = torch.fmax(detection.compared, lowest).masked_fill(detection.nonfinite, self._detector.ignored)
        self._detector.observe(detection._replace(compared=raised))
        flags = torch.stack((detection.spike, detection.nonfinite, detection.threshold_reset))
        self._counts = move_like(self._counts, number) + flags
        self._resets.set(detection.threshold_reset)
        setattr(engine.state, self.flag, as_published(detection.spike))
        spike = detection.spike.to(number.dtype)
        self.publish(value=number, threshold=detection.threshold, spike=spike, spike_count=self._counts[0])
        if self._is_awaited_spike(detection.spike):
            self._fire_spike(engine, self._spike(detection), number)
        self._fire_reset(engine, detection)

    def _report_missing(self) -> None:
        self._missing += 1
        if self._missing == self._PATIENCE:
            self._log(
                logging.WARNING,
                f"{self._PATIENCE} iterations had no value, so no spike can be detected. Likely cause: the function "
                "given as value reads a name that these iterations do not publish, or the train step returns None.",
            )

    def _spike(self, detection: Detection) -> Spike:
        value, threshold = torch.stack((detection.value, detection.threshold)).tolist()
        source = None if self._source is None or math.isfinite(value) else self._source.nonfinite_source
        return Spike(self, f"{self.prefix}/value", value, math.inf if math.isnan(threshold) else threshold, {}, source)


def _as_number(value: Any) -> Tensor:
    """Convert a number to a 0-dim tensor of the widest dtype of its device; a TypeError if it is not one number."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().reshape(()).to(wide_dtype(value.device))
    try:
        if isinstance(value, Tensor):
            raise TypeError("not one real number")
        return torch.tensor(float(value), dtype=torch.float64, device="cpu")
    except (TypeError, ValueError) as error:
        raise TypeError(f"Argument value should return one number or None, but it returned {value!r}") from error
