"""Reports: lines that monitors log and record."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

LEVELS = {"problem": logging.WARNING, "warning": logging.WARNING, "note": logging.INFO}
"""Severity of a report -> level of its log line."""


class Report(NamedTuple):
    """A line that a monitor has logged.

    Attributes:
        iteration: the engine's iteration; 0 before it has one.
        monitor: class and prefix of the monitor.
        kind: identifier of what is reported.
        severity: a key of :data:`LEVELS`.
        text: the line without monitor and iteration.
        names: parameters, modules or groups that it speaks of.
    """

    iteration: int
    monitor: str
    kind: str
    severity: str
    text: str
    names: tuple[str, ...] = ()


def describe_arguments(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Describe the arguments of a method's call: ``optimizer=Adam, on_spike='skip'``; empty if they do not fit."""
    try:
        given = inspect.signature(function).bind_partial(None, *args, **kwargs).arguments
    except TypeError:  # which the call itself raises
        return ""
    return ", ".join(f"{name}={_described(value)}" for name, value in [*given.items()][1:])


def _described(value: Any) -> str:
    """Describe a value: numbers, texts and what holds them as they are, other objects by their class."""
    if isinstance(value, (bool, int, float, str)) or value is None:
        return repr(value)[:200]
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_described(item)}' for key, item in [*value.items()][:20])}}}"
    if isinstance(value, (list, tuple, set)):
        return f"[{', '.join(_described(item) for item in [*value][:20])}]"
    return str(getattr(value, "__qualname__", type(value).__qualname__))
