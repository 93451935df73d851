"""Snapshots in memory: take, choose, restore, and check for non-finite values."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.model._torch import buffers_in, foreach_copy, modules_in, parameters_in
from ignite_monitor.model.dtensor import local
from ignite_monitor.model.names import without_accelerate
from ignite_monitor.model.sampling import is_measurable
from ignite_monitor.model.tensors import tensors_in
from ignite_monitor.monitor.base import Monitor, MonitorHandle
from ignite_monitor.monitor.transfer import transfer
from ignite_monitor.rollback import limits

Snapshot = dict[str, Any]  # iteration, and copies of state and thresholds
_USUAL = frozenset((Tensor, nn.Parameter))  # of other classes, such as those of 8-bit states, some lack foreach_copy


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

    def make_room(self) -> Snapshot | None:
        """Drop and return a snapshot if one more would be too many."""
        older = self.all[: 1 - limits.RECENT]
        if len(older) > 1 and older[-1]["iteration"] - older[-2]["iteration"] < limits.SPACING * self._every:
            return self.all.pop(len(older) - 1)
        return self.all.pop(0) if len(older) > limits.OLDER else None

    def before(self, first_sign: int) -> Snapshot:
        """Return the newest snapshot after which an iteration before the first sign was healthy, else the oldest."""
        usable = [snapshot for snapshot in self.all if snapshot["iteration"] + 1 < first_sign]
        return usable[-1] if usable else self.all[0]

    def start(self, iteration: int, first_sign: int) -> None:
        """Drop the snapshots that an instability may have damaged.

        Those that remain are older than the first sign by more than the delay of its detection, and older than the one
        restored last if that is unconfirmed. All get the thresholds of the newest one from before the first sign: older
        ones may have none yet.
        """
        newest, delay = self.before(first_sign), iteration - first_sign
        is_confirmed = first_sign - self.restored_at >= max(limits.MEMORY, limits.CONFIRMED * delay)
        self.drop_newer(newest["iteration"] if is_confirmed else self.restored - 1)
        self.drop_newer(self.before(first_sign - delay)["iteration"])
        for snapshot in self.all:
            snapshot["thresholds"] = newest["thresholds"]

    def choose(self, iteration: int, candidate: int) -> Snapshot:
        """Return the newest snapshot (candidate 0), the one before (1) … to restore it; the newest after the oldest."""
        chosen = self.all[-1 - candidate % len(self.all)]
        self.restored, self.restored_at = chosen["iteration"], iteration
        return chosen

    def drop_newer(self, iteration: int) -> None:
        """Drop the snapshots from after an iteration; the oldest one is kept."""
        self.all = [snapshot for snapshot in self.all if snapshot["iteration"] <= iteration] or self.all[:1]


class TrainingState:
    """Everything that a rollback restores: the objects in ``to_save`` by name, except monitors and their handles."""

    def __init__(self, to_save: Mapping[str, Any]) -> None:
        self.objects = {name: obj for name, obj in to_save.items() if not isinstance(obj, (Monitor, MonitorHandle))}
        self.modules = [obj for obj in self.objects.values() if isinstance(obj, nn.Module)]
        inner = map(_inner, self.objects.values())
        self.optimizers = [obj for obj in inner if hasattr(obj, "_optimizer_step_post_hooks")]
        if any(map(nn.parameter.is_lazy, chain(*((*it.parameters(), *it.buffers()) for it in self.modules)))):
            raise ValueError("Argument to_save has lazy modules: run one forward pass before")
        for name, obj in self.objects.items():
            if not all(callable(getattr(obj, method, None)) for method in ("state_dict", "load_state_dict")):
                raise TypeError(f"Argument to_save should hold objects with state_dict, but {name!r} is {type(obj)}")
            try:
                state = _state_of(obj)
                copy.deepcopy(state, {id(tensor): tensor for _, tensor in tensors_in(state)})  # of all but the tensors
            except Exception as error:
                text = f"Argument to_save should hold objects whose state can be copied, but {name!r}: {error}"
                raise TypeError(text) from error

    def state(self) -> dict[str, Any]:
        """The state itself, nothing copied."""
        return {name: _state_of(obj) for name, obj in self.objects.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore an earlier state, and drop all gradients."""
        for name, obj in self.objects.items():
            _restore(obj, state[name])
        # Not by zero_grad(), which optimizers of the user's may define without set_to_none.
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        for parameter in chain(*(module.parameters() for module in self.modules), *(g["params"] for g in groups)):
            parameter.grad = None

    def layout(self) -> list[Any]:
        """Names and identities of all parameters; a faster ``named_parameters()``."""
        layout, modules = list[Any](), list[Any](self.modules)
        while modules:
            if (module := modules.pop()) is not None:
                layout += [*parameters_in(module), *map(id, parameters_in(module).values())]
                modules += modules_in(module).values()
        return layout


def public(obj: object) -> dict[str, Any]:
    """The attributes of a handler's part that change during a run."""
    return {name: value for name, value in vars(obj).items() if not name.startswith("_")}


@torch.no_grad()
def clone(value: Any, into: Any = None, *, on_host: bool | None = None) -> Any:
    """Copy dicts, lists and tuples with their tensors, each once; others by ``deepcopy``.

    The tensors of ``into`` at the same places are overwritten and returned where they fit, by one kernel per dtype.
    Copies are made in host memory, or on the device of the original, or where the tensors of ``into`` are (None).
    """
    copies = _Copies(on_host)
    result = copies.add(value, into)
    for targets, sources in copies.pairs.values():
        foreach_copy(targets, sources)
    return result


class _Copies:
    def __init__(self, on_host: bool | None) -> None:
        self._on_host = on_host
        self._tensors: dict[int, Tensor] = {}  # by id of the original
        self._used: set[int] = set()  # ids of overwritten tensors
        self.pairs: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}  # targets and sources by device and dtype

    def add(self, value: Any, into: Any) -> Any:
        """Return a copy; the tensors in ``pairs`` are still to be copied."""
        if isinstance(value, Tensor):
            if id(value) not in self._tensors:
                self._tensors[id(value)] = self._add_tensor(value, into)
            return self._tensors[id(value)]
        if isinstance(value, dict):
            result, places = copy.copy(value), into if isinstance(into, dict) else {}
            for key, item in value.items():  # not by update(), which adds in a Counter
                result[key] = self.add(item, places.get(key))
            return result
        if type(value) in (list, tuple):
            return type(value)(map(self.add, value, chain(into if type(into) is type(value) else (), repeat(None))))
        return copy.deepcopy(value)

    def _add_tensor(self, value: Tensor, into: Any) -> Tensor:
        is_given = isinstance(into, Tensor)
        device = (into if is_given and self._on_host is None else value).device
        device = torch.device("cpu") if self._on_host else device
        if not is_given or into.device != device:  # snapshots are loaded on any device
            return value.to(device, copy=True)
        source, target = local(value), local(into)
        fits = target.shape == source.shape and target.dtype is source.dtype
        is_dense = target.layout is source.layout is torch.strided and 0 not in target.stride()  # 0: expanded
        if not (fits and is_dense) or target.is_inference() or id(into) in self._used:
            return value.to(device, copy=True)
        self._used.add(id(into))
        if _USUAL.issuperset(map(type, (target, source))):
            targets, sources = self.pairs.setdefault((target.device, target.dtype), ([], []))
            targets.append(target)
            sources.append(source)
        else:
            target.copy_(source)
        copied: Tensor = into
        return copied


def finite(state: Any) -> dict[str, bool]:
    """Path -> whether the dense tensor, of a DTensor this rank's part, is finite; one transfer from each device."""
    tensors = {path.replace("/", "."): local(tensor.detach()) for path, tensor in tensors_in(state)}
    checked = {path: tensor for path, tensor in tensors.items() if is_measurable(tensor)}
    [flags] = transfer([[tensor.isfinite().all() for tensor in checked.values()]])
    return {path: bool(flag) for path, [flag] in zip(checked, flags, strict=True)}


def _state_of(obj: Any) -> Any:
    """The state itself, nothing copied; of modules every tensor under all its names, buffers of no state_dict too."""
    if isinstance(obj, nn.Module):
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
            if name not in current or tensor is current[name]:
                continue
            path, _, leaf = name.rpartition(".")  # of another shape, dtype or layout
            buffers = buffers_in(obj.get_submodule(path))
            if leaf in buffers:
                buffers[leaf] = tensor
            else:
                current[name].data = tensor
    elif _is_plain(inner := _inner(obj)):  # in place, since load_state_dict() may change dtypes
        parameters = dict(enumerate(p for group in inner.param_groups for p in group["params"]))
        restored = clone(state, _state_of(obj))
        inner.state.clear()
        inner.state.update({parameters.get(key, key): values for key, values in restored["state"].items()})
        for group, saved in zip(obj.param_groups, restored["param_groups"], strict=False):
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
