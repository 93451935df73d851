"""State of the objects in ``to_save``: copy, restore, and check for non-finite values."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.model._torch import part_of_rank
from ignite_monitor.model.norms import total_norm
from ignite_monitor.model.tensors import tensors_in
from ignite_monitor.monitor.base import Monitor

# Learning rates in the states of parameter groups, of torch's schedulers, and of Ignite's.
_RATES = (
    *("lr", "initial_lr", "max_lr", "min_lr"),
    *("base_lrs", "max_lrs", "eta_min"),
    *("start_value", "end_value", "values"),
)


def clone(value: Any, on_host: bool = False) -> Any:
    """Copy dicts, lists and tuples with their tensors, to host memory if asked; anything else is copied deeply."""
    return copy_into(None, value, on_host)


@torch.no_grad()
def copy_into(current: Any, value: Any, on_host: bool = False) -> Any:
    """Copy as :func:`clone` does, into the tensors of ``current`` where shape and dtype are the same."""
    if isinstance(value, Tensor):
        target = current if isinstance(current, Tensor) and _fits(current, value) else _empty(value, on_host)
        part_of_rank(target).detach().copy_(part_of_rank(value).detach())
        return target
    if type(value) in (dict, OrderedDict):
        known = current if isinstance(current, dict) else {}
        return type(value)((key, copy_into(known.get(key), item, on_host)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(copy_into(None, item, on_host) for item in value)
    return copy.deepcopy(value)


def _empty(tensor: Tensor, on_host: bool) -> Tensor:
    if not on_host or tensor.is_cpu:
        return torch.empty_like(tensor, requires_grad=False)
    pinned = tensor.is_cuda and type(tensor) in (Tensor, nn.Parameter)
    return torch.empty_like(tensor, device="cpu", requires_grad=False, pin_memory=pinned)


def _fits(current: Tensor, value: Tensor) -> bool:
    is_expanded = any(size > 1 and not stride for stride, size in zip(current.stride(), current.shape, strict=True))
    kinds = [(tensor.shape, tensor.dtype, tensor.layout) for tensor in (current, value)]
    return kinds[0] == kinds[1] and current.layout == torch.strided and not is_expanded


class _Part:
    """An object with ``state_dict`` and ``load_state_dict``; its state is not copied."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def state(self) -> Any:
        return self.thing.state_dict()

    def restore(self, state: Any) -> None:
        if state:  # a disabled GradScaler has nothing to load
            self.thing.load_state_dict(clone(state))


class _Module(_Part):
    """Parameters, all buffers (non-persistent ones included) and extra state."""

    def state(self) -> Any:
        modules, unused = self.thing.named_modules(), nn.Module.get_extra_state
        return {
            "tensors": dict(chain(self.thing.named_parameters(), self.thing.named_buffers())),
            "extra": {name: m.get_extra_state() for name, m in modules if type(m).get_extra_state is not unused},
        }

    def restore(self, state: Any) -> None:
        current = self.state()["tensors"]
        for name, tensor in copy_into(current, state["tensors"]).items():
            known = current.get(name)
            if isinstance(known, nn.Parameter) and known is not tensor:  # the shape has changed
                known.data = tensor
            elif known is not tensor:
                path, _, leaf = name.rpartition(".")
                setattr(self.thing.get_submodule(path), leaf, tensor)
        for name, extra in clone(state["extra"]).items():
            self.thing.get_submodule(name).set_extra_state(extra)


class _Optimizer(_Part):
    """State and parameter groups of an optimizer, restored in place: ``load_state_dict`` changes dtypes."""

    def state(self) -> Any:
        names = {parameter: name for name, parameter in self._parameters().items()}
        return {
            "state": {names.get(key, key): value for key, value in self.thing.state.items()},
            "groups": [{k: v for k, v in group.items() if k != "params"} for group in self.thing.param_groups],
        }

    def restore(self, state: Any) -> None:
        own, parameters = self.thing.state, self._parameters()
        current = dict(own)
        own.clear()
        for name, saved in state["state"].items():
            key = parameters.get(name, name)
            own[key] = copy_into(current.get(key), saved)
        for group, saved in zip(self.thing.param_groups, state["groups"], strict=False):
            group.update((key, copy_into(group.get(key), value)) for key, value in saved.items())

    def _parameters(self) -> dict[str, Tensor]:
        groups = enumerate(self.thing.param_groups)
        return {f"{i}.{j}": parameter for i, group in groups for j, parameter in enumerate(group["params"])}


class TrainingState:
    """Everything that a rollback restores: the objects in ``to_save`` by name."""

    def __init__(self, to_save: Mapping[str, Any]) -> None:
        things = {name: _unwrapped(thing) for name, thing in to_save.items()}
        self.monitors = [thing for thing in things.values() if isinstance(thing, Monitor)]
        self.modules = [thing for thing in things.values() if isinstance(thing, nn.Module)]
        self.optimizers = [thing for thing in things.values() if hasattr(thing, "register_step_post_hook")]
        self.parts = {name: _part_of(thing) for name, thing in things.items() if not isinstance(thing, Monitor)}
        self._exempt: set[str] = set()  # paths of tensors that were not finite from the first

    def state(self) -> dict[str, Any]:
        """The state itself, nothing copied."""
        return {name: part.state() for name, part in self.parts.items()}

    def restore(self, state: Mapping[str, Any], lr_factor: float) -> None:
        """Restore an earlier state with its learning rates times a factor, and drop all gradients."""
        for name, part in self.parts.items():
            has_rates = any(hasattr(part.thing, key) for key in ("param_groups", "get_last_lr", "simulate_values"))
            part.restore(_scaled(state[name], lr_factor) if has_rates and lr_factor != 1.0 else state[name])
        groups = [group["params"] for optimizer in self.optimizers for group in optimizer.param_groups]
        for parameter in chain(*(module.parameters() for module in self.modules), *groups):
            parameter.grad = None

    def parameters(self) -> list[int]:
        """Identities of all parameters."""
        return [id(parameter) for module in self.modules for parameter in module.parameters()]

    def nonfinite(self, earlier: Mapping[str, Any] | None) -> list[str]:
        """Paths of tensors that are not finite, and were in an earlier state; synchronizes with the device.

        Others, attention masks for instance, are exempt from then on.
        """
        tensors = {path: tensor for path, tensor in _numbers_in(self.state()).items() if path not in self._exempt}
        if bool(torch.isfinite(total_norm(tensors.values()))):  # cheaper than an elementwise check
            return []
        known = _numbers_in(earlier)
        paths = [path for path, tensor in tensors.items() if not bool(tensor.isfinite().all())]
        self._exempt |= {path for path in paths if path not in known or not bool(known[path].isfinite().all())}
        return sorted(set(paths) - self._exempt)


def _scaled(state: Any, factor: float, is_rate: bool = False) -> Any:
    """The state with its learning rates and base rates multiplied by a factor."""
    if isinstance(state, dict):
        others = state.get("param_name", "lr") != "lr"  # an Ignite scheduler of something else
        return {key: _scaled(value, factor, key in _RATES and not others) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(_scaled(item, factor, is_rate) for item in state)
    return state * factor if is_rate and isinstance(state, (float, int, Tensor)) else state


def _unwrapped(thing: Any) -> Any:
    """The torch optimizer inside of a wrapper that has no step hooks of its own, such as accelerate's."""
    inner = getattr(thing, "optimizer", None)
    is_wrapper = isinstance(thing, Optimizer) and isinstance(inner, Optimizer)
    return inner if is_wrapper and "_optimizer_step_post_hooks" not in vars(thing) else thing


def _part_of(thing: Any) -> _Part:
    if isinstance(thing, nn.Module):
        return _Module(thing)
    is_usual = isinstance(thing, Optimizer) and type(thing).state_dict is Optimizer.state_dict
    return _Optimizer(thing) if is_usual else _Part(thing)


def _numbers_in(state: Any) -> dict[str, Tensor]:
    """Tensors by path that may be non-finite, of DTensors this rank's part."""
    tensors = ((path.replace("/", "."), part_of_rank(tensor.detach())) for path, tensor in tensors_in(state))
    floating = ((path, t) for path, t in tensors if (t.is_floating_point() or t.is_complex()) and not t.is_meta)
    return {path: tensor for path, tensor in floating if tensor.itemsize > 1}
