"""Recording of values from inside a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ignite_monitor.model.forward import running_module

# Called with each recorded value while a monitored train step runs.
_receivers: list[Callable[[nn.Module | None, str, Any], None]] = []


def record(name: str, value: Any, module: nn.Module | None = None) -> None:
    """Publish a value from inside a model's forward as ``recorded/{module}/{name}``, in monitored iterations.

    Outside of a monitored train step it returns at once; ``torch.compile`` removes it without a graph break. It never
    raises an error: what cannot be recorded is skipped with one warning, also inside of ``torch.func`` transforms.

    Args:
        name: the name: letters, digits, ``-``, ``_``, ``.`` and ``/``.
        value: a number, or a tensor, a NumPy array or a list of numbers, whose mean is taken.
        module: the module it belongs to; None for the one whose forward is running.

    Examples:
        .. code-block:: python

            class Gate(nn.Module):
                def forward(self, x):
                    gate = torch.sigmoid(x)
                    record("open", gate > 0.5)
                    return x * gate
    """
    if torch.compiler.is_compiling() or not _receivers:
        return
    module = running_module() if module is None else module
    for receive in list(_receivers):
        receive(module, name, value)


@contextlib.contextmanager
def recording(receive: Callable[[nn.Module | None, str, Any], None]) -> Iterator[None]:
    """Call a function with the module, None outside of any, the name and the value of what is recorded."""
    _receivers.append(receive)
    try:
        yield
    finally:
        _receivers.remove(receive)
