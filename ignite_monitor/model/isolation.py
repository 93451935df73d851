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
from functools import partial
from itertools import chain
from traceback import walk_tb
from types import CellType
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.model._torch import buffers_in
from ignite_monitor.model.names import named_modules

_thread = threading.local()
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)


def in_second_pass() -> bool:
    """Return True while this thread runs a second pass, which monitors must not measure."""
    return getattr(_thread, "in_second_pass", False)


def is_from_signal_handler(error: BaseException) -> bool:
    """Return True if a handler of a signal raised an error, which is not one of the code that it interrupted."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    return any(frame.f_code in handlers for frame, _ in walk_tb(error.__traceback__))


@contextlib.contextmanager
def isolated_pass(model: nn.Module, generators: Iterable[Any]) -> Iterator[None]:
    """Run a second pass of a model: RNG state, generators, buffers and training flags are restored on exit.

    Inside, the buffers are copies.

    Raises:
        RuntimeError: if a generator of the model's dropout can't be restored.
    """
    for name, module in named_modules(model):
        if isinstance(module, nn.RNNBase) and module.dropout > 0 and _runs_on_cudnn(module):
            # Torch keeps its state in a cache. Every pass changes it, and setting the device's RNG state draws it anew.
            label = f"{name or 'the root module'} ({type(module).__name__})"
            raise RuntimeError(f"a second pass would change the dropout of {label}, which cuDNN draws")
    devices = {item.device for item in chain(model.parameters(), model.buffers())}
    flags = [(module, module.training) for module in model.modules()]
    buffers = [(registry, dict(registry)) for module, _ in flags if (registry := buffers_in(module))]
    copies: dict[int, Tensor | None] = {}  # a tensor that several modules have stays one
    before = in_second_pass(), torch.is_autocast_cache_enabled()
    with preserved_rng_state(devices, generators):
        try:
            _thread.in_second_pass = True
            # Weights that are cast here without gradients would be reused where gradients are recorded.
            torch.set_autocast_cache_enabled(False)
            for registry, saved in buffers:
                for name, item in saved.items():
                    if id(item) not in copies:
                        copies[id(item)] = item if item is None or nn.parameter.is_lazy(item) else item.clone()
                    registry[name] = copies[id(item)]
            yield
        finally:
            _thread.in_second_pass = before[0]
            torch.set_autocast_cache_enabled(before[1])
            for module, flag in flags:
                if module.training != flag:
                    module.training = flag
            for registry, saved in buffers:
                registry.clear()
                registry.update(saved)


def _runs_on_cudnn(module: nn.RNNBase) -> bool:
    return torch.backends.cudnn.enabled and any(parameter.is_cuda for parameter in module.parameters())


def capture_rng_state(devices: Iterable[torch.device] | None = None) -> dict[str, Any]:
    """RNG state of torch, Python, NumPy and devices, None for the CUDA devices in use; no device is synchronized.

    It holds only what ``torch.load(weights_only=True)`` reads.
    """
    if devices is None:
        count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
        devices = [torch.device("cuda", i) for i in range(count)]
    version, internal_state, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.default_generator.get_state(),
        "python": [version, list(internal_state), gauss],
        "devices": {
            str(item): torch.get_device_module(item).get_rng_state(*_index_of(item))
            for item in set(devices)
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


def generators_of(model: nn.Module, named: Iterable[Any] = (), function: Any = None) -> list[Any]:
    """Generators of torch, Python and NumPy that a model and a function may use, and those named.

    These are attributes of modules and of their classes, what the function holds, members of such containers, and
    globals of the files in which the function and the classes are.
    """
    modules = list(model.modules())
    classes = dict.fromkeys(chain(*[kind.__mro__ for kind in dict.fromkeys(map(type, modules))]))
    searched = [kind for kind in classes if kind.__module__.partition(".")[0] not in ("torch", "builtins")]
    files = dict.fromkeys(kind.__module__ for kind in searched if kind.__module__ in sys.modules)
    held, global_values = _held_by(function)
    values = [*named, *held, *chain(*[vars(item).values() for item in (*modules, *searched)])]
    containers = filter(None, _instances(values, _CONTAINERS))
    values += chain(*[[*(item.values() if isinstance(item, dict) else item)] for item in containers])
    values += [*global_values, *chain(*[vars(sys.modules[file]).values() for file in files])]
    return list({id(item): item for item in _instances(values, generator_kinds())}.values())


def _held_by(function: Any) -> tuple[list[Any], list[Any]]:
    """The values in a function's closure, object and partial arguments, with their attributes; and its globals."""
    holders: list[Any] = []
    while isinstance(function, partial):
        holders += [*function.args, *function.keywords.values()]
        function = function.func
    code = function if hasattr(function, "__globals__") else type(function).__call__
    cells = [cell.cell_contents for cell in getattr(code, "__closure__", None) or () if cell != CellType()]
    holders += [getattr(function, "__self__", function), *cells]
    attributes = chain(*[[*getattr(holder, "__dict__", {}).values()] for holder in holders])
    return [*holders, *attributes], [*getattr(code, "__globals__", {}).values()]


def _instances(values: list[Any], kinds: tuple[type, ...]) -> list[Any]:
    matching = {kind for kind in set(map(type, values)) if issubclass(kind, kinds)}  # far fewer than values
    return [value for value in values if type(value) in matching] if matching else []


def generator_kinds() -> tuple[type, ...]:
    """The classes of generators of torch, Python and NumPy."""
    numpy = sys.modules.get("numpy.random")
    return torch.Generator, random.Random, *(() if numpy is None else (numpy.Generator, numpy.RandomState))


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
    return value.tolist() if hasattr(value, "tolist") else value
