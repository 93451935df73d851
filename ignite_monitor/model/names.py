"""Modules and parameters by the names they have in the user's own model, without those of wrappers."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from numbers import Real
from operator import itemgetter
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from ignite_monitor.checks import check_pattern
from ignite_monitor.model._torch import WRAPPED, parameters_in


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules with the names they have without wrappers of torch; a wrapper comes before what it wraps, by its name."""
    names = {"": ""}
    modules: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        modules[path] = module
        parent, _, last = path.rpartition(".")
        if path:
            is_replicas = last == "module" and isinstance(modules[parent], (DataParallel, DistributedDataParallel))
            names[path] = names[parent] if is_replicas or last in WRAPPED else f"{names[parent]}.{last}".lstrip(".")
        yield names[path], module


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own model, without its wrappers."""
    return [module for name, module in named_modules(model) if not name][-1]


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    """Parameters, each once and by its first name, with the modules that own them."""
    seen = set()
    for name, module in named_modules(model):
        for last, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{name}.{last}".lstrip("."), parameter, module


def tags(names: Iterable[str]) -> list[str]:
    """Names as loggers keep them: of letters, digits, ``-``, ``_``, ``.`` and ``/``, each different."""
    unique: dict[str, None] = {}
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9_./-]", "_", name)
        numbered = (f"{plain}_{number}" for number in count(2))
        unique[plain if plain not in unique else next(tag for tag in numbered if tag not in unique)] = None
    return list(unique)


def top(kind: str, names: Sequence[str], values: Sequence[float], count: int, least: bool = False) -> dict[str, float]:
    """The ``count`` largest values, or the least, by ``{kind}/{name}``; NaN and negative ones are none."""
    known = [(value, name) for name, value in zip(names, values, strict=True) if value >= 0]
    chosen = (heapq.nsmallest if least else heapq.nlargest)(count, known, key=itemgetter(0))
    return {f"{kind}/{name}": value for value, name in chosen}


def listed(names: Sequence[str], most: int) -> str:
    """Join names, at most so many, and the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


Pattern = str | re.Pattern[str] | None


class Selection:
    """Names that ``include`` accepts, a regular expression or a function, and ``exclude`` does not."""

    def __init__(self, include: Pattern | Callable[[str], Any] = None, exclude: Pattern = None) -> None:
        self._include = include if callable(include) else (check_pattern("include", include) or re.compile("")).search
        self._exclude = (check_pattern("exclude", exclude) or re.compile("(?!)")).search

    def __contains__(self, name: str) -> bool:
        return bool(self._include(name)) and not self._exclude(name)


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters that an optimizer holds, of all groups."""
    return list(chain.from_iterable(map(itemgetter("params"), optimizer.param_groups)))


def held_by(optimizer: Optimizer) -> set[int]:
    """The ids of an optimizer's parameters."""
    return set(map(id, parameters_of(optimizer)))


def is_from_torch(optimizer: Optimizer) -> bool:
    """Return True for an optimizer of torch itself: a subclass may do anything in its step."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")  # Adafactor and Muon: "torch.optim"


def without_accelerate(optimizer: Any) -> Any:
    """Return the optimizer that accelerate has wrapped; any other object as it is."""
    return optimizer.optimizer if type(optimizer).__module__ == "accelerate.optimizer" else optimizer


def learning_rates(optimizer: Optimizer) -> list[float | Tensor | None]:
    """The learning rate of each group, 0-dim if a tensor; None unless it is one real number, as with Adafactor."""
    return [_number(group.get("lr")) for group in optimizer.param_groups]


def _number(value: Any) -> float | Tensor | None:
    if isinstance(value, Tensor):
        return value.detach().reshape(()) if value.numel() == 1 and not value.is_complex() else None
    return float(value) if isinstance(value, Real) else None


def is_layer(name: str, module: nn.Module) -> bool:
    """Return True for a module with parameters of its own."""
    # The weights of a parametrized module are in a submodule that it computes them with.
    if ".parametrizations." in f".{name}.":
        return False
    return any(item is not None for item in parameters_in(module).values()) or hasattr(module, "parametrizations")


def hookable(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Select those of a model's modules on which a forward hook does not change the model's result."""
    # In evaluation mode the layer leaves its fast path, whose results differ, where a module inside has a hook.
    layers = (module for module in modules.values() if isinstance(module, nn.TransformerEncoderLayer))
    inside = {id(module) for layer in layers if not layer.training for module in layer.modules()}
    return {name: module for name, module in modules.items() if id(module) not in inside}
