"""Isolation of a second forward or backward pass from the training run: RNG state, buffers, training flags.

Nothing else in the package restores any of these. Other attributes are not restored: a pass that may change them runs
on a copy of the model.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.model._torch import MODULE_ATTRIBUTES, buffers_in
from ignite_monitor.model.dtensor import local
from ignite_monitor.model.names import named_modules

_thread = threading.local()


def in_second_pass() -> bool:
    """Return True while this thread runs a second pass, which monitors must not measure."""
    return getattr(_thread, "in_second_pass", False)


@contextlib.contextmanager
def isolated_pass(model: nn.Module, devices: Iterable[torch.device] | None = None) -> Iterator[None]:
    """Run a second pass of a model: RNG state, generators, buffers and training flags are restored on exit.

    The RNG state is that of ``devices``; None for those of the model's parameters and buffers.
    """
    if devices is None:
        devices = {item.device for item in chain(model.parameters(), model.buffers())}
    before = in_second_pass(), torch.is_autocast_cache_enabled()
    with preserved_rng_state(devices, generators_of(model).values()), preserved_buffers(model.modules()):
        try:
            _thread.in_second_pass = True
            # Weights that are cast here without gradients would be reused where gradients are recorded.
            torch.set_autocast_cache_enabled(False)
            yield
        finally:
            _thread.in_second_pass = before[0]
            torch.set_autocast_cache_enabled(before[1])


@contextlib.contextmanager
def preserved_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore buffers and training flags of modules on exit; inside, the buffers are copies."""
    flags = [(module, module.training) for module in modules]
    buffers = [(registry, dict(registry)) for registry in map(buffers_in, (module for module, _ in flags)) if registry]
    try:
        for registry, saved in buffers:
            registry.update((name, None if item is None else item.clone()) for name, item in saved.items())
        yield
    finally:
        for module, flag in flags:
            if module.training != flag:
                module.training = flag
        for registry, saved in buffers:
            registry.clear()
            registry.update(saved)


@contextlib.contextmanager
def preserved_parameters(whole: Iterable[Tensor], others: Iterable[Tensor]) -> Iterator[None]:
    """Restore gradients and, of ``whole``, the data on exit; inside, gradients are None. No version counter changes."""
    whole = [item for item in whole if not item.is_meta]
    gradients = [(item, item.grad) for item in (*whole, *others)]
    # Gradients may be views of the buckets of DistributedDataParallel, which a second pass reduces.
    tensors = [*whole, *(item.grad for item in whole if item.grad is not None and not item.grad.is_sparse)]
    saved = [(item, item.data, item.data.clone()) for item in tensors]
    try:
        for item, _ in gradients:
            item.grad = None
        yield
    finally:
        for item, data, copy in saved:
            if local(item.data).data_ptr() != local(data).data_ptr():
                item.data = data
            data.copy_(copy)
        for item, gradient in gradients:
            item.grad = gradient


def cuda_devices() -> list[torch.device]:
    """CUDA devices of this process; none before CUDA is initialized."""
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if torch.cuda.is_initialized() else []


def capture_rng_state(devices: Iterable[torch.device] | None = None) -> dict[str, Any]:
    """RNG state of torch, Python, NumPy and devices, None for the CUDA devices in use; no device is synchronized.

    It holds only what ``torch.load(weights_only=True)`` reads.
    """
    state = _rng_state(devices)
    version, words, gauss = state["python"]
    return {name: _without_arrays(value) for name, value in state.items()} | {"python": [version, list(words), gauss]}


def _rng_state(devices: Iterable[torch.device] | None) -> dict[str, Any]:
    devices = set(cuda_devices() if devices is None else devices)
    state: dict[str, Any] = {
        "torch": torch.default_generator.get_state(),
        "python": random.getstate(),
        "devices": {
            str(item): torch.get_device_module(item).get_rng_state(*_index_of(item))
            for item in devices
            if item.type not in ("cpu", "meta")
        },
    }
    numpy = sys.modules.get("numpy.random")  # nothing was drawn from a package that is not imported
    if numpy is not None:
        state["numpy"] = numpy.get_state(legacy=False)
    return state


def restore_rng_state(state: Mapping[str, Any]) -> None:
    """Restore what :func:`capture_rng_state` returned; devices that do not exist are skipped."""
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
            module.set_rng_state(value, *_index_of(device))


@contextlib.contextmanager
def preserved_rng_state(
    devices: Iterable[torch.device] | None = None, generators: Iterable[Any] = ()
) -> Iterator[None]:
    """Restore the state that :func:`capture_rng_state` returns, and that of generators, on exit."""
    restore = rng_restorer(devices, generators)
    try:
        yield
    finally:
        restore()


def rng_restorer(devices: Iterable[torch.device] | None = None, generators: Iterable[Any] = ()) -> Callable[[], None]:
    """Capture the state of :func:`capture_rng_state` and of generators; return a function that restores it."""
    state, own = _rng_state(devices), [(item, generator_state(item)) for item in generators]

    def restore() -> None:
        restore_rng_state(state)
        for item, saved in own:
            set_generator_state(item, saved)

    return restore


def generators_of(model: nn.Module) -> dict[tuple[Any, ...], Any]:
    """Generators of torch, Python and NumPy that the modules of a model reach, by name of the module and path."""
    return _generators((name, *member) for name, module in named_modules(model) for member in reachable(module))


def generators_used_by(function: Any, model: nn.Module) -> list[Any]:
    """Generators that a model reaches, and a function, by the global names in its code too."""
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    values = [function, *(function.__globals__[name] for name in names if name in function.__globals__)]
    own = _generators(("", *member) for member in reachable(SimpleNamespace(values=values)))
    return [*generators_of(model).values(), *own.values()]


def _generators(members: Iterable[tuple[Any, Any, Any]]) -> dict[tuple[Any, ...], Any]:
    numpy = sys.modules.get("numpy.random")
    kinds = (torch.Generator, random.Random, *(() if numpy is None else (numpy.Generator, numpy.RandomState)))
    return {(name, *path): value for name, path, value in members if isinstance(value, kinds)}


def generator_state(generator: Any) -> Any:
    """State of a generator of torch, Python or NumPy."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state() if hasattr(generator, "get_state") else generator.bit_generator.state


def set_generator_state(generator: Any, state: Any) -> None:
    """Set a state that :func:`generator_state` returned."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def _index_of(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # torch.mps has one device, and no such argument


def _without_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_arrays(item) for key, item in value.items()}
    is_array = hasattr(value, "tolist") and not isinstance(value, Tensor)
    return value.tolist() if is_array else value


class Captured(int):
    """A position in a path of :func:`reachable`, among the objects of a function's closure and defaults."""


_ATOMS = (int, float, str, bytes, type(None), Tensor, nn.Module, ModuleType, type)
_MAX_DEPTH = 5  # a trainer or a data set may be behind an attribute
_MAX_MEMBERS = 1000  # a larger container holds data


def reachable(module: nn.Module | SimpleNamespace) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Paths and objects that a module reaches by attributes of its own, containers, objects and closures.

    Modules are returned, and not entered; nor are containers of more than 1,000 members.
    """
    seen: set[int] = set()
    waiting: deque[tuple[tuple[Any, ...], Any]]
    waiting = deque(((name,), item) for name, item in vars(module).items() if name not in MODULE_ATTRIBUTES)
    while waiting:
        path, value = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield path, value
        if len(path) <= _MAX_DEPTH and not isinstance(value, _ATOMS):
            waiting += [((*path, key), member) for key, member in _members(value)]


def _members(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, (dict, list, tuple, deque)):
        members = value.items() if isinstance(value, dict) else enumerate(value)
        return [*members] if len(value) <= _MAX_MEMBERS else ()
    if isinstance(value, FunctionType):
        held = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        held += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [(Captured(index), item) for index, item in enumerate(held)]
    if isinstance(value, MethodType):
        return enumerate([value.__func__, value.__self__])
    if isinstance(value, functools.partial):
        return enumerate([value.func, *value.args, *value.keywords.values()])
    return [*getattr(value, "__dict__", {}).items()]
