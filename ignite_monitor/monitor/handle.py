"""Handle of attached monitors: detach, save and resume them together."""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

from ignite.base import Serializable
from ignite.engine import Engine

from ignite_monitor.checks import check_type


class MonitorHandle(Serializable):
    """Handle of monitors on an engine: :meth:`remove` or the end of a ``with`` block detaches them.

    It is saved and resumed as a whole: ``Checkpoint({"model": model, ..., "monitors": handle}, ...)``.

    Args:
        engine: the engine that trains the model.
        monitors: name -> monitor and event. They are attached, or an error leaves everything as it was.
        connect_loggers: a function of name and monitor that calls :meth:`Monitor.log_to`.

    Attributes:
        monitors: name -> monitor, read-only.
    """

    def __init__(
        self,
        engine: Engine,
        monitors: Mapping[str, tuple[Any, Any]],
        connect_loggers: Callable[[str, Any], None] = lambda name, monitor: None,
    ) -> None:
        self.monitors = MappingProxyType({name: monitor for name, (monitor, _) in monitors.items()})
        self._engine = weakref.ref(engine)
        with ExitStack() as undo:
            for name, (monitor, event) in monitors.items():
                monitor._connect(engine, event)
                undo.callback(monitor._disconnect)
                connect_loggers(name, monitor)
            undo.pop_all()
        for monitor in self.monitors.values():
            monitor.clear(engine)

    def remove(self) -> None:
        """Detach the monitors that are still attached to the engine."""
        engine = self._engine()
        with ExitStack() as stack:  # an error of one monitor detaches the others
            for monitor in [*self.monitors.values()][::-1]:
                if monitor._attached_to() is engine:
                    stack.callback(monitor.detach)

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return name -> state of the monitor."""
        return OrderedDict((name, item.state_dict()) for name, item in self.monitors.items())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the states of all monitors.

        Monitors without a saved state keep theirs, and saved states without a monitor are ignored: both are logged.

        Args:
            state_dict: a state that :meth:`state_dict` returned.

        Raises:
            ValueError: if it has the state of no monitor here, or a monitor refuses its state; nothing is loaded then.
        """
        check_type("state_dict", state_dict, Mapping, "Mapping")
        both = [name for name in self.monitors if name in state_dict]
        if self.monitors and not both:
            raise ValueError(f"Argument state_dict should have states of {[*self.monitors]}, but has {[*state_dict]}")
        different = set(self.monitors) ^ set(state_dict)
        if different:
            text = "saved and attached monitors differ: not loaded: %s"
            logging.getLogger(__name__).warning(text, ", ".join(sorted(different)))
        with ExitStack() as undo:
            for name in both:
                item = self.monitors[name]
                undo.callback(item.load_state_dict, item.state_dict())
                item.load_state_dict(state_dict[name])
            undo.pop_all()

    def __enter__(self) -> MonitorHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()
