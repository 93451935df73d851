"""Recording of the loss that a train step returns."""

from __future__ import annotations

from collections.abc import Mapping

from ignite.engine import Engine

from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.keys import LOSS
from ignite_monitor.model.names import tags
from ignite_monitor.model.tensors import number_in
from ignite_monitor.monitor.base import Handlers, Monitor, NoModel


class LossRecorder(Monitor, schema=LOSS):
    """Records the output of the train step: a number, a tensor of one element, or those in a mapping.

    {keys}

    Other outputs, and other items of a mapping, are not recorded.
    """

    def __init__(self, *, prefix: str = LOSS.prefix) -> None:
        super().__init__(NoModel(), prefix)

    def handlers(self) -> Handlers:
        return [(MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed)]

    def _on_train_step_completed(self, engine: Engine) -> None:
        output = engine.state.output
        items = output if isinstance(output, Mapping) else {"value": output}
        numbers = {str(name): number for name, value in items.items() if (number := number_in(value)) is not None}
        self.publish(**dict(zip(tags(numbers), numbers.values(), strict=True)))
