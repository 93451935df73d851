"""Snapshots in memory: take, choose, restore, and check for non-finite values."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.model._torch import buffers_in, modules_in, parameters_in
from ignite_monitor.model.dtensor import local
from ignite_monitor.model.sampling import is_measurable
from ignite_monitor.model.tensors import tensors_in
from ignite_monitor.monitor.base import Monitor
from ignite_monitor.monitor.transfer import transfer

Snapshot = dict[str, Any]  # iteration, copies of state and thresholds, and the product of all lr_factors as lr_scale

_RECENT = 3  # newest snapshots, which are always kept
_SPACING = 5  # distance of older ones, in units of ``every``
_CONFIRMED = 20  # iterations, or ten times the delay, after which a restored snapshot is confirmed as healthy
_RETRY = 7  # discarded iterations after which the newest snapshot is restored

# Learning rates in the states of parameter groups and of torch's schedulers, and of Ignite's.
_RATES = {"lr", "initial_lr", "max_lr", "min_lr", "base_lrs", "max_lrs", "eta_min"}
_RATES |= {"start_value", "end_value", "values"}

_IMMUTABLE = {float, int, bool, str, type(None)}  # deepcopy() is slower


class Snapshots:
    """Snapshots in order of their iterations: three recent ones, and at most ``keep`` older ones."""

    SAVED = ("all", "restored", "restored_at")

    def __init__(self, every: int, keep: int, on_host: bool) -> None:
        self.every, self.keep, self.on_host = every, keep, on_host
        self.clear()

    def clear(self) -> None:
        """Drop all snapshots."""
        self.all: list[Snapshot] = []
        self.restored = 0  # iteration of the one restored last
        self.restored_at = -math.inf  # iteration in which it was restored

    def take(self, iteration: int, state: Any, thresholds: Any, lr_scale: float) -> None:
        """Copy a state after an iteration."""
        saved = clone(state, self.on_host)
        self.all.append({"iteration": iteration, "state": saved, "thresholds": thresholds, "lr_scale": lr_scale})
        older = self.all[:-_RECENT]
        if len(older) > 1 and older[-1]["iteration"] - older[-2]["iteration"] < _SPACING * self.every:
            self.all.remove(older[-1])
        elif len(older) > self.keep:
            self.all.remove(older[0])

    def before(self, first_sign: int) -> Snapshot:
        """Return the newest snapshot after which an iteration before the first sign was healthy, else the oldest."""
        usable = [snapshot for snapshot in self.all if snapshot["iteration"] + 1 < first_sign]
        return usable[-1] if usable else self.all[0]

    def choose(self, iteration: int, first_sign: int, discarded: int, margin: int) -> Snapshot:
        """Choose the snapshot to restore, when a recovery begins and after each of its discarded iterations.

        It begins with one that is older than the first sign and the margin, and older than the one restored last
        if that is unconfirmed. After some discarded iterations the newest one follows.
        """
        if not discarded:
            newest, delay = self.before(first_sign), iteration - first_sign
            is_confirmed = first_sign - self.restored_at >= max(_CONFIRMED, 10 * delay)
            self.drop_newer(newest["iteration"] if is_confirmed else self.restored - 1)
            self.all[-1]["thresholds"] = newest["thresholds"]  # those of an older one may not be warmed up
            self.restored = self.before(first_sign - margin)["iteration"]
        elif discarded >= _RETRY:
            self.restored = self.all[-1]["iteration"]
        self.restored_at = iteration
        return self.before(self.restored + 2)

    def drop_newer(self, iteration: int) -> None:
        """Drop the snapshots taken after an iteration, but not the oldest."""
        self.all = [snapshot for snapshot in self.all if snapshot["iteration"] <= iteration] or self.all[:1]


class TrainingState:
    """Everything that a rollback restores: the objects in ``to_save`` by name, except monitors."""

    def __init__(self, to_save: Mapping[str, Any]) -> None:
        kept = {name: thing for name, thing in to_save.items() if not isinstance(thing, Monitor)}
        for name, thing in kept.items():
            if not all(callable(getattr(thing, method, None)) for method in ("state_dict", "load_state_dict")):
                raise TypeError(f"Argument to_save should hold objects with state_dict, but {name!r} is {type(thing)}")
        self.things = {name: _unwrapped(thing) for name, thing in kept.items()}
        self.modules = [thing for thing in self.things.values() if isinstance(thing, nn.Module)]
        self.optimizers = [thing for thing in self.things.values() if hasattr(thing, "register_step_post_hook")]

    def state(self) -> dict[str, Any]:
        """The state itself, nothing copied."""
        return {name: _state_of(thing) for name, thing in self.things.items()}

    def restore(self, state: Mapping[str, Any], lr_factor: float) -> None:
        """Restore an earlier state with its learning rates times a factor, and drop all gradients."""
        for name, thing in self.things.items():
            has_rates = any(hasattr(thing, key) for key in ("param_groups", "get_last_lr", "simulate_values"))
            _restore(thing, _scaled(state[name], lr_factor) if has_rates and lr_factor != 1.0 else state[name])
        for thing in (*self.modules, *self.optimizers):
            thing.zero_grad(set_to_none=True)

    def layout(self) -> list[Any]:
        """Names and identities of all parameters; a faster ``named_parameters()``."""
        layout, modules = list[Any](), list[Any](self.modules)
        while modules:
            if (module := modules.pop()) is not None:
                layout += [*parameters_in(module), *map(id, parameters_in(module).values())]
                modules += modules_in(module).values()
        return layout


def clone(value: Any, on_host: bool = False, into: Any = None) -> Any:
    """Copy containers with their tensors, to host memory if asked; the tensors of ``into`` that fit are used."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        known = into if isinstance(into, dict) else {}
        return kind([(key, clone(item, on_host, known.get(key))) for key, item in value.items()])
    if kind in (list, tuple):
        return kind([clone(item, on_host) for item in value])
    if not isinstance(value, Tensor):
        return value if kind in _IMMUTABLE else copy.deepcopy(value)
    fits = isinstance(into, Tensor) and (into.shape, into.dtype) == (value.shape, value.dtype)
    if fits and into.layout == value.layout == torch.strided and 0 not in into.stride():  # 0: expanded
        local(into).detach().copy_(local(value))
        return into
    if not on_host or value.is_cpu:
        return (value.detach() if value.requires_grad else value).clone()
    pinned = value.is_cuda and type(value) in (Tensor, nn.Parameter)
    copied = torch.empty_like(value, device="cpu", requires_grad=False, pin_memory=pinned)
    local(copied).copy_(local(value).detach())
    return copied


def finite(state: Any) -> dict[str, bool]:
    """Path -> whether the dense tensor, of a DTensor this rank's part, is finite; one transfer from each device."""
    tensors = {path.replace("/", "."): local(tensor.detach()) for path, tensor in tensors_in(state)}
    checked = {path: tensor for path, tensor in tensors.items() if is_measurable(tensor)}
    [flags] = transfer([[tensor.isfinite().all() for tensor in checked.values()]])
    return {path: bool(flag) for path, [flag] in zip(checked, flags, strict=True)}


def _state_of(thing: Any) -> Any:
    """The state itself, nothing copied; of modules with non-persistent buffers."""
    if isinstance(thing, nn.Module):
        tensors, extra = dict[int, tuple[str, Tensor]](), dict[str, Any]()
        for path, module in thing.named_modules():
            for name, tensor in chain(parameters_in(module).items(), buffers_in(module).items()):
                if tensor is not None:
                    tensors.setdefault(id(tensor), (f"{path}.{name}" if path else name, tensor))
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                extra[path] = module.get_extra_state()
        return {"tensors": dict(tensors.values()), "extra": extra}
    return thing.state_dict()


def _restore(thing: Any, state: Any) -> None:
    if isinstance(thing, nn.Module):
        current = _state_of(thing)["tensors"]
        for name, tensor in clone(state["tensors"], into=current).items():
            known = current.get(name)
            if isinstance(known, nn.Parameter) and tensor is not known:  # of another shape or dtype
                known.data = tensor
            elif tensor is not known:
                path, _, leaf = name.rpartition(".")
                setattr(thing.get_submodule(path), leaf, tensor)
        for name, extra in clone(state["extra"]).items():
            thing.get_submodule(name).set_extra_state(extra)
        return
    current, in_place = thing.state_dict(), isinstance(thing, Optimizer)
    if in_place and type(thing).state_dict is Optimizer.state_dict and current["state"].keys() >= state["state"].keys():
        # In place, since load_state_dict() may change dtypes.
        parameters = dict(enumerate(p for group in thing.param_groups for p in group["params"]))
        restored = clone(state, into=current)
        thing.state.clear()
        thing.state.update({parameters.get(key, key): values for key, values in restored["state"].items()})
        for group, saved in zip(thing.param_groups, restored["param_groups"], strict=False):
            group.update({key: value for key, value in saved.items() if key != "params"})
    elif state:  # a disabled GradScaler has nothing to load
        thing.load_state_dict(clone(state))


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
