"""Forward hooks that users have registered, which a copy of their model is without."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from ignite_monitor.model._torch import known_forward_hooks, remove_forward_hook, versions
from ignite_monitor.model.forward import ModuleHook
from ignite_monitor.model.tensors import tensors_in


def hooks_of_users(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str, Any, Callable[..., Any]]]:
    """Module, attribute, key and function of each; those of libraries, and our own, are how a module works."""
    modules = list(modules)
    return [
        (module, *known, hook)
        for module, own in zip(modules, known_forward_hooks(modules), strict=True)
        for known, hook in own.items()
        if not _of_library(hook)
    ]


def remove_hooks_of_users(model: nn.Module) -> list[str]:
    """Take them off all modules; the names of those that had some."""
    names = {module: name or "the root module" for name, module in model.named_modules()}
    found = hooks_of_users(names)
    for module, kind, key, _ in found:
        remove_forward_hook(module, (kind, key))
    return list(dict.fromkeys(names[module] for module, *_ in found))


@contextlib.contextmanager
def noticed(modules: Mapping[str, nn.Module], changed: Callable[[str], None]) -> Iterator[None]:
    """While it lasts, tells the names of modules whose inputs or outputs a user's hook changes or replaces."""
    replaced: list[tuple[dict[Any, Any], Any, Any, _Noticed]] = []
    try:
        names = {module: name for name, module in modules.items()}
        for module, kind, key, hook in hooks_of_users(names):
            hooks = getattr(module, kind)
            hooks[key] = around = _Noticed(hook, names[module], changed)
            replaced.append((hooks, key, hook, around))
        yield
    finally:
        for hooks, key, hook, around in replaced:
            if hooks.get(key) is around:  # and the user has not removed it
                hooks[key] = hook


class _Noticed(ModuleHook):
    def __init__(self, hook: Callable[..., Any], name: str, changed: Callable[[str], None]) -> None:
        self._hook = hook
        self._name = name
        self._changed = changed

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        before = [each for _, each in tensors_in(given)]
        then = versions(before)
        result = self._hook(module, *given)
        if versions(before) != then:
            self._changed(self._name)
        elif result is not None:
            # An input is given alone or as a tuple, with keyword arguments or without; an output comes last.
            returned = _ids_in(result)
            if returned not in map(_ids_in, (given, given[-1])):
                self._changed(self._name)
        return result


def _of_library(hook: Any) -> bool:
    where = getattr(hook, "__module__", None) or type(hook).__module__
    return where.partition(".")[0] in ("torch", "transformers", "ignite_monitor")


def _ids_in(value: Any) -> list[int]:
    return [id(each) for _, each in tensors_in(value)]
