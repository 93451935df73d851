"""Checks of a monitor's arguments."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ignite.engine import Engine, Events, EventsList, State
from ignite.engine.events import CallableEventWithFilter
from torch import nn
from torch.nn.parameter import UninitializedParameter

from ignite_monitor.checks import check_type


class NoModel(nn.Module):
    """Placeholder for the model of a monitor that watches none."""


def check_model(model: nn.Module) -> None:
    """Refuse an object that is no module, and a module without initialized parameters that have data."""
    check_type("model", model, nn.Module, "torch.nn.Module")
    parameters = list(model.parameters())
    if not parameters:
        raise ValueError("Argument model should have parameters, but it has none")
    if any(isinstance(parameter, UninitializedParameter) for parameter in parameters):
        raise ValueError("Argument model has lazy modules: run one forward pass before a monitor is made")
    if all(parameter.is_meta for parameter in parameters):
        raise ValueError("Argument model has no data, but lies on the meta device: materialize it first")


def check_prefix(prefix: str, optional: bool) -> None:
    """Refuse a prefix with characters that loggers replace; an empty one unless it is optional."""
    check_type("prefix", prefix, str, "str")
    if not (prefix or optional) or not re.fullmatch(r"[A-Za-z0-9_./-]*", prefix):
        raise ValueError(f"Argument prefix should be letters, digits, '-', '_', '.' and '/', but given {prefix!r}")


def check_flag(flag: str) -> None:
    """Refuse a name that can't be an attribute of an engine's state.

    Raises:
        TypeError: if it is no string.
        ValueError: if it is no identifier, or Ignite uses it.
    """
    check_type("flag", flag, str, "str")
    if not flag.isidentifier() or hasattr(State(), flag):
        raise ValueError(f"Argument flag should name an attribute that Ignite does not use, but given {flag!r}")


def check_free(engine: Engine, attributes: Iterable[str], kind: str) -> None:
    """Refuse attributes that the engine's state has already."""
    for name in attributes:
        if hasattr(engine.state, name):
            raise ValueError(
                f"engine.state.{name} is already claimed, by another monitor or by code of your own: detach() the "
                f"other {kind}, as before a cell of a notebook is run again, or give this one a prefix and a flag of "
                "its own"
            )


def events_of(event: Any) -> list[CallableEventWithFilter]:
    """Return the events of an event or a list of events.

    Raises:
        TypeError: if it is neither.
    """
    if not isinstance(event, (CallableEventWithFilter, EventsList)):
        raise TypeError(f"Argument event should be an event of Ignite or of MonitorEvents, but given {type(event)}")
    return list(event) if isinstance(event, EventsList) else [event]


def iteration_events(event: Any) -> list[CallableEventWithFilter]:
    """Return the events of the argument, all of them ITERATION_STARTED.

    Raises:
        TypeError: if it is no event.
        ValueError: if it is another event.
    """
    events = events_of(event)
    if not events or any(single != Events.ITERATION_STARTED for single in events):
        raise ValueError(f"Argument event should be Events.ITERATION_STARTED, filtered or not, but given {event}")
    return events
