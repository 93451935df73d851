"""Snapshots in memory: take, choose, restore, and check for non-finite values."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.model.dtensor import local, reshard
from ignite_monitor.model.names import unwrapped, without_accelerate
from ignite_monitor.model.sampling import is_measurable
from ignite_monitor.model.tensors import Place, tensors_at
from ignite_monitor.monitor.base import Monitor, MonitorHandle
from ignite_monitor.monitor.transfer import transfer
from ignite_monitor.rollback import limits

Snapshot = dict[str, Any]  # iteration, layout, and copies of state and thresholds; nothing changes them


class Snapshots:
    """Snapshots in order of their iterations: the newest ones, and a few older ones."""

    def __init__(self, every: int) -> None:
        self._every = every
        self.clear()

    def clear(self) -> None:
        """Drop all snapshots."""
        self.all: list[Snapshot] = []
        self.restored = 0  # iteration of the one restored last
        self.restored_at = -math.inf  # iteration in which it was restored
        self.resumable: Snapshot | None = None  # the state before a rollback or a probe

    def is_due(self, iteration: int, healthy: int) -> bool:
        """Return True if a snapshot has to be taken, after a number of healthy iterations."""
        return not self.all or (healthy > 0 and iteration - self.all[-1]["iteration"] >= self._every)

    def make_room(self) -> None:
        """Drop a snapshot if one more would be too many."""
        older = self.all[: 1 - limits.RECENT]
        if len(older) > 1 and older[-1]["iteration"] - older[-2]["iteration"] < limits.SPACING * self._every:
            del self.all[len(older) - 1]
        elif len(older) > limits.OLDER:
            del self.all[0]

    def before(self, first_sign: int) -> Snapshot:
        """Return the newest snapshot after which an iteration before the first sign was healthy, else the oldest."""
        usable = [snapshot for snapshot in self.all if snapshot["iteration"] + 1 < first_sign]
        return usable[-1] if usable else self.all[0]

    def start(self, iteration: int, first_sign: int) -> None:
        """Drop the snapshots that an instability may have damaged; the oldest one is kept.

        Those that remain are older than the first sign by more than the delay of its detection, and older than the one
        restored last if that is unconfirmed. All get the thresholds of the newest one from before the first sign: older
        ones may have none yet.
        """
        thresholds, delay = self.before(first_sign)["thresholds"], iteration - first_sign
        is_confirmed = first_sign - self.restored_at >= max(limits.MEMORY, limits.CONFIRMED * delay)
        end = min(first_sign - delay - 1, math.inf if is_confirmed else self.restored)
        older = [snapshot for snapshot in self.all if snapshot["iteration"] < end]
        self.all = [snapshot | {"thresholds": thresholds} for snapshot in older or self.all[:1]]

    def choose(self, iteration: int, candidate: int) -> Snapshot:
        """Return the newest snapshot (candidate 0), the one before (1) … to restore it; the newest after the oldest."""
        chosen = self.all[-1 - candidate % len(self.all)]
        self.restored, self.restored_at = chosen["iteration"], iteration
        return chosen

    def end(self) -> None:
        """Drop the snapshots from after the one restored last, and the state set aside."""
        self.all = [snapshot for snapshot in self.all if snapshot["iteration"] <= self.restored]
        self.resumable = None


class TrainingState:
    """Everything that a rollback restores: the objects in ``to_save`` by name, except monitors and their handles."""

    def __init__(self, to_save: Mapping[str, Any]) -> None:
        objects = {name: obj for name, obj in to_save.items() if not isinstance(obj, (Monitor, MonitorHandle))}
        self.modules = [obj for obj in objects.values() if isinstance(obj, nn.Module)]
        # A run may be resumed with other wrappers.
        self.objects = {name: unwrapped(it) if isinstance(it, nn.Module) else it for name, it in objects.items()}
        if any(map(nn.parameter.is_lazy, chain(*((*it.parameters(), *it.buffers()) for it in self.modules)))):
            raise ValueError("Argument to_save has lazy modules: run one forward pass before")
        for name, obj in self.objects.items():
            try:
                shared(_state_of(obj))
                obj.load_state_dict  # noqa: B018
            except Exception as error:
                text = "Argument to_save should hold objects with load_state_dict and a state that can be copied"
                raise TypeError(f"{text}, but {name!r}: {error}") from error

    def state(self) -> dict[str, Any]:
        """The state itself, nothing copied."""
        return {name: _state_of(obj) for name, obj in self.objects.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore an earlier state, and drop all gradients."""
        for name, obj in self.objects.items():
            _restore(obj, state[name])
        for parameter in chain(*(module.parameters() for module in self.modules)):
            parameter.grad = None

    def layout(self) -> list[str]:
        """Describe objects, parameters and their number in each group; a state fits the layout that it had."""
        layout = [*self.objects]
        for name, obj in self.objects.items():
            if isinstance(obj, nn.Module):
                parameters = [(path, it) for path, it in _state_of(obj).items() if isinstance(it, nn.Parameter)]
                layout += [f"{name}.{path} {tuple(it.shape)} {it.dtype}" for path, it in parameters]
            elif isinstance(obj, Optimizer):
                layout += [f"{name} {len(group['params'])}" for group in obj.param_groups]
        return layout


def public(obj: object) -> dict[str, Any]:
    """The attributes of a handler's part that change during a run."""
    return {name: value for name, value in vars(obj).items() if not name.startswith("_")}


def shared(state: Any) -> Any:
    """Copy a state but its tensors."""
    return copy.deepcopy(state, {id(tensor): tensor for _, tensor in tensors_at(state)})


@torch.no_grad()
def clone(state: Any, into: Any = None, *, on_host: bool = False) -> Any:
    """Copy a state; tensors of ``into`` at the same places are overwritten where they fit, and returned."""
    targets, copies, written = dict(tensors_at(into)), dict[int, Any](), dict[int, Tensor]()
    for place, tensor in tensors_at(state):
        target = targets.get(place)
        # Tensors that were two may be one by now.
        if target is not None and _fits(tensor, target) and written.setdefault(id(target), tensor) is tensor:
            with torch.inference_mode() if target.is_inference() else torch.no_grad():
                local(target).copy_(local(tensor))
            copies[id(tensor)] = target
        elif id(tensor) not in copies:
            device = tensor.device if target is None else target.device
            copies[id(tensor)] = tensor.to("cpu" if on_host else device, copy=True)
    return copy.deepcopy(state, copies)


def _fits(tensor: Tensor, into: Tensor) -> bool:
    if (into.shape, into.dtype, into.layout) != (tensor.shape, tensor.dtype, tensor.layout):
        return False
    return into.is_sparse or (into.layout is torch.strided and 0 not in into.stride())  # 0: expanded


def finite(state: Any) -> dict[Place, bool]:
    """Place -> whether the dense tensor, of a DTensor this rank's part, is finite; one transfer from each device."""
    tensors = {place: local(tensor.detach()) for place, tensor in tensors_at(state)}
    checked = {place: tensor for place, tensor in tensors.items() if is_measurable(tensor)}
    [flags] = transfer([[tensor.isfinite().all() for tensor in checked.values()]])
    return {place: bool(flag) for place, [flag] in zip(checked, flags, strict=True)}


def _state_of(obj: Any) -> Any:
    """The state itself, nothing copied; of modules every tensor under all its names, buffers of no state_dict too."""
    if isinstance(obj, nn.Module):
        reshard(obj)  # an evaluation may have left unsharded parameters
        return dict(chain(obj.named_parameters(remove_duplicate=False), obj.named_buffers(remove_duplicate=False)))
    if not _is_plain(inner := _inner(obj)):
        return obj.state_dict()
    # A ZeroRedundancyOptimizer's step copies the options of its groups into this rank's part.
    groups = [{key: value for key, value in group.items() if key != "params"} for group in obj.param_groups]
    return {"state": inner.state_dict()["state"], "param_groups": groups}


def _restore(obj: Any, state: Any) -> None:
    if isinstance(obj, nn.Module):
        current = _state_of(obj)
        for name, tensor in clone(state, current).items():
            if tensor is current.get(name, tensor):
                continue
            if isinstance(current[name], nn.Parameter):  # such as an expanded one
                current[name].data = tensor
            else:  # a buffer that was replaced
                path, _, leaf = name.rpartition(".")
                setattr(obj.get_submodule(path), leaf, tensor)
    elif _is_plain(inner := _inner(obj)):  # in place, since load_state_dict() may change dtypes
        parameters = dict(enumerate(p for group in inner.param_groups for p in group["params"]))
        restored = clone(state, _state_of(obj))
        inner.state.clear()
        inner.state.update({parameters.get(key, key): values for key, values in restored["state"].items()})
        for group, saved in zip(obj.param_groups, restored["param_groups"], strict=True):
            group.update(saved)
    elif state:  # a disabled GradScaler has nothing to load
        obj.load_state_dict(clone(state))


def _inner(obj: Any) -> Any:
    """Return the optimizer in a wrapper: this rank's part of a ZeroRedundancyOptimizer, or that in accelerate's."""
    if hasattr(obj, "consolidate_state_dict"):  # state_dict() would need a collective
        return obj.optim
    return without_accelerate(obj)


def _is_plain(obj: Any) -> bool:
    return isinstance(obj, Optimizer) and type(obj).state_dict is Optimizer.state_dict
