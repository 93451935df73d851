"""Bases of the monitors with a threshold, of those that report spikes, and of those that follow a number."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.checks import check_count, check_function
from ignite_monitor.detection.state import Statistics, load_all, loaded
from ignite_monitor.events.monitor_events import MonitorEvents, Phase, Spike, exposed_spike
from ignite_monitor.model._torch import foreach_add
from ignite_monitor.model.devices import move_like, wide_dtype
from ignite_monitor.monitor.base import Handlers, Monitor, check_flag
from ignite_monitor.monitor.ranks import Group
from ignite_monitor.monitor.transfer import as_published, is_cpu

_PATIENCE = 50
_NO_VALUE = (
    f"{_PATIENCE} iterations had no value, so nothing can be detected. Check that the function given as value reads a "
    "name that these iterations publish, and that the train step returns it."
)
COUNTS = ("spike_count", "nonfinite_count", "reset_count")


def count(counts: list[Tensor], value: Tensor, *flags: Tensor) -> None:
    """Add the 0-dim flags of a value to counts in place, on its device."""
    if counts[0].device != value.device:
        counts[:] = [move_like(item, value) for item in counts]
    counts[:] = foreach_add(counts, flags)


class CountingMonitor(Monitor):
    """Has a threshold: handlers that react to spikes read its counts, and may reset it."""

    _statistics: dict[str, Statistics]  # of the threshold, by their names in the state

    def __init__(self, model: nn.Module, prefix: str, group: Group = None) -> None:
        super().__init__(model, prefix, group=group)
        self._counts = [*torch.zeros(len(COUNTS), dtype=torch.float64, device="cpu").unbind()]

    def counts(self) -> Tensor:
        """Return the numbers of spikes, non-finite values and resets so far."""
        return torch.stack(self._counts)

    def reset_threshold(self) -> None:
        """Reset the running statistics of the threshold; counts are kept."""
        for part in self._statistics.values():
            part.reset_threshold()

    def threshold_state(self) -> dict[str, Any]:
        """Return the running statistics of the threshold."""
        return {name: part.state_dict() for name, part in self._statistics.items()}

    def restore_threshold(self, state: Mapping[str, Any]) -> None:
        """Continue from earlier statistics of the threshold; an error changes nothing. Counts are kept.

        Args:
            state: what :meth:`threshold_state` returned.
        """
        load_all(self._statistics, state)

    def state_dict(self) -> OrderedDict[str, Any]:
        return OrderedDict(self.threshold_state(), counts=self.counts())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        counts = loaded({"counts": self.counts()}, {"counts": state_dict["counts"]})["counts"]
        self.restore_threshold(state_dict)
        self._counts[:] = counts.clone().unbind()


class DetectionMonitor(CountingMonitor):
    """Reports spikes and resets of a threshold."""

    on_spike: Callable[[Any, Any], Any] | str | None = None  # called at a spike, if it is a function
    _reported_resets = 0.0

    def __init__(
        self, model: nn.Module, prefix: str, flag: str, max_consecutive_spikes: int, group: Group = None
    ) -> None:
        super().__init__(model, prefix, group)
        check_flag(flag)
        self.flag = flag
        self.attributes = {flag: False}
        self.max_consecutive_spikes = check_count("max_consecutive_spikes", max_consecutive_spikes, least=1)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._reported_resets = float(self._resets())

    def on_run_end(self) -> None:
        self._report_resets(float(self._resets()))

    def deferred_tensors(self) -> list[Tensor]:
        return [] if is_cpu(self._resets()) else [self._resets()]

    def resolve_deferred(self, extra: list[list[float]]) -> dict[str, float]:
        if not is_cpu(self._resets()):
            self._report_resets(*extra.pop(0))
        return {}

    def _resets(self) -> Tensor:
        """The number of resets to report so far, 0-dim."""
        return self._counts[2]

    def _is_awaited(self, event: MonitorEvents) -> bool:
        if event is MonitorEvents.SPIKE_DETECTED and callable(self.on_spike):
            return True
        return self._source is not None and self._source.is_awaited(event)

    def _known(self, spike: Tensor) -> bool | None:
        """Read a flag, if that takes no synchronization or handlers await it; else return None."""
        return torch.is_nonzero(spike) if is_cpu(spike) or self._is_awaited(MonitorEvents.SPIKE_DETECTED) else None

    def _fire_spike(self, engine: Any, spike: Spike, value: Tensor) -> None:
        """Call ``on_spike`` and fire SPIKE_DETECTED while ``engine.state.spike`` describes the spike."""
        source = self._source  # on_spike may detach the monitor
        if source is not None:
            with exposed_spike(engine, spike):
                if callable(self.on_spike):
                    with source.users_code():
                        self.on_spike(engine, as_published(value))
                source.fire(MonitorEvents.SPIKE_DETECTED)

    def _fire_reset(self, engine: Any, detection: Any) -> None:
        """Report a reset of the threshold, if that takes no synchronization or handlers await it."""
        awaited, resets = self._is_awaited(MonitorEvents.THRESHOLD_RESET), self._resets()
        if (awaited or is_cpu(resets)) and self._report_resets(float(resets)) and awaited and self._source is not None:
            with exposed_spike(engine, self._describe_spike(detection)):
                self._source.fire(MonitorEvents.THRESHOLD_RESET)

    def _describe_spike(self, detection: Any) -> Spike:
        raise NotImplementedError

    def _report_resets(self, count: float) -> bool:
        """Log resets of the threshold that have not been logged, from their number."""
        is_new, self._reported_resets = count > self._reported_resets, count
        if is_new:
            text = "spikes in a short time; assuming a regime change, resetting threshold statistics."
            self.warn(f"{self.max_consecutive_spikes} {text}")
        return is_new

    def warn(self, text: str) -> None:
        """Log a line that is not recorded: the values say the same.

        Args:
            text: the line without class, prefix and iteration.
        """
        engine = self._attached_to()
        iteration = 0 if engine is None else engine.state.iteration
        self.logger.warning("%s: iteration %d: %s", self._title, iteration, text)


class ScalarMonitor(CountingMonitor):
    """Reads a function of the engine after the train step, when the other monitors have published."""

    value: Callable[[Any], float | Tensor | None]
    _missing = 0  # iterations without a value, as long as there was none

    def handlers(self) -> Handlers:
        return [(Phase.VALUES_PUBLISHED, self._on_values_published)]  # the value may be one of theirs

    def _on_values_published(self, engine: Any) -> None:
        value = self.value(engine) if self._is_running else None
        if value is not None:
            self._missing = _PATIENCE
            self._detect(engine, _as_number(value))
        elif self._is_running:
            self._missing += 1
            if self._missing == _PATIENCE:
                self.report("no_value", _NO_VALUE)

    def _detect(self, engine: Any, number: Tensor) -> None:
        """Detect with a 0-dim tensor of the widest dtype of its device."""
        raise NotImplementedError

    def _set_value(self, value: Callable[[Any], float | Tensor | None]) -> None:
        check_function("value", value, "the engine", optional=False)
        self.value = value


def _as_number(value: Any) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().reshape(()).to(wide_dtype(value.device))
    try:
        if isinstance(value, Tensor):
            raise TypeError("not one real number")
        return torch.tensor(float(value), dtype=torch.float64, device="cpu")
    except (TypeError, ValueError) as error:
        raise TypeError(f"Argument value should return one number or None, but it returned {value!r}") from error
