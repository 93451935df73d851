"""What a training is made of, each part with its state and the way back to an earlier one."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.model._torch import part_of_rank
from ignite_monitor.model.norms import total_norm
from ignite_monitor.rollback.copying import clone, refill

# What a schedule sets in parameter groups, and its user.
SCHEDULED = ("lr", "initial_lr", "momentum", "betas", "weight_decay")


class Part(Protocol):
    """Something whose state goes back."""

    def state(self) -> Any:
        """The state as it is, nothing copied: dicts and lists of tensors and of anything else."""

    def put_back(self, state: Any, scheduled: bool) -> None:
        """Have an earlier state again, without keeping hold of its tensors.

        Args:
            state: a copy of what :meth:`state` returned.
            scheduled: whether what a schedule sets goes back too.
        """


def part_of(thing: Any) -> Part:
    """How something with a ``state_dict`` goes back."""
    if isinstance(thing, nn.Module):
        return ModulePart(thing)
    if isinstance(thing, Optimizer) and type(thing).state_dict is Optimizer.state_dict:
        return OptimizerPart(thing)
    return OtherPart(thing)


def is_scheduler(thing: Any) -> bool:
    """Whether something only sets what an optimizer steps with, or what Ignite keeps in an engine's state."""
    if isinstance(thing, (nn.Module, Optimizer)) or hasattr(thing, "param_groups"):
        return False
    return any(hasattr(thing, name) for name in ("optimizer", "get_last_lr", "simulate_values"))


class ModulePart(Part):
    """Parameters, buffers (those that no ``state_dict`` holds as well) and extra state of a module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state(self) -> dict[str, Any]:
        base = nn.Module.get_extra_state
        extra = {n: m.get_extra_state() for n, m in self.module.named_modules() if type(m).get_extra_state is not base}
        return {
            "parameters": dict(self.module.named_parameters()),
            "buffers": dict(self.module.named_buffers()),
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
            self.module.get_submodule(name).set_extra_state(extra)

    def _replace(self, name: str, tensor: Tensor) -> None:
        path, _, leaf = name.rpartition(".")
        owner = self.module.get_submodule(path)
        known = getattr(owner, leaf, None)
        if isinstance(known, nn.Parameter):
            known.data = tensor
        else:
            setattr(owner, leaf, tensor)


class OptimizerPart(Part):
    """State and parameter groups of an optimizer of torch's kind, in place."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def _parameters(self) -> dict[str, Tensor]:
        groups = enumerate(self.optimizer.param_groups)
        return {f"{i}.{j}": each for i, group in groups for j, each in enumerate(group["params"])}

    def state(self) -> dict[str, Any]:
        own = self.optimizer.state
        parameters = self._parameters()
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        return {
            "state": {key: own[each] for key, each in parameters.items() if each in own},
            "other": {key: value for key, value in own.items() if not isinstance(key, Tensor)},
            "groups": groups,
        }

    def put_back(self, state: Any, scheduled: bool) -> None:
        own: dict[Any, Any] = self.optimizer.state
        for key, parameter in self._parameters().items():
            if key in state["state"]:
                own[parameter] = refill(own.get(parameter), state["state"][key])
            else:
                own.pop(parameter, None)
        for other in [other for other in own if not isinstance(other, Tensor)]:
            del own[other]
        own.update(clone(state["other"]))
        for group, before in zip(self.optimizer.param_groups, state["groups"], strict=False):
            kept = () if scheduled else SCHEDULED
            group.update((k, refill(group.get(k), v)) for k, v in before.items() if k not in kept)


class OtherPart(Part):
    """Anything that loads what its ``state_dict()`` returned."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def state(self) -> Any:
        return self.thing.state_dict()

    def put_back(self, state: Any, scheduled: bool) -> None:
        groups = [] if scheduled else getattr(self.thing, "param_groups", [])
        kept = [{key: group[key] for key in SCHEDULED if key in group} for group in groups]
        if state:  # a GradScaler that is off has nothing to load
            self.thing.load_state_dict(clone(state))
        for group, now in zip(getattr(self.thing, "param_groups", []), kept, strict=False):
            group.update(now)


class MonitorPart(Part):
    """A monitor's thresholds; its counts go on, and what it says that goes on."""

    def __init__(self, monitor: Any) -> None:
        self.monitor = monitor

    def state(self) -> dict[str, Any]:
        return {key: value for key, value in self.monitor.state_dict().items() if key not in self.monitor.goes_on}

    def put_back(self, state: Any, scheduled: bool) -> None:
        if state:
            now = self.monitor.state_dict()
            self.monitor.load_state_dict(type(now)(now | _with_counts(clone(state), now)))


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


def tensors_in(state: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """All floating-point tensors of a nested state, each with its path."""
    if isinstance(state, Tensor):
        if (state.is_floating_point() and state.itemsize > 1) or state.is_complex():
            yield path, state
    elif isinstance(state, (Mapping, list, tuple)):
        for key, value in state.items() if isinstance(state, Mapping) else enumerate(state):
            yield from tensors_in(value, f"{path}.{key}" if path else str(key))


def nonfinite_in(state: Any, exempt: Container[str] = ()) -> set[str]:
    """The paths of the floating-point tensors that are not finite; reads the device.

    Args:
        state: a nested state.
        exempt: paths that are not looked at.
    """
    found = ((path, tensor.detach()) for path, tensor in tensors_in(state) if path not in exempt)
    named = {path: part_of_rank(tensor) for path, tensor in found if not tensor.is_meta}
    # Elementwise it costs more than the copy.
    if bool(torch.isfinite(total_norm(named.values()))):
        return set()
    return {path for path, tensor in named.items() if not bool(torch.isfinite(tensor).all())}
