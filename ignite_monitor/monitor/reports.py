"""Reports: what a monitor has found, as it is logged and recorded."""

from __future__ import annotations

import logging
from typing import NamedTuple

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
