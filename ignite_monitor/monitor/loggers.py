"""From a monitor's values on the device to Ignite's loggers, in one transfer."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from itertools import islice
from typing import Any, Protocol

import torch
from ignite.engine import Engine
from ignite.handlers.base_logger import BaseLogger
from torch import Tensor

from ignite_monitor.model._torch import event_handlers, need


class HasValues(Protocol):
    """What loggers have to know of a monitor."""

    metrics: dict[str, Tensor]

    def on_host(self) -> dict[str, float]:
        """This iteration's values as floats."""


class AddedHandlers:
    """The handlers that something adds to an engine between the making of this object and :meth:`note`.

    Ignite's own handles do not tell two equal handlers from each other, and a progress bar gives none.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        need("log_to", event_handlers(engine))
        self._before = {id(handler) for handlers in event_handlers(engine).values() for handler in handlers}
        self._added: list[tuple[Any, tuple[Any, ...]]] = []

    def note(self, monitor: HasValues | None = None, family: str = "") -> None:
        """Take the handlers down that are new; those of a monitor are called only where it has values.

        For some loggers an empty record is a request to a server, or a step of its own. A filtered event would do as
        well, but Ignite's filters close a reference cycle through the engine.

        Args:
            monitor: the monitor; None if they are to be called always.
            family: what the names of the values start with; empty for any.
        """
        engine = self._engine()
        if engine is None:
            return
        for event, handlers in event_handlers(engine).items():
            for place, (handler, args, kwargs) in enumerate(handlers):
                if id(handlers[place]) in self._before:
                    continue
                if monitor is not None and isinstance(getattr(handler, "__self__", None), BaseLogger):
                    continue  # its own business: it sees a run begin and end
                if monitor is not None:
                    handlers[place] = (_where_monitored(handler, monitor, family), args, kwargs)
                self._added.append((event, handlers[place]))
            self._before |= {id(handler) for handler in handlers}

    def remove(self) -> None:
        """Remove the handlers from the engine."""
        engine = self._engine()
        for event, added in self._added:
            if engine is not None:
                handlers = event_handlers(engine)[event]
                event_handlers(engine)[event] = [handler for handler in handlers if handler is not added]
        self._added.clear()


def _where_monitored(handler: Callable[..., Any], monitor: HasValues, family: str) -> Callable[..., Any]:
    owner = weakref.ref(monitor)
    start = f"{family}/" if family else ""

    @functools.wraps(handler, updated=())
    def handle(*args: Any, **kwargs: Any) -> Any:
        monitor = owner()
        if monitor is None or not any(name.startswith(start) for name in monitor.metrics):
            return None
        return handler(*args, **kwargs)

    return handle


class LoggedValues:
    """An ``output_transform`` that gives a monitor's values instead of the engine's output.

    Args:
        family: what the names of the values start with, which is stripped from them; empty for all values.
    """

    def __init__(self, monitor: HasValues, family: str) -> None:
        self._monitor = weakref.ref(monitor)
        self._start = f"{family}/" if family else ""

    def __call__(self, _: Any) -> dict[str, float]:
        monitor = self._monitor()
        if monitor is None:
            return {}
        host, start = monitor.on_host(), self._start
        return {name[len(start) :]: value for name, value in host.items() if name.startswith(start)}


def transfer(groups: list[list[Tensor]]) -> list[list[list[float]]]:
    """The elements of groups of tensors, each flat, in one transfer per device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensors in groups:
        for tensor in tensors:
            wide = tensor.double() if tensor.device.type != "mps" else tensor
            by_device.setdefault(tensor.device, []).append(wide.reshape(-1))
    numbers = {device: iter(torch.cat(tensors).tolist()) for device, tensors in by_device.items()}
    return [[list(islice(numbers[tensor.device], tensor.numel())) for tensor in tensors] for tensors in groups]
