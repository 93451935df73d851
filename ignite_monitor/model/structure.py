"""The modules of a model, and comparison of two models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.model._torch import parameters_in
from ignite_monitor.model.names import named_modules


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """The user's own modules by name, without the wrappers around them.

    Modules inside of scripted and traced modules are excluded: they are never called from Python.
    """
    modules = dict(named_modules(model))  # a wrapper comes before what it wraps, by the same name
    scripted = [module for module in modules.values() if isinstance(module, torch.jit.ScriptModule)]
    inside = {id(inner) for module in scripted for inner in module.modules() if inner is not module}
    return {name: module for name, module in modules.items() if id(module) not in inside}


def is_layer(name: str, module: nn.Module) -> bool:
    """Return True for a module with parameters of its own."""
    # The weights of a parametrized module are in a submodule that it computes them with.
    if ".parametrizations." in f".{name}.":
        return False
    return any(item is not None for item in parameters_in(module).values()) or hasattr(module, "parametrizations")


def first_difference(model: nn.Module, other: nn.Module) -> str | None:
    """The first module or parameter in which another model differs; None if they are built alike.

    Compared are names and classes of modules, whatever wraps or shards them, and names and shapes of parameters.
    """
    ours, theirs = modules_by_name(model), modules_by_name(other)
    difference = _first_difference(_kinds(ours), _kinds(theirs), "module")
    return difference or _first_difference(_parameters(ours), _parameters(theirs), "parameter")


def first_difference_of_states(state: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The first entry in which another state_dict differs by name or shape; None if there is none."""
    return _first_difference(_shapes(state), _shapes(other), "entry")


def _first_difference(ours: dict[str, str], theirs: dict[str, str], what: str) -> str | None:
    for name, kind in ours.items():
        if name not in theirs:
            return f"{what} {name!r} ({kind}) is not in it"
        if theirs[name] != kind:
            return f"{what} {name!r} is {theirs[name]} in it, not {kind}"
    return next((f"{what} {name!r} ({kind}) is in it alone" for name, kind in theirs.items() if name not in ours), None)


def _parameters(modules: dict[str, nn.Module]) -> dict[str, str]:
    own = ((name, last, item) for name, module in modules.items() for last, item in parameters_in(module).items())
    return _shapes({f"{name}.{last}".lstrip("."): item for name, last, item in own if item is not None})


def _shapes(state: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
        for name, value in state.items()
    }


def _kinds(modules: dict[str, nn.Module]) -> dict[str, str]:
    # fully_shard makes a class of its own out of a module's.
    def is_own(kind: type) -> bool:
        return "FSDPModule" not in {base.__name__ for base in kind.__mro__}

    return {name: next(filter(is_own, type(module).__mro__)).__name__ for name, module in modules.items()}


def hookable(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Select those of a model's modules on which a forward hook does not change the model's result.

    ``nn.TransformerEncoderLayer`` in evaluation mode leaves its fast path, whose result differs in the last bits and at
    padded positions, where it or a module inside has a forward hook.
    """
    layers = (module for module in modules.values() if isinstance(module, nn.TransformerEncoderLayer))
    inside = {id(module) for layer in layers if not layer.training for module in layer.modules()}
    return {name: module for name, module in modules.items() if id(module) not in inside}
