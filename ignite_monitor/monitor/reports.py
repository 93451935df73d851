"""Reports: lines that monitors log and record."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from ignite.engine import Engine

from ignite_monitor.checks import check_choice
from ignite_monitor.model.isolation import is_from_signal_handler

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


class Reporter:
    """Base of monitors: logs lines, and records them and the arguments that the constructor was given.

    Attributes:
        prefix: prefix of all names.
        logger: logger of the class.
        reports: what :meth:`report` has recorded, oldest first.
        given_arguments: the arguments of the constructor, in words: ``optimizer=Adam, on_spike='skip'``.
    """

    prefix: str
    logger: logging.Logger
    reports: list[Report]
    given_arguments: str
    _reported_kinds: set[str]
    _engine: weakref.ref[Engine] | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        reporter = super().__new__(cls)
        reporter.logger = logging.getLogger(f"{cls.__module__}.{cls.__name__}")
        reporter.reports, reporter._reported_kinds = list[Report](), set[str]()
        try:
            given = inspect.signature(cls.__init__).bind_partial(reporter, *args, **kwargs).arguments
        except TypeError:  # which the call itself raises
            given = {}
        reporter.given_arguments = ", ".join(f"{name}={_described(value)}" for name, value in [*given.items()][1:])
        return reporter

    def report(
        self,
        kind: str,
        text: str,
        *,
        severity: str = "warning",
        names: Sequence[str] = (),
        once: bool = True,
    ) -> None:
        """Log a line, and record it: loggers that keep reports, as ``HDF5Logger`` does, write it to their file.

        Args:
            kind: identifier of what is reported: ``"not_in_optimizer"``.
            text: the line without class, prefix and iteration, which precede it in the log.
            severity: ``"problem"``, ``"warning"`` or ``"note"``.
            names: the parameters, modules or groups it speaks of.
            once: False to report a kind again that this monitor has reported.

        Raises:
            ValueError: if ``severity`` is another.
        """
        check_choice("severity", severity, *LEVELS)
        if once and kind in self._reported_kinds:
            return
        self._reported_kinds.add(kind)
        engine = self._attached_to()
        iteration = 0 if engine is None else engine.state.iteration
        self.reports.append(Report(iteration, self._title, str(kind), severity, str(text), tuple(map(str, names))))
        place = f"iteration {iteration}: " if iteration else ""
        self.logger.log(LEVELS[severity], "%s: %s%s", self._title, place, text)

    @contextmanager
    def _training_continues(self, kind: str, text: str) -> Iterator[None]:
        """Report an error of the user's objects with a text before it; those of signal handlers are raised."""
        try:
            yield
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            reason = str(error).partition("\n")[0]
            self.report(kind, f"{text}: {type(error).__name__}: {reason}")

    def _attached_to(self) -> Engine | None:
        return None if self._engine is None else self._engine()

    @property
    def _title(self) -> str:
        """Class and prefix, as log messages begin."""
        return f"{type(self).__name__} ({self.prefix})" if self.prefix else type(self).__name__


def _described(value: Any) -> str:
    """Describe a value: numbers and texts as they are, mappings by their keys, other objects by their class."""
    if isinstance(value, (bool, int, float, str)) or value is None:
        return repr(value)[:200]
    if isinstance(value, Mapping):
        return repr([*map(str, value)])[:200]
    return str(getattr(value, "__qualname__", type(value).__qualname__))
