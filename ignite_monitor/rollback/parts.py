"""What a training is made of: each part with its state and the way back to an earlier one, and learning rates."""

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
from ignite_monitor.rollback.copying import clone, refill

# What schedules keep learning rates in: torch's in parameter groups and in lists, Ignite's in numbers and lists.
_IN_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr")
_IN_SCHEDULES = ("base_lrs", "max_lrs", "eta_min", "start_value", "end_value", "values")
_INNER = ("lr_scheduler", "scheduler", "schedulers", "_schedulers")
# What a schedule sets in parameter groups, and its user.
SCHEDULED = ("lr", "initial_lr", "momentum", "betas", "weight_decay")


class Part:
    """Something whose state goes back: here what loads what its ``state_dict()`` returned."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def state(self) -> Any:
        """The state as it is, nothing copied: dicts and lists of tensors and of anything else."""
        return self.thing.state_dict()

    def put_back(self, state: Any, scheduled: bool) -> None:
        """Have an earlier state again, without keeping its tensors; what schedules set only if ``scheduled``."""
        groups = [] if scheduled else getattr(self.thing, "param_groups", [])
        kept = [{key: group[key] for key in SCHEDULED if key in group} for group in groups]
        if state:  # a GradScaler that is off has nothing to load
            self.thing.load_state_dict(clone(state))
        for group, now in zip(getattr(self.thing, "param_groups", []), kept, strict=False):
            group.update(now)


def part_of(thing: Any) -> Part:
    """How something with a ``state_dict`` goes back."""
    if isinstance(thing, nn.Module):
        return ModulePart(thing)
    if isinstance(thing, Optimizer) and type(thing).state_dict is Optimizer.state_dict:
        return OptimizerPart(thing)
    return Part(thing)


def is_scheduler(thing: Any) -> bool:
    """Whether something only sets what an optimizer steps with, or what Ignite keeps in an engine's state."""
    if isinstance(thing, (nn.Module, Optimizer)) or hasattr(thing, "param_groups"):
        return False
    return any(hasattr(thing, name) for name in ("optimizer", "get_last_lr", "simulate_values"))


class ModulePart(Part):
    """Parameters, buffers (those that no ``state_dict`` holds as well) and extra state of a module."""

    def state(self) -> dict[str, Any]:
        base = nn.Module.get_extra_state
        extra = {n: m.get_extra_state() for n, m in self.thing.named_modules() if type(m).get_extra_state is not base}
        return {
            "parameters": dict(self.thing.named_parameters()),
            "buffers": dict(self.thing.named_buffers()),
            "extra": extra,
        }

    def put_back(self, state: Any, scheduled: bool) -> None:
        now = self.state()
        for kind in ("parameters", "buffers"):
            back = refill(now[kind], state[kind])
            for name, tensor in back.items():
                if tensor is not now[kind].get(name):  # it has another shape by now, or is gone
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
    """State and parameter groups of an optimizer of torch's kind, in place."""

    def _parameters(self) -> dict[str, Tensor]:
        groups = enumerate(self.thing.param_groups)
        return {f"{i}.{j}": each for i, group in groups for j, each in enumerate(group["params"])}

    def state(self) -> dict[str, Any]:
        own = self.thing.state
        parameters = self._parameters()
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.thing.param_groups]
        return {
            "state": {key: own[each] for key, each in parameters.items() if each in own},
            "other": {key: value for key, value in own.items() if not isinstance(key, Tensor)},
            "groups": groups,
        }

    def put_back(self, state: Any, scheduled: bool) -> None:
        own: dict[Any, Any] = self.thing.state
        for key, parameter in self._parameters().items():
            if key in state["state"]:
                own[parameter] = refill(own.get(parameter), state["state"][key])
            else:
                own.pop(parameter, None)
        for other in [other for other in own if not isinstance(other, Tensor)]:
            del own[other]
        own.update(clone(state["other"]))
        for group, before in zip(self.thing.param_groups, state["groups"], strict=False):
            kept = () if scheduled else SCHEDULED
            group.update((k, refill(group.get(k), v)) for k, v in before.items() if k not in kept)


class MonitorPart(Part):
    """A monitor's thresholds; its counts go on, and what it says that goes on."""

    def state(self) -> dict[str, Any]:
        return {key: value for key, value in self.thing.state_dict().items() if key not in self.thing.kept_on_rollback}

    def put_back(self, state: Any, scheduled: bool) -> None:
        if state:
            now = self.thing.state_dict()
            self.thing.load_state_dict(type(now)(now | _with_counts(clone(state), now)))


def _with_counts(then: Any, now: Any) -> Any:
    if not isinstance(then, Mapping) or not isinstance(now, Mapping):
        return then
    return {
        key: now[key] if _goes_on(key, value, now.get(key)) else _with_counts(value, now.get(key))
        for key, value in then.items()
    }


def _goes_on(key: str, then: Any, now: Any) -> bool:
    # Of parameters that have come since, nothing is known in the state of then.
    is_count = key.endswith("_count") or key in ("restarts", "score", "alone")
    return is_count and now is not None and getattr(then, "shape", None) == getattr(now, "shape", None)


def _numbers_in(state: Any) -> dict[str, Tensor]:
    """The tensors of a nested state that may hold what is not finite, by path."""
    found = ((path.replace("/", "."), each) for path, each in tensors_in(state))
    return {path: each for path, each in found if each.is_complex() or (each.is_floating_point() and each.itemsize > 1)}


def _nonfinite_in(state: Any, exempt: Container[str]) -> set[str]:
    """The paths of the tensors that are not finite, but those that are exempt; reads the device."""
    found = ((path, tensor.detach()) for path, tensor in _numbers_in(state).items() if path not in exempt)
    named = {path: part_of_rank(tensor) for path, tensor in found if not tensor.is_meta}
    # Elementwise it costs more than the copy.
    if bool(torch.isfinite(total_norm(named.values()))):
        return set()
    return {path for path, tensor in named.items() if not bool(torch.isfinite(tensor).all())}


class Training:
    """What makes up a training; ``rewind`` says whether schedules go back too, and what they set."""

    def __init__(self, to_save: Mapping[str, Any], rewind: bool) -> None:
        self.rewind = rewind
        things = [*to_save.values()]
        self.monitors = [each for each in things if isinstance(each, Monitor)]
        self.modules = [each for each in things if isinstance(each, nn.Module)]
        self.optimizers = [each for each in things if hasattr(each, "register_step_post_hook")]
        self.parts = {
            name: part_of(thing)
            for name, thing in to_save.items()
            if not isinstance(thing, Monitor) and (rewind or not is_scheduler(thing))
        }
        self.exempt: set[str] = set()  # the paths of what was not finite when it was first seen

    def state(self) -> dict[str, Any]:
        """The state as it is, nothing copied."""
        return {name: part.state() for name, part in self.parts.items()}

    def state_of(self, monitors: Iterable[Monitor]) -> dict[str, Any]:
        """That of monitors, by name."""
        return {name: part.state() for name, part in self._parts_of(monitors).items()}

    def put_back(self, state: Mapping[str, Any], monitors: Iterable[Monitor], of_monitors: Mapping[str, Any]) -> None:
        """Have an earlier state again, and no gradients."""
        for name, part in self.parts.items():
            part.put_back(state[name], self.rewind)
        for name, part in self._parts_of(monitors).items():
            if name in of_monitors:
                part.put_back(of_monitors[name], self.rewind)
        groups = [group["params"] for optimizer in self.optimizers for group in optimizer.param_groups]
        for parameter in chain(*(module.parameters() for module in self.modules), *groups):
            parameter.grad = None

    def new_nonfinite(self, before: Mapping[str, Any] | None) -> list[str]:
        """The paths of what is not finite now, and was at the newest snapshot, if there is any; reads the device.

        Masks of attention are not, and may be made later.
        """
        nonfinite = _nonfinite_in(self.state(), self.exempt)
        if nonfinite:
            known = _numbers_in(before).keys()
            self.exempt |= {path for path in nonfinite - known if ".buffers." in path or not known}
        return sorted(nonfinite - self.exempt)

    def _parts_of(self, monitors: Iterable[Monitor]) -> dict[str, MonitorPart]:
        named = {each.prefix or each.families[0]: each for each in monitors}
        # Who has parameter groups sets learning rates, as schedules do.
        kept = {n: m for n, m in named.items() if self.rewind or not hasattr(m, "param_groups")}
        return {name: MonitorPart(monitor) for name, monitor in kept.items()}


def lower(things: Iterable[Any], factor: float) -> None:
    """Multiply the learning rates of optimizers and schedulers of torch and Ignite; all else is left alone."""
    waiting, seen = list(things), set[int]()
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        for group in getattr(thing, "param_groups", ()):
            group.update({name: _times(group[name], factor) for name in _IN_GROUPS if name in group})
        if is_scheduler(thing):
            own = vars(thing)
            if getattr(thing, "param_name", "lr") == "lr":
                own.update({name: _times(own[name], factor) for name in _IN_SCHEDULES if name in own})
            for inner in map(own.get, _INNER):
                waiting += inner if isinstance(inner, (list, tuple)) else [inner]


def _times(value: Any, factor: float) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_times(each, factor) for each in value)
    if isinstance(value, Tensor):
        return value.mul_(factor)  # whoever has compiled a step with it goes on with this one
    return value * factor
