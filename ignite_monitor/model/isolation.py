"""Isolation of a second forward or backward pass from the training run: RNG state, buffers, training flags.

Nothing else in the package restores any of these. Other attributes are not restored: a pass that may change them runs
on a copy of the model.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from traceback import walk_tb
from types import CellType
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.model._torch import buffers_in
from ignite_monitor.model.names import named_modules

_thread = threading.local()
_CONTAINERS = (list, tuple, set, frozenset, deque)


class UnrepeatablePassError(RuntimeError):
    """Reason why no second pass of a model runs."""


def in_second_pass() -> bool:
    """Return True while this thread runs a second pass, which monitors must not measure."""
    return getattr(_thread, "in_second_pass", False)


def is_from_signal_handler(error: BaseException) -> bool:
    """Return True if a handler of a signal raised an error, which is not one of the code that it interrupted."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    return any(frame.f_code in handlers for frame, _ in walk_tb(error.__traceback__))


@contextlib.contextmanager
def isolated_pass(
    model: nn.Module, devices: Iterable[torch.device] | None = None, generators: Iterable[Any] = ()
) -> Iterator[None]:
    """Run a second pass of a model: RNG state, generators, buffers and training flags are restored on exit.

    The RNG state is that of ``devices``; None for those of the model's parameters and buffers. Generators are those of
    :func:`generators_of`.

    Raises:
        UnrepeatablePassError: if a generator of the model's dropout can't be restored.
    """
    for name, module in named_modules(model):
        if isinstance(module, nn.RNNBase) and module.dropout > 0 and _runs_on_cudnn(module):
            # Torch keeps its state in a cache. Every pass changes it, and setting the device's RNG state draws it anew.
            label = f"{name or 'the root module'} ({type(module).__name__})"
            raise UnrepeatablePassError(f"a second pass would change the dropout of {label}, which cuDNN draws")
    if devices is None:
        devices = {item.device for item in chain(model.parameters(), model.buffers())}
    before = in_second_pass(), torch.is_autocast_cache_enabled()
    all_generators = generators_of(model, generators)
    with preserved_rng_state(devices, all_generators.values()), preserved_buffers(model.modules()):
        try:
            _thread.in_second_pass = True
            # Weights that are cast here without gradients would be reused where gradients are recorded.
            torch.set_autocast_cache_enabled(False)
            yield
        finally:
            _thread.in_second_pass = before[0]
            torch.set_autocast_cache_enabled(before[1])


def _runs_on_cudnn(module: nn.RNNBase) -> bool:
    return torch.backends.cudnn.enabled and any(parameter.is_cuda for parameter in module.parameters())


@contextlib.contextmanager
def preserved_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore buffers and training flags of modules on exit; inside, the buffers are copies."""
    flags = [(module, module.training) for module in modules]
    buffers = [(registry, dict(registry)) for module, _ in flags if (registry := buffers_in(module))]
    copies: dict[int, Tensor | None] = {}  # a tensor that several modules have stays one
    try:
        for registry, saved in buffers:
            for name, item in saved.items():
                if id(item) not in copies:
                    copies[id(item)] = item if item is None or nn.parameter.is_lazy(item) else item.clone()
                registry[name] = copies[id(item)]
        yield
    finally:
        for module, flag in flags:
            if module.training != flag:
                module.training = flag
        for registry, saved in buffers:
            registry.clear()
            registry.update(saved)


def cuda_devices() -> list[torch.device]:
    """CUDA devices of this process; none before CUDA is initialized."""
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if torch.cuda.is_initialized() else []


def capture_rng_state(devices: Iterable[torch.device] | None = None) -> dict[str, Any]:
    """RNG state of torch, Python, NumPy and devices, None for the CUDA devices in use; no device is synchronized.

    It holds only what ``torch.load(weights_only=True)`` reads.
    """
    version, internal_state, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.default_generator.get_state(),
        "python": [version, list(internal_state), gauss],
        "devices": {
            str(item): torch.get_device_module(item).get_rng_state(*_index_of(item))
            for item in set(cuda_devices() if devices is None else devices)
            if item.type not in ("cpu", "meta")
        },
    }
    numpy = sys.modules.get("numpy.random")  # nothing was drawn from a package that is not imported
    return state if numpy is None else state | {"numpy": _without_arrays(numpy.get_state(legacy=False))}


def restore_rng_state(state: Mapping[str, Any]) -> None:
    """Restore what :func:`capture_rng_state` returned; devices that do not exist are skipped.

    A state that has not changed is not set: that would draw the dropout of cuDNN's recurrent layers anew.
    """
    torch.default_generator.set_state(state["torch"])
    version, internal_state, gauss = state["python"]
    random.setstate((version, tuple(internal_state), gauss))
    if "numpy" in state:
        import numpy.random

        numpy.random.set_state(state["numpy"])
    for name, value in state["devices"].items():
        device = torch.device(name)
        module = torch.get_device_module(device)
        exists = module.is_available() and (device.index or 0) < module.device_count()
        if exists and not torch.equal(module.get_rng_state(*_index_of(device)), value):
            module.set_rng_state(value, *_index_of(device))


@contextlib.contextmanager
def preserved_rng_state(
    devices: Iterable[torch.device] | None = None, generators: Iterable[Any] = ()
) -> Iterator[None]:
    """Restore the state that :func:`capture_rng_state` returns, and that of generators, on exit."""
    state, saved_states = capture_rng_state(devices), [(item, generator_state(item)) for item in generators]
    try:
        yield
    finally:
        restore_rng_state(state)
        for item, saved in saved_states:
            set_generator_state(item, saved)


def generators_of(model: nn.Module, named: Iterable[Any] = ()) -> dict[tuple[Any, ...], Any]:
    """Generators of torch, Python and NumPy that a model may use, by name of the module and place, and those named.

    These are attributes of modules and of their classes, members of such containers, and globals of the files in which
    the classes are.
    """
    generators: dict[tuple[Any, ...], Any] = {(place,): item for place, item in enumerate(named)}
    classes: set[type] = set()
    for name, module in named_modules(model):
        generators |= _generators_in(vars(module), (name,))
        classes.update(type(module).__mro__)
    searched = {kind for kind in classes if kind.__module__.partition(".")[0] not in ("torch", "builtins")}
    for kind in searched:
        generators |= _generators_in(vars(kind), (kind,))
    for file in {kind.__module__ for kind in searched} & sys.modules.keys():
        generators |= _generators_in(vars(sys.modules[file]), (file,), within=False)
    return generators


def generators_used_by(function: Any) -> list[Any]:
    """Generators in the globals and the closure of a function."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if cell != CellType()]
    used = _generators_in(dict(enumerate(cells)), ())
    return [*(used | _generators_in(getattr(function, "__globals__", {}), (), within=False)).values()]


def generator_kinds() -> tuple[type, ...]:
    """The classes of generators of torch, Python and NumPy."""
    numpy = sys.modules.get("numpy.random")
    return torch.Generator, random.Random, *(() if numpy is None else (numpy.Generator, numpy.RandomState))


def _generators_in(scope: Mapping[Any, Any], place: tuple[Any, ...], within: bool = True) -> dict[tuple[Any, ...], Any]:
    """Generators among the values of a scope, and within its containers, by place."""
    kinds = generator_kinds()
    generators = {(*place, key): value for key, value in [*scope.items()] if isinstance(value, kinds)}
    for key, value in [*scope.items()] if within else ():
        members = value if isinstance(value, dict) else enumerate(value) if isinstance(value, _CONTAINERS) else ()
        generators |= _generators_in(dict(members), (*place, key), within=False) if members else {}
    return generators


def generator_state(generator: Any) -> Any:
    """State of a generator of torch, Python or NumPy."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state() if hasattr(generator, "get_state") else generator.bit_generator.state


def generator_states(model: nn.Module, named: Iterable[Any]) -> dict[str, Any]:
    """States of the global generators and of those of :func:`generators_of`, by name."""
    state = capture_rng_state()
    state |= state.pop("devices")
    for place, generator in generators_of(model, named).items():
        name = ".".join(str(getattr(part, "__qualname__", part)) for part in place)
        state[f"{name} of the model or loss"] = generator_state(generator)
    return state


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
