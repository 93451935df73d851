"""Rows that a resumed run replaces.

A run that resumes from iteration n replaces what earlier runs with one of its names recorded after n, back to the one
that started from the beginning. The values of engines that ran within a run (an evaluator's) are compared with such
values only, so that a later evaluation replaces nothing of a training run.

A run from the beginning replaces nothing of its own session (another loader: its steps are added). In a later session
it replaces the runs whose steps it repeats.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class _Run(NamedTuple):
    start: int
    session: int
    rows: NDArray[np.int64]
    names: set[tuple[int, int]]  # (nested, index)


def current(rows: NDArray[Any], ids: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Mask of the rows that no later run replaces."""
    kept = np.ones(len(rows), bool)
    numbers, which = np.unique(rows["run"], return_inverse=True)
    if len(numbers) < 2:
        return kept
    by_run = np.split(np.argsort(which, kind="stable"), np.cumsum(np.bincount(which))[:-1])
    runs = [
        _Run(int(rows["start"][its[0]]), int(rows["session"][its[0]]), its, _names(rows[its], ids)) for its in by_run
    ]
    starts, sessions = (np.array([getattr(run, field) for run in runs]) for field in ("start", "session"))
    last_steps = np.array([rows["step"][run.rows].max() for run in runs])
    for number, run in enumerate(runs):
        if run.start == 0:
            repeated = (sessions < run.session) & (last_steps >= rows["step"][run.rows].min())
            for earlier in np.flatnonzero(repeated).tolist():
                if not run.names.isdisjoint(runs[earlier].names):
                    kept[runs[earlier].rows] = False
            continue
        for earlier in range(number - 1, -1, -1):
            old = runs[earlier].rows
            if not run.names.isdisjoint(runs[earlier].names):
                iterations = rows["iteration"][old]
                kept[old[iterations > run.start]] = False
                _drop_repeated(rows, ids, kept, old[iterations == run.start], run)
                if starts[earlier] == 0:
                    break
    return kept


def _names(rows: NDArray[Any], ids: NDArray[np.int32]) -> set[tuple[int, int]]:
    _, first = np.unique(2 * rows["ids"] + rows["nested"], return_index=True)
    return {(int(row["nested"]), name) for row in rows[first] for name in _list(row, ids).tolist()}


def _list(row: Any, ids: NDArray[np.int32]) -> NDArray[np.int32]:
    return ids[row["ids"] : row["ids"] + row["count"]]


def _drop_repeated(
    rows: NDArray[Any], ids: NDArray[np.int32], kept: NDArray[np.bool_], old: NDArray[np.int64], run: _Run
) -> None:
    """Drop rows that were written between two iterations, as at the start of an epoch, and are written again."""

    def content(row: Any) -> tuple[int, int, bytes]:
        return int(row["nested"]), int(row["step"]), _list(row, ids).tobytes()

    again = {content(row) for row in rows[run.rows[rows["iteration"][run.rows] == run.start]]} if len(old) else set()
    for index in old:
        if content(rows[index]) in again:
            kept[index] = False
