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

from ignite_monitor.model.norms import total_norm
from ignite_monitor.model.samples import local
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
    if type(value) in (dict, OrderedDict):
        return type(value)((key, clone(item, on_host)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(clone(item, on_host) for item in value)
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if not on_host or value.is_cpu:
        return value.detach().clone()
    pinned = value.is_cuda and type(value) in (Tensor, nn.Parameter)
    copied = torch.empty_like(value, device="cpu", requires_grad=False, pin_memory=pinned)
    local(copied).copy_(local(value).detach())
    return copied


def _restored(current: Any, saved: Any) -> Any:
    """Copy saved values into the tensors of ``current`` where shape and dtype are the same; clone the others."""
    if type(saved) is dict and isinstance(current, dict):
        return {key: _restored(current.get(key), value) for key, value in saved.items()}
    if not isinstance(saved, Tensor) or not isinstance(current, Tensor) or not _fits(current, saved):
        return clone(saved)
    local(current).detach().copy_(local(saved))
    return current


def _fits(current: Tensor, saved: Tensor) -> bool:
    is_dense = current.layout == saved.layout == torch.strided and 0 not in current.stride()  # 0: expanded
    return is_dense and current.shape == saved.shape and current.dtype == saved.dtype


def _state_of(thing: Any) -> Any:
    """The state itself, nothing copied; of modules with non-persistent buffers."""
    if isinstance(thing, nn.Module):
        modules, unused = thing.named_modules(), nn.Module.get_extra_state
        return {
            "tensors": dict(chain(thing.named_parameters(), thing.named_buffers())),
            "extra": {name: m.get_extra_state() for name, m in modules if type(m).get_extra_state is not unused},
        }
    if _is_usual_optimizer(thing):
        index = {parameter: i for i, parameter in enumerate(_optimized(thing))}
        return {
            "state": {index.get(key, key): value for key, value in thing.state.items()},
            "groups": [{k: v for k, v in group.items() if k != "params"} for group in thing.param_groups],
        }
    return thing.state_dict()


def _restore(thing: Any, state: Any) -> None:
    if isinstance(thing, nn.Module):
        current = _state_of(thing)["tensors"]
        for name, saved in state["tensors"].items():
            known, tensor = current.get(name), _restored(current.get(name), saved)
            if isinstance(known, nn.Parameter) and tensor is not known:  # the shape has changed
                known.data = tensor
            elif tensor is not known:
                path, _, leaf = name.rpartition(".")
                setattr(thing.get_submodule(path), leaf, tensor)
        for name, extra in clone(state["extra"]).items():
            thing.get_submodule(name).set_extra_state(extra)
    elif _is_usual_optimizer(thing):  # in place: load_state_dict() changes dtypes
        parameters, current = dict(enumerate(_optimized(thing))), dict(thing.state)
        thing.state.clear()
        for index, saved in state["state"].items():
            key = parameters.get(index, index)
            thing.state[key] = _restored(current.get(key), saved)
        for group, saved in zip(thing.param_groups, state["groups"], strict=False):
            group.update(_restored(group, saved))
    elif state:  # a disabled GradScaler has nothing to load
        thing.load_state_dict(clone(state))


def _is_usual_optimizer(thing: Any) -> bool:
    return isinstance(thing, Optimizer) and type(thing).state_dict is Optimizer.state_dict


def _optimized(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class TrainingState:
    """Everything that a rollback restores: the objects in ``to_save`` by name."""

    def __init__(self, to_save: Mapping[str, Any]) -> None:
        things = {name: _unwrapped(thing) for name, thing in to_save.items()}
        self.monitors = [thing for thing in things.values() if isinstance(thing, Monitor)]
        self.modules = [thing for thing in things.values() if isinstance(thing, nn.Module)]
        self.optimizers = [thing for thing in things.values() if hasattr(thing, "register_step_post_hook")]
        self.things = {name: thing for name, thing in things.items() if not isinstance(thing, Monitor)}
        self._exempt: set[str] = set()  # paths

    def state(self) -> dict[str, Any]:
        """The state itself, nothing copied."""
        return {name: _state_of(thing) for name, thing in self.things.items()}

    def restore(self, state: Mapping[str, Any], lr_factor: float) -> None:
        """Restore an earlier state with its learning rates times a factor, and drop all gradients."""
        for name, thing in self.things.items():
            has_rates = any(hasattr(thing, key) for key in ("param_groups", "get_last_lr", "simulate_values"))
            _restore(thing, _scaled(state[name], lr_factor) if has_rates and lr_factor != 1.0 else state[name])
        for parameter in chain(*(module.parameters() for module in self.modules), *map(_optimized, self.optimizers)):
            parameter.grad = None

    def parameters(self) -> list[int]:
        """Identities of all parameters."""
        return [id(parameter) for module in self.modules for parameter in module.parameters()]

    def nonfinite(self) -> list[str]:
        """Paths of tensors that are not finite and not exempt; synchronizes with the device."""
        tensors = {path: tensor for path, tensor in numbers_in(self.state()).items() if path not in self._exempt}
        devices = {tensor.device for tensor in tensors.values()}  # AdamW keeps its step counts on the CPU
        norms = [total_norm([tensor for tensor in tensors.values() if tensor.device == device]) for device in devices]
        if all(bool(norm.isfinite()) for norm in norms):  # cheaper than an elementwise check
            return []
        return sorted(path for path, tensor in tensors.items() if not bool(tensor.isfinite().all()))

    def exempt_nonfinite(self) -> None:
        """Exempt the tensors that are not finite now, attention masks for instance."""
        self._exempt.update(self.nonfinite())


def numbers_in(state: Any) -> dict[str, Tensor]:
    """Tensors by path that may be non-finite, of DTensors this rank's part."""
    tensors = ((path.replace("/", "."), local(tensor.detach())) for path, tensor in tensors_in(state))
    floating = ((path, t) for path, t in tensors if (t.is_floating_point() or t.is_complex()) and not t.is_meta)
    return {path: tensor for path, tensor in floating if tensor.itemsize > 1}


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
