"""Checks of a monitor's arguments."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterable
from typing import Any

import torch
from ignite.engine import Engine, Events, EventsList, State
from ignite.engine.events import CallableEventWithFilter
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from ignite_monitor.checks import check_function, check_type
from ignite_monitor.events.source import EventSource
from ignite_monitor.model.dtensor import any_dtensor
from ignite_monitor.model.isolation import generator_kinds
from ignite_monitor.model.names import held_by


class NoModel(nn.Module):
    """Placeholder for the model of a monitor that watches none."""


def check_model(model: nn.Module) -> None:
    """Refuse an object that is no module, a module without initialized parameters that have data, and FSDP1."""
    check_type("model", model, nn.Module, "torch.nn.Module")
    fsdp = sys.modules.get("torch.distributed.fsdp")  # no model is sharded before this import
    if fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(
            "Argument model should not be sharded by FullyShardedDataParallel, which leaves flattened parts of "
            "parameters: shard it with torch.distributed.fsdp.fully_shard"
        )
    parameters = list(model.parameters())
    if not parameters:
        raise ValueError("Argument model should have parameters, but it has none")
    if any(isinstance(parameter, UninitializedParameter) for parameter in parameters):
        raise ValueError("Argument model has lazy modules: run one forward pass before a monitor is made")
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise ValueError("Argument model has scripted modules: give those before torch.jit")
    if all(parameter.is_meta for parameter in parameters):
        raise ValueError("Argument model has no data, but lies on the meta device: materialize it first")


def check_prefix(prefix: str, optional: bool) -> None:
    """Refuse a prefix with characters that loggers replace; an empty one unless it is optional."""
    check_type("prefix", prefix, str, "str")
    if not (prefix or optional) or not re.fullmatch(r"[A-Za-z0-9_./-]*", prefix):
        raise ValueError(f"Argument prefix should be letters, digits, '-', '_', '.' and '/', but given {prefix!r}")


def check_generators(generators: Iterable[Any]) -> tuple[Any, ...]:
    """Return the argument as a tuple; refuse what holds anything but random generators."""
    check_type("generators", generators, Iterable, "Iterable of random generators")
    given = tuple(generators)
    for item in given:
        check_type("generators", item, generator_kinds(), "torch.Generator, or a generator of Python or NumPy")
    return given


def check_loss(loss: Any, model: nn.Module) -> None:
    """Refuse a loss that is no function of a model and a batch, and a sharded model, which can't be copied for it."""
    if any_dtensor(model.parameters()):
        raise ValueError("Argument model should not be sharded: give a model whose ranks hold whole parameters")
    check_function("loss", loss, "the model", "the batch", optional=False)


def check_flag(flag: str) -> None:
    """Refuse a name that can't be an attribute of an engine's state, or is Ignite's."""
    check_type("flag", flag, str, "str")
    if not flag.isidentifier() or hasattr(State(), flag):
        raise ValueError(f"Argument flag should name an attribute that Ignite does not use, but given {flag!r}")


def check_attachable(monitor: Any, engine: Engine) -> None:
    """Refuse an attached monitor, and names taken by the user's code or by other monitors."""
    check_type("engine", engine, Engine, "ignite.engine.Engine")
    kind = type(monitor).__name__
    if monitor._attached_to() is not None:
        raise ValueError(f"This {kind} is attached already: detach() it first, or make another one")
    again = f"detach() the other {kind} or remove() its handle, as before a cell runs again, or give this one a prefix"
    for name in monitor.attributes:
        if hasattr(engine.state, name):
            raise ValueError(
                f"engine.state.{name} is already claimed, by another monitor or by code of your own: {again} and a "
                "flag of its own"
            )
    source = EventSource.on(engine)
    others = [] if source is None else source.monitors
    for family, taken in itertools.product(monitor.families, (name for other in others for name in other.families)):
        if f"{family}/".startswith(f"{taken}/") or f"{taken}/".startswith(f"{family}/"):
            raise ValueError(f"Another monitor on this engine has the prefix {taken!r}: {again} of its own")


def events_of(event: Any, only: Events | None = None) -> list[CallableEventWithFilter]:
    """Return the events of an event or a list of events; ValueError if there is another one than ``only``."""
    if not isinstance(event, (CallableEventWithFilter, EventsList)):
        raise TypeError(f"Argument event should be an event of Ignite or of MonitorEvents, but given {type(event)}")
    events = list(event) if isinstance(event, EventsList) else [event]
    if only is not None and (not events or any(single != only for single in events)):
        raise ValueError(f"Argument event should be {only}, filtered or not, but given {event}")
    return events


def check_optimizer(optimizer: Any, model: nn.Module | None = None, *, optional: bool = False) -> None:
    """Refuse an object that is none of torch's optimizers; a ValueError if it holds none of a model's parameters."""
    if optional and optimizer is None:
        return
    # Of a wrapper the optimizer inside is needed.
    check_type("optimizer", optimizer, Optimizer, "torch.optim.Optimizer" + " or None" * optional)
    if model is not None and held_by(optimizer).isdisjoint(map(id, model.parameters())):
        raise ValueError("Argument optimizer should hold parameters of model, but it holds none of them")
