"""Random numbers that are drawn twice."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.reference.copies import is_full

_OF_MODULES = frozenset(vars(nn.Module()))  # what every module has
_LEFT_OUT = (int, float, str, bytes, type(None), Tensor, nn.Module, ModuleType, type)
_DEEPEST = 5  # a trainer or a data set may be behind an attribute


@contextlib.contextmanager
def preserved_rng_state(devices: Iterable[torch.device], generators: Iterable[Any] = ()) -> Iterator[None]:
    """Random numbers drawn while it lasts are drawn once more afterwards: by torch, Python and NumPy.

    Those of torch come from the generators given, and from the default ones of the devices and the CPU.
    """
    every: list[Any] = [torch.default_generator, *generators]
    others: list[tuple[Any, torch.device, torch.Tensor]] = []
    for device in devices:
        if device.type == "cuda":
            # Its state lies on the host: nothing waits.
            torch.cuda.init()
            index = torch.cuda.current_device() if device.index is None else device.index
            every.append(torch.cuda.default_generators[index])
        elif device.type not in ("cpu", "meta"):
            module = torch.get_device_module(device)
            others.append((module, device, module.get_rng_state(device)))
    put_back = [partial(_set_state, each, _state(each)) for each in every]
    python = random.getstate()
    # Nobody has drawn from what is not imported.
    numpy = sys.modules.get("numpy.random")
    numpy_state = None if numpy is None else numpy.get_state()
    try:
        yield
    finally:
        for each in put_back:
            each()
        for module, device, state in others:
            module.set_rng_state(state, device)
        random.setstate(python)
        if numpy is not None and numpy_state is not None:
            numpy.set_state(numpy_state)


def cuda_devices() -> list[torch.device]:
    """Those that have been used, so that to ask for their random numbers starts nothing."""
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if torch.cuda.is_initialized() else []


def copy_generator_state(generator: Any, other: Any) -> None:
    """Have a generator draw what another one of its kind is about to draw."""
    if generator is not other:
        _set_state(generator, _state(other))


def generators_of(module: nn.Module) -> dict[tuple[Any, ...], Any]:
    """The random number generators that a module holds, its submodules' left out, by where it holds them.

    Those of torch, Python and NumPy, as attributes, in containers, in other objects and in closures of functions.
    """
    found: dict[tuple[Any, ...], Any] = {}
    attributes = {name: each for name, each in vars(module).items() if name not in _OF_MODULES}
    _collect(attributes, (), found, set(), _kinds())
    return found


def _collect(
    value: Any, path: tuple[Any, ...], found: dict[tuple[Any, ...], Any], seen: set[int], kinds: tuple[type, ...]
) -> None:
    if isinstance(value, _LEFT_OUT) or id(value) in seen or len(path) > _DEEPEST:
        return
    seen.add(id(value))
    if isinstance(value, kinds):
        found[path] = value
        return
    members: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        members = value.items()
    elif isinstance(value, (list, tuple)):
        members = enumerate(value)
    elif isinstance(value, FunctionType):
        parts = [each.cell_contents for each in value.__closure__ or () if is_full(each)]
        members = enumerate([*parts, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()])
    elif isinstance(value, MethodType):
        members = enumerate([value.__func__, value.__self__])
    elif isinstance(value, partial):
        members = enumerate([value.func, *value.args, *value.keywords.values()])
    elif hasattr(value, "__dict__"):
        members = vars(value).items()
    for key, member in [*members]:
        _collect(member, (*path, key), found, seen, kinds)


def _kinds() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy.random")
    return (torch.Generator, random.Random, *(() if numpy is None else (numpy.Generator, numpy.RandomState)))


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
