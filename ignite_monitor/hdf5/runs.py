"""Runs of a logger's trainer: the run and the iteration that a value or a report belongs to."""

from __future__ import annotations

from ignite_monitor.hdf5.layout import ENDLESS, Position, Run
from ignite_monitor.hdf5.writer import Writer


class RunTracker:
    """Follows the iterations of the trainer: the first one of a run begins that run in the file.

    What is written before, as by an evaluation at the start, has the number of the run to come. It is read as written
    at the start of that run; if the run never begins, at the last iteration known when it was written.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._offset, self._last = writer.offset, writer.last  # iterations before its own; its last one, with these
        self._has_begun = False  # a run in this session
        self.awaits_run = True  # until its first iteration: handlers may load a checkpoint before

    def start_iteration(self, iteration: int) -> None:
        """Count an iteration of the trainer; the first one of a run, or one that was counted before, begins a run."""
        if self.awaits_run or iteration + self._offset <= self._last:
            self._begin(iteration - 1)
        self._last = iteration + self._offset

    @property
    def number(self) -> int:
        """Number of the run in progress, or of the one to come."""
        return self._writer.runs if self.awaits_run else self._writer.runs - 1

    def position(self, iteration: int) -> Position:
        """Return the position of a value that is written while the trainer's counter has this number."""
        if not self.awaits_run:
            return Position(self.number, self._last)
        last = iteration + self._offset if iteration > 0 and not self._has_begun else self._last
        return Position(self.number, ~last)

    def position_of_report(self, iteration: int | None) -> Position:
        """Return the position of a report from an iteration of the trainer, None for its last one."""
        return Position(self.number, self._last if iteration is None else max(0, iteration) + self._offset)

    def _begin(self, start: int) -> None:
        """Begin a run after an iteration of the trainer; one from the beginning is added to the session's earlier ones.

        Any other run replaces what the file holds after that iteration, and the session's first one everything if it
        is from the beginning.
        """
        if start == 0 and not self._has_begun:
            self._offset, after = 0, -1
        elif start == 0 and self.awaits_run:
            self._offset, after = self._last, ENDLESS
        else:
            after = start + self._offset
        self._writer.begin_run(Run(self._offset, after))
        self.awaits_run, self._has_begun = False, True
