"""Isolation of a second forward or backward pass from the training run: RNG state, buffers, training flags.

Nothing else in the package restores any of these. Parameters, gradients and other attributes are not restored: a pass
that may change them runs on a copy of the model.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.model._torch import buffers_of_each

# The mark of a second pass


class _Thread(threading.local):
    in_reference_run = False


_thread = _Thread()


def is_reference_run() -> bool:
    """Return True while this thread runs a second pass, which monitors must not measure."""
    return _thread.in_reference_run


@contextlib.contextmanager
def reference_run() -> Iterator[None]:
    """Mark this thread as running a second pass, and disable autocast's cache of cast weights."""
    outer, cached = _thread.in_reference_run, torch.is_autocast_cache_enabled()
    try:
        # Weights that are cast here without gradients would be reused where gradients are recorded.
        torch.set_autocast_cache_enabled(False)
        _thread.in_reference_run = True
        yield
    finally:
        _thread.in_reference_run = outer
        torch.set_autocast_cache_enabled(cached)


# RNG state


def cuda_devices() -> list[torch.device]:
    """CUDA devices of this process; none before CUDA is initialized."""
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if torch.cuda.is_initialized() else []


def capture_rng_state(devices: Iterable[torch.device] | None = None) -> dict[str, Any]:
    """RNG state of torch, Python and NumPy, in tensors, lists, strings and numbers only.

    ``torch.load(weights_only=True)`` reads what ``torch.save`` writes of it. No device is synchronized.

    Args:
        devices: accelerators to include; None for the CUDA devices in use.
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.default_generator.get_state(),
        "python": [version, list(words), gauss],
        "devices": {str(each): _device_state(each) for each in _accelerators(devices)},
    }
    numpy = sys.modules.get("numpy.random")  # nothing was drawn from a package that is not imported
    if numpy is not None:
        state["numpy"] = _without_arrays(numpy.get_state(legacy=False))
    return state


def restore_rng_state(state: Mapping[str, Any]) -> None:
    """Restore what :func:`capture_rng_state` returned; devices that do not exist are skipped.

    Raises:
        ValueError: if NumPy's global generator is of another kind than the captured one.
    """
    torch.default_generator.set_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "numpy" in state:
        import numpy.random

        numpy.random.set_state(state["numpy"])
    for name, value in state["devices"].items():
        device = torch.device(name)
        module = torch.get_device_module(device)
        if module.is_available() and (device.index or 0) < module.device_count():
            module.set_rng_state(value, *_indexed(device))


@contextlib.contextmanager
def preserved_rng_state(
    devices: Iterable[torch.device] | None = None, generators: Iterable[Any] = ()
) -> Iterator[None]:
    """Restore RNG state on exit: torch's, Python's, NumPy's, and that of the generators given.

    Args:
        devices: as for :func:`capture_rng_state`.
        generators: generators of torch, Python or NumPy, as :func:`generators_of` returns them.
    """
    state = capture_rng_state(devices)
    own = [(each, _generator_state(each)) for each in generators]
    try:
        yield
    finally:
        restore_rng_state(state)
        for generator, saved in own:
            _set_generator_state(generator, saved)


def copy_generator_state(generator: Any, source: Any) -> None:
    """Set the state of a generator to that of another one of its kind."""
    if generator is not source:
        _set_generator_state(generator, _generator_state(source))


def generators_of(module: nn.Module) -> dict[tuple[Any, ...], Any]:
    """Generators of torch, Python and NumPy that a module holds outside of its submodules, by path.

    Searched are attributes, containers, attributes of other objects, and closures.
    """
    numpy = sys.modules.get("numpy.random")
    kinds = (torch.Generator, random.Random, *(() if numpy is None else (numpy.Generator, numpy.RandomState)))
    return {path: value for path, value in reachable(module) if isinstance(value, kinds)}


def _accelerators(devices: Iterable[torch.device] | None) -> Iterator[torch.device]:
    for device in cuda_devices() if devices is None else set(devices):
        if device.type == "cuda" and device.index is None:
            yield torch.device("cuda", torch.cuda.current_device())
        elif device.type not in ("cpu", "meta"):
            yield device


def _device_state(device: torch.device) -> Tensor:
    if device.type == "cuda":  # without a synchronization
        torch.cuda.init()
        return torch.cuda.default_generators[device.index].get_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(*_indexed(device))
    return state


def _indexed(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # torch.mps has one device, and no such argument


def _without_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_arrays(each) for key, each in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()


def _set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


# Modules


@contextlib.contextmanager
def preserved_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore buffers and training flags of modules on exit; inside, the buffers are copies."""
    modules = list(modules)
    flags = [module.training for module in modules]
    buffers = [(registry, dict(registry)) for registry in buffers_of_each(modules) if registry]
    try:
        for registry, saved in buffers:
            registry.update((name, None if each is None else each.clone()) for name, each in saved.items())
        yield
    finally:
        for module, flag in zip(modules, flags, strict=True):
            module.training = flag
        for registry, saved in buffers:
            registry.clear()
            registry.update(saved)


@contextlib.contextmanager
def isolated_pass(*models: nn.Module, devices: Iterable[torch.device] | None = None) -> Iterator[None]:
    """Run a second pass of models: RNG state, generators, buffers and training flags are restored on exit.

    Args:
        devices: whose RNG state is restored; None for those of the models' parameters and buffers.
    """
    modules = list(dict.fromkeys(chain.from_iterable(model.modules() for model in models)))
    if devices is None:
        devices = {each.device for model in models for each in chain(model.parameters(), model.buffers())}
    generators = [each for module in modules for each in generators_of(module).values()]
    with preserved_rng_state(devices, generators), preserved_buffers(modules), reference_run():
        yield


class Captured(str):
    """A name in a path of :func:`reachable` that a function refers to by its closure or defaults."""

    __slots__ = ()


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_ATOMS = (int, float, str, bytes, type(None), Tensor, nn.Module, ModuleType, type)
_MAX_DEPTH = 5  # a trainer or a data set may be behind an attribute


def reachable(module: nn.Module) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Paths and objects that a module reaches by attributes of its own, containers, objects and closures.

    Modules are returned, and not entered.
    """
    seen: set[int] = set()
    waiting: deque[tuple[tuple[Any, ...], Any]]
    waiting = deque(((name,), each) for name, each in vars(module).items() if name not in _MODULE_ATTRIBUTES)
    while waiting:
        path, value = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield path, value
        if len(path) <= _MAX_DEPTH and not isinstance(value, _ATOMS):
            waiting += [((*path, key), member) for key, member in _members(value)]


def _members(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return [*value.items()]
    if isinstance(value, (list, tuple, deque)):
        return [*enumerate(value)]
    if isinstance(value, FunctionType):
        names = value.__code__.co_freevars
        cells = zip(names, value.__closure__ or (), strict=True)
        captured: dict[Any, Any] = {name: cell.cell_contents for name, cell in cells if _is_set(cell)}
        captured |= dict(enumerate(value.__defaults__ or ())) | (value.__kwdefaults__ or {})
        return [(Captured(name), each) for name, each in captured.items()]
    if isinstance(value, MethodType):
        return [("__func__", value.__func__), ("__self__", value.__self__)]
    if isinstance(value, functools.partial):
        return enumerate([value.func, *value.args, *value.keywords.values()])
    return [*getattr(value, "__dict__", {}).items()]


def _is_set(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises if the variable is not set yet
    except ValueError:
        return False
    return True
