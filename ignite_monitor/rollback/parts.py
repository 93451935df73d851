"""State of the things in ``to_save``: capture, restore, and check for non-finite values."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.model._torch import part_of_rank
from ignite_monitor.model.norms import total_norm
from ignite_monitor.model.tensors import tensors_in
from ignite_monitor.monitor.base import Monitor
from ignite_monitor.rollback.copying import clone, copy_into


class Part:
    """An object with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def state(self) -> Any:
        """The state itself, nothing copied."""
        return self.thing.state_dict()

    def restore(self, state: Any) -> None:
        """Load an earlier state, without keeping its tensors."""
        if state:  # a disabled GradScaler has nothing to load
            self.thing.load_state_dict(clone(state))


class ModulePart(Part):
    """Parameters, all buffers (non-persistent ones included) and extra state of a module."""

    def state(self) -> dict[str, Any]:
        base = nn.Module.get_extra_state
        modules = self.thing.named_modules()
        return {
            "parameters": dict(self.thing.named_parameters()),
            "buffers": dict(self.thing.named_buffers()),
            "extra": {n: module.get_extra_state() for n, module in modules if type(module).get_extra_state is not base},
        }

    def restore(self, state: Any) -> None:
        current = self.state()
        for kind in ("parameters", "buffers"):
            for name, tensor in copy_into(current[kind], state[kind]).items():
                if tensor is not current[kind].get(name):  # the shape has changed, or it was removed
                    self._replace(name, tensor)
        for name, extra in clone(state["extra"]).items():
            self.thing.get_submodule(name).set_extra_state(extra)

    def _replace(self, name: str, tensor: Tensor) -> None:
        path, _, leaf = name.rpartition(".")
        owner = self.thing.get_submodule(path)
        known = getattr(owner, leaf, None)
        if isinstance(known, nn.Parameter):
            known.data = tensor
        else:
            setattr(owner, leaf, tensor)


class OptimizerPart(Part):
    """State and parameter groups of an optimizer, restored in place."""

    def _parameters(self) -> dict[str, Tensor]:
        groups = enumerate(self.thing.param_groups)
        return {f"{i}.{j}": parameter for i, group in groups for j, parameter in enumerate(group["params"])}

    def state(self) -> dict[str, Any]:
        own, parameters = self.thing.state, self._parameters()
        return {
            "state": {key: own[parameter] for key, parameter in parameters.items() if parameter in own},
            "other": {key: value for key, value in own.items() if not isinstance(key, Tensor)},
            "groups": [{k: v for k, v in group.items() if k != "params"} for group in self.thing.param_groups],
        }

    def restore(self, state: Any) -> None:
        own: dict[Any, Any] = self.thing.state
        for key, parameter in self._parameters().items():
            if key in state["state"]:
                own[parameter] = copy_into(own.get(parameter), state["state"][key])
            else:
                own.pop(parameter, None)
        for key in [key for key in own if not isinstance(key, Tensor)]:
            del own[key]
        own.update(clone(state["other"]))
        for group, saved in zip(self.thing.param_groups, state["groups"], strict=False):
            group.update((key, copy_into(group.get(key), value)) for key, value in saved.items())


class MonitorPart(Part):
    """A monitor's thresholds; its counts and what it keeps on rollback are not restored."""

    def restore(self, state: Any) -> None:
        if state:
            current = self.thing.state_dict()
            self.thing.load_state_dict(type(current)(current | self._merged(clone(state), current)))

    def _merged(self, saved: Any, current: Any) -> Any:
        if not isinstance(saved, Mapping) or not isinstance(current, Mapping):
            return saved
        return {
            key: current[key] if self._is_kept(key) and key in current else self._merged(value, current.get(key))
            for key, value in saved.items()
        }

    def _is_kept(self, key: str) -> bool:
        return key.endswith("_count") or key in ("counts", *self.thing.kept_on_rollback)


class TrainingState:
    """Everything that a rollback restores.

    Args:
        to_save: name -> object.

    Attributes:
        exempt: paths of tensors that were not finite from the first.
    """

    def __init__(self, to_save: Mapping[str, Any]) -> None:
        things = {name: unwrapped(thing) for name, thing in to_save.items()}
        self.things = [*things.values()]
        self.monitors = [thing for thing in self.things if isinstance(thing, Monitor)]
        self.modules = [thing for thing in self.things if isinstance(thing, nn.Module)]
        self.optimizers = [thing for thing in self.things if hasattr(thing, "register_step_post_hook")]
        self.parts = {name: part_of(thing) for name, thing in things.items() if not isinstance(thing, Monitor)}
        self.exempt: set[str] = set()

    def state(self) -> dict[str, Any]:
        """The state itself, nothing copied."""
        return {name: part.state() for name, part in self.parts.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore an earlier state, and drop all gradients."""
        for name, part in self.parts.items():
            part.restore(state[name])
        groups = [group["params"] for optimizer in self.optimizers for group in optimizer.param_groups]
        for parameter in chain(*(module.parameters() for module in self.modules), *groups):
            parameter.grad = None

    def parameters(self) -> list[int]:
        """Identities of all parameters; other ones are parameters that no snapshot knows."""
        return [id(parameter) for module in self.modules for parameter in module.parameters()]

    def nonfinite(self, earlier: Mapping[str, Any] | None) -> list[str]:
        """Paths of tensors that are not finite, and were in an earlier state; synchronizes with the device.

        Buffers that appear with non-finite values, attention masks for instance, are exempt.
        """
        paths = _nonfinite_in(self.state(), self.exempt)
        if paths:
            known = _numbers_in(earlier).keys()
            self.exempt |= {path for path in paths - known if ".buffers." in path or not known}
        return sorted(paths - self.exempt)


def unwrapped(thing: Any) -> Any:
    """The torch optimizer inside of a wrapper that has no step hooks of its own, such as accelerate's."""
    inner = getattr(thing, "optimizer", None)
    has_hooks = "_optimizer_step_post_hooks" in vars(thing) if hasattr(thing, "__dict__") else True
    return inner if isinstance(thing, Optimizer) and isinstance(inner, Optimizer) and not has_hooks else thing


def part_of(thing: Any) -> Part:
    """Wrap an object by its kind."""
    if isinstance(thing, nn.Module):
        return ModulePart(thing)
    if isinstance(thing, Optimizer) and type(thing).state_dict is Optimizer.state_dict:
        return OptimizerPart(thing)
    return Part(thing)


def states_of(monitors: Iterable[Monitor]) -> dict[str, Any]:
    """States of monitors by name."""
    return {_name_of(monitor): monitor.state_dict() for monitor in monitors}


def restore_monitors(monitors: Iterable[Monitor], states: Mapping[str, Any]) -> None:
    """Restore the thresholds of the monitors whose state is known."""
    for monitor in monitors:
        MonitorPart(monitor).restore(states.get(_name_of(monitor)))


def _name_of(monitor: Monitor) -> str:
    return monitor.prefix or monitor.families[0]


def _numbers_in(state: Any) -> dict[str, Tensor]:
    tensors = ((path.replace("/", "."), tensor) for path, tensor in tensors_in(state))
    return {path: t for path, t in tensors if t.is_complex() or (t.is_floating_point() and t.itemsize > 1)}


def _nonfinite_in(state: Any, exempt: Container[str]) -> set[str]:
    tensors = ((path, tensor.detach()) for path, tensor in _numbers_in(state).items() if path not in exempt)
    named = {path: part_of_rank(tensor) for path, tensor in tensors if not tensor.is_meta}
    if bool(torch.isfinite(total_norm(named.values()))):  # cheaper than an elementwise check
        return set()
    return {path for path, tensor in named.items() if not bool(torch.isfinite(tensor).all())}
