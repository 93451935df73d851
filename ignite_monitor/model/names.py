"""Names of modules and parameters in the user's own model, without those of wrappers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import count

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ignite_monitor.model._torch import WRAPPED


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules with the names they have without wrappers of torch; a wrapper itself has that of what it wraps.

    A module that the user calls ``module`` keeps its name.
    """
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
    # A wrapper comes before what it wraps, by the same name.
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


Pattern = str | re.Pattern[str] | None


class Selection:
    """Names in which the regular expression ``include`` matches, and ``exclude`` does not; None for all, and none."""

    def __init__(self, include: Pattern = None, exclude: Pattern = None) -> None:
        self._include = _compiled("include", include)
        self._exclude = _compiled("exclude", exclude)

    def of(self, names: Iterable[str]) -> list[str]:
        """The selected names, in their order."""
        return [name for name in names if name in self]

    def __contains__(self, name: str) -> bool:
        included = self._include is None or self._include.search(name) is not None
        return included and (self._exclude is None or self._exclude.search(name) is None)


def _compiled(name: str, pattern: object) -> re.Pattern[str] | None:
    if pattern is None:
        return None
    if not isinstance(pattern, (str, re.Pattern)):
        raise TypeError(f"Argument {name} should be a regular expression or None, but given {type(pattern)}")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"Argument {name} should be a regular expression, but given {pattern!r}: {error}") from None
