"""Logging from inside a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.model.forward import running_module

# What takes values in, while a monitored train step is going on.
_receivers: list[Callable[[nn.Module | None, str, Any], None]] = []


def record(name: str, value: float | Tensor, module: nn.Module | None = None) -> None:
    """Publish a value from inside a model's forward as ``activation/{module}/{name}``, where it is being monitored.

    Outside of a monitored train step it returns at once, and ``torch.compile`` leaves it out without a graph break.

    Args:
        name: what the value is called.
        value: a number, or a tensor, of which the mean counts.
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
    """While it lasts, hands on what is recorded: module, None outside of any, name and value."""
    _receivers.append(receive)
    try:
        yield
    finally:
        _receivers.remove(receive)
