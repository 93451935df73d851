"""Recording of the loss that a train step returns."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from ignite.engine import Engine
from torch import Tensor

from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.keys import LOSS
from ignite_monitor.model.modes import has_local_data
from ignite_monitor.model.names import tags
from ignite_monitor.monitor.base import Handlers, Monitor, NoModel


class LossRecorder(Monitor, schema=LOSS):
    """Records the output of the train step: a number, a 0-dim tensor, or those in a mapping.

    {keys}

    Other outputs, and other items of a mapping, are not recorded.
    """

    def __init__(self) -> None:
        super().__init__(NoModel(), LOSS.prefix)

    def handlers(self) -> Handlers:
        return [(MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed)]

    def _on_train_step_completed(self, engine: Engine) -> None:
        output = engine.state.output
        items = output if isinstance(output, Mapping) else {"value": output}
        numbers: dict[str, Any] = {str(name): value for name, value in items.items() if _is_number(value)}
        values = (value.detach().clone() if isinstance(value, Tensor) else value for value in numbers.values())
        self.publish(**dict(zip(tags(numbers), values, strict=True)))


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0 and value.is_floating_point() and has_local_data(value)
    return isinstance(value, Real) and not isinstance(value, bool)
