"""Runs of a logger's trainer: the run and the iteration that a value or a report belongs to."""

from __future__ import annotations

import threading
import time
import weakref

from ignite.engine import Engine

from ignite_monitor.hdf5.layout import LARGEST, Position
from ignite_monitor.hdf5.writer import Writer

SECONDS = 10.0  # after which rows are written


class RunTracker:
    """Follows the runs of the trainer. Values of other engines are placed at its iteration.

    Without a trainer, every value is placed at the iteration of its own engine, and no value is ever replaced.
    """

    def __init__(self, writer: Writer, flush_every: int) -> None:
        self._writer, self._flush_every = writer, flush_every
        self._trainer: weakref.ref[Engine] | None = None
        self._number, self._offset, self._last = writer.last_run  # iterations before its own; its last one, with these
        self._is_due = False  # a run of the trainer has started, and has no record yet
        self._thread = threading.get_ident()  # of the trainer
        self._has_begun = False  # a run in this session
        self._distance = 0  # iterations between writes; it grows, so that a run can be read from the beginning on
        self._iterations, self._written = 0, time.monotonic()

    def name_trainer(self, trainer: weakref.ref[Engine]) -> None:
        """Set the engine whose runs are recorded."""
        self._trainer = trainer

    def is_trainer(self, engine: Engine) -> bool:
        """Return True for the engine whose runs are recorded."""
        return self._trainer is not None and self._trainer() is engine

    @property
    def is_recorded(self) -> bool:
        """True if the run that started last has a record."""
        return self._has_begun and not self._is_due

    def start(self) -> None:
        """Note that a run of the trainer starts; its record is made later, as handlers may resume at STARTED."""
        self._is_due, self._thread = True, threading.get_ident()

    def tick(self, engine: Engine) -> None:
        """Count an iteration that starts; one of the trainer's that was counted before begins a run."""
        self._iterations += 1
        if self.is_trainer(engine):
            iteration = engine.state.iteration
            is_rewound = iteration + self._offset <= self._last
            if self._is_due or is_rewound or not self._has_begun:
                self._begin(iteration - 1, adds=self._is_due)
            self._last = iteration + self._offset
        else:
            self._begin_due()

    def position(self, engine: Engine) -> Position:
        """Return the position of a value of an engine."""
        self._begin_due()
        if self._trainer is None:
            return Position(self._number, max(0, engine.state.iteration))
        if self.is_trainer(engine):
            self._last = max(self._last, engine.state.iteration + self._offset)
        return Position(self._number, self._last)

    def position_of_report(self, is_trainers: bool, iteration: int) -> Position:
        """Return the position of a report that a monitor of the trainer or of another engine made."""
        if self._is_due or self._number < 0:
            self._begin_due()
        return Position(self._number, max(0, iteration) + self._offset if is_trainers else self._last)

    def is_time(self) -> bool:
        """Return True if rows should be written: after enough iterations or seconds."""
        return self._iterations >= self._distance or time.monotonic() - self._written > SECONDS

    def written(self) -> None:
        """Count from now on."""
        self._distance = min(max(1, 10 * self._distance), self._flush_every)
        self._iterations, self._written = 0, time.monotonic()

    def _begin_due(self) -> None:
        """Begin a run that has started without a record, or that a restored trainer is about to start."""
        # In another thread than the trainer's, the iteration may be the last one before the run or its first one.
        is_known = not self._is_due or self._thread == threading.get_ident()
        trainer = None if self._trainer is None else self._trainer()
        iteration = trainer.state.iteration if trainer is not None and is_known else 0
        if (self._is_due and is_known) or self._number < 0 or (iteration and not self._has_begun):
            self._begin(iteration, adds=True)

    def _begin(self, start: int, adds: bool) -> None:
        """Begin a run after an iteration of the trainer; one from the beginning is added to the session's earlier ones.

        Any other run replaces what the file holds after that iteration, and the session's first one everything if it
        is from the beginning.
        """
        if start == 0 and not self._has_begun:
            self._offset = self._last = 0
            after = -1
        elif start == 0 and adds:
            self._offset, after = self._last, LARGEST
        else:
            self._last = after = start + self._offset
        self._number = self._writer.begin_run(self._offset, after)
        self._is_due, self._has_begun = False, True
