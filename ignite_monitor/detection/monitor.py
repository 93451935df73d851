"""The base of monitors that judge a value by its own earlier ones, and tell of spikes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from torch import Tensor

from ignite_monitor.detection.judge import NormJudge
from ignite_monitor.detection.spikes import Detection
from ignite_monitor.events.monitor_events import MonitorEvents, Spike, told
from ignite_monitor.monitor.base import Monitor

J = TypeVar("J", bound=NormJudge)


class JudgingMonitor(Monitor, Generic[J]):
    """Has a judge, which a subclass makes, and a flag in the engine's state.

    Attributes:
        flag: the attribute of ``engine.state`` that says whether the value is a spike.
    """

    flag: str
    _judge: J
    _known_spike: tuple[Detection, bool] | None = None  # read on the host

    def _spike(self, detection: Detection) -> Spike:
        """What there is to tell of a spike, waiting for it."""
        raise NotImplementedError

    def state_dict(self) -> OrderedDict[str, Any]:
        """Statistics and counts: tensors, dicts of tensors and a number."""
        return OrderedDict(self._judge.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            TypeError: if it is no mapping.
            ValueError: if it was saved by another monitor, or by one with another kind of threshold rule.
        """
        super().load_state_dict(state_dict)
        self._judge.load_state_dict(state_dict)

    def counts(self) -> Tensor:
        return self._judge.counts()

    def reset_threshold(self) -> None:
        self._judge.reset_threshold()

    def reset_run_state(self) -> None:
        self._known_spike = None
        self._warn_of_new_level(wait=True)

    def _is_known_spike(self, detection: Detection) -> bool:
        """Whether it is a spike, known on the host: the first call waits for the device."""
        if self._known_spike is None or self._known_spike[0] is not detection:
            self._known_spike = detection, bool(detection.spike)
        return self._known_spike[1]

    def _is_awaited(self, event: MonitorEvents) -> bool:
        return self._source is not None and self._source.is_awaited(event)

    def _tell(
        self, engine: Any, event: MonitorEvents, detection: Detection, first: Callable[[], Any] | None = None
    ) -> None:
        """Fire an event of a detection, and call a function before."""
        if self._source is not None:
            with told(engine, self._spike(detection)):
                if first is not None:
                    first()
                self._source.fire(event)

    def _tell_of_new_level(self, engine: Any, detection: Detection) -> None:
        listened = self._is_awaited(MonitorEvents.THRESHOLD_RESET)
        if self._warn_of_new_level(wait=listened) and listened:
            self._tell(engine, MonitorEvents.THRESHOLD_RESET, detection)

    def _warn_of_new_level(self, wait: bool) -> bool:
        has_restarted = self._judge.restarts.take(wait)
        if has_restarted:
            self.logger.warning(
                "%s: %d spikes in a row mean a new level: the rule starts afresh from it",
                self.prefix,
                self._judge.detector.max_consecutive_spikes,
            )
        return has_restarted
