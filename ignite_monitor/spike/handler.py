"""SpikeMonitor: whether a number that belongs to the iteration is a spike."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from ignite.engine import Engine
from torch import Tensor

from ignite_monitor.checks import check_count, check_function
from ignite_monitor.detection.judge import NormJudge
from ignite_monitor.detection.monitor import JudgingMonitor
from ignite_monitor.detection.spikes import Detection, SpikeDetector
from ignite_monitor.detection.thresholds import Threshold, as_rule
from ignite_monitor.events.monitor_events import MonitorEvents, Spike
from ignite_monitor.keys import SPIKE
from ignite_monitor.model.devices import wide_dtype
from ignite_monitor.monitor.base import Handlers, NoModel, check_flag
from ignite_monitor.monitor.publisher import as_published


class SpikeMonitor(JudgingMonitor[NormJudge], schema=SPIKE):
    """Judges any scalar of the iteration as ``GradMonitor`` judges the gradient's norm: by its own earlier values.

    The value is asked for when the train step has returned and the other monitors have published, before
    ITERATION_COMPLETED; one value per iteration enters the statistics. It is a spike if it exceeds the threshold that
    the rule derives from earlier values, or if it is not finite. A spike enters clipped to the threshold, the further
    ones in a row not at all; after ``max_consecutive_spikes`` of them the rule starts afresh. SPIKE_DETECTED and
    THRESHOLD_RESET are fired, with ``engine.state.spike`` telling of it.

    {keys}

    Every rank judges what its own function returns, and nothing is communicated: where ranks have to agree, the
    function returns the same on each. A tensor stays on its device, and nobody waits for it.

    Args:
        value: function of the engine that returns a number, a tensor with one element, or None where there is no value
            this time. ``engine.state.output`` is what the train step has returned, and ``engine.state.metrics`` has
            what other monitors publish.
        threshold: a threshold rule, of which a copy is taken, a function ``(mean, std, count) -> threshold``, or a
            number for a static threshold. By default ``MeanStdThreshold()``.
        max_consecutive_spikes: how many spikes in a row mean a new level, from which the rule then starts afresh.
        prefix: what the values' names start with.
        flag: the attribute of ``engine.state`` that says whether the value is a spike: False when an iteration starts,
            and the detection from the end of the train step on: a bool on the CPU, else a 0-dim bool tensor.

    Raises:
        TypeError: if an argument is of another type; in a run if the function returns anything but one number.
        ValueError: if an argument has a value it can't have.

    Examples:
        .. code-block:: python

            loss = SpikeMonitor(lambda engine: engine.state.output, prefix="loss", flag="loss_is_spike")
            loss.attach(trainer)

            update = SpikeMonitor(
                lambda engine: engine.state.metrics.get("monitor/update_ratio_max"),
                threshold=RobustThreshold(),
                prefix="update",
                flag="update_is_spike",
            )
            update.attach(trainer)
    """

    _state_dict_all_req_keys = ("detector", "known", "score")
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
        super().__init__(NoModel(), prefix)
        check_function("value", value, "the engine", optional=False)
        check_flag(flag)
        self.value = value
        self.flag = flag
        self.attributes = {flag: False}
        patience = check_count("max_consecutive_spikes", max_consecutive_spikes, least=1)
        self._judge = NormJudge(SpikeDetector(as_rule(threshold), max_consecutive_spikes=patience))
        self._missing = 0  # iterations without a value, as long as there was none

    def handlers(self) -> Handlers:
        return [(MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed)]

    def _on_train_step_completed(self, engine: Engine) -> Callable[[], None] | None:
        # Once all monitors have published: the value may be one of theirs.
        return functools.partial(self._judge_value, engine) if self._is_running else None

    def _judge_value(self, engine: Engine) -> None:
        value = self.value(engine)
        if value is None:
            self._report_missing()
            return
        self._missing = self._PATIENCE
        number = _as_number(value)
        # A detector knows no number below all others.
        detection = self._judge.detector.judge(number.masked_fill(number.isneginf(), torch.inf))._replace(given=number)
        self._judge.observe(detection)
        setattr(engine.state, self.flag, as_published(detection.spike))
        values = self._judge.statistics(detection)
        names = ("threshold", "spike", "spike_count", "spike_score")
        self.publish(value=number, **{name: values[name] for name in names if name in values})
        if self._is_awaited(MonitorEvents.SPIKE_DETECTED) and self._is_known_spike(detection):
            self._tell(engine, MonitorEvents.SPIKE_DETECTED, detection)
        if self._judge.restarts:
            self._tell_of_new_level(engine, detection)

    def _report_missing(self) -> None:
        self._missing += 1
        if self._missing == self._PATIENCE:
            self.logger.warning(
                "%s: %d iterations had no value, so nothing is judged. The likely cause: the function given as value "
                "asks for a name that nobody publishes in these iterations, or the train step returns nothing.",
                self.prefix,
                self._PATIENCE,
            )

    def _spike(self, detection: Detection) -> Spike:
        value, threshold = torch.stack((detection.given, detection.threshold)).tolist()
        source = None if self._source is None or math.isfinite(value) else self._source.nonfinite_source
        return Spike(self, f"{self.prefix}/value", value, threshold, {}, source)


def _as_number(value: Any) -> Tensor:
    """A number as a 0-dim tensor of the widest dtype where it lies.

    Raises:
        TypeError: if it is not one number.
    """
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().reshape(()).to(wide_dtype(value.device))
    try:
        if isinstance(value, Tensor):
            raise TypeError("not one real number")
        return torch.tensor(float(value), dtype=torch.float64, device="cpu")
    except (TypeError, ValueError) as error:
        raise TypeError(f"Argument value should return one number or None, but it returned {value!r}") from error
