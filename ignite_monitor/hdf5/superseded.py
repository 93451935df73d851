"""Which rows a resumed run replaces.

A run that is resumed from iteration n repeats what an earlier run did after n. The earlier run is recognized by its
names: it is the latest one with one of the same names. The values of engines that ran within a run (an evaluator's) are
compared with such values only, so that a later evaluation replaces nothing of a training run.

A run from the beginning replaces nothing of its own session (another loader: its steps are added). In a later session
it replaces the runs whose steps it repeats.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


class _Run(NamedTuple):
    start: int
    session: int
    rows: Indices
    names: tuple[Indices, Indices]  # its own names, and those of engines within it
    first_step: int
    last_step: int


def current(rows: NDArray[Any], ids: NDArray[np.int32], names: int) -> NDArray[np.bool_]:
    """Mask of the rows that no later run replaces.

    Args:
        names: the number of names.
    """
    kept = np.ones(len(rows), bool)
    runs = _runs(rows, ids) if len(rows) else []
    if len(runs) < 2:
        return kept
    last_steps, sessions = (np.array([getattr(run, field) for run in runs]) for field in ("last_step", "session"))
    latest = np.full((2, names), -1)  # for each name, own or within: the latest run that has it
    parents: list[int] = []
    for number, run in enumerate(runs):
        parent = max(int(latest[nested][run.names[nested]].max(initial=-1)) for nested in (0, 1))
        if run.start == 0:
            parent = -1
            for earlier in np.flatnonzero((sessions < run.session) & (last_steps >= run.first_step)):
                if _alike(runs[earlier], run):
                    kept[runs[earlier].rows] = False
        parents.append(parent)
        while parent >= 0:
            iterations = rows["iteration"][runs[parent].rows]
            kept[runs[parent].rows[iterations > run.start]] = False
            _drop_repeated(rows, ids, kept, runs[parent].rows[iterations == run.start], run)
            parent = parents[parent]
        for nested in (0, 1):
            latest[nested][run.names[nested]] = number
    return kept


def _runs(rows: NDArray[Any], ids: NDArray[np.int32]) -> list[_Run]:
    _, first, which = np.unique(rows["run"], return_index=True, return_inverse=True)
    by_run = np.split(np.argsort(which, kind="stable"), np.cumsum(np.bincount(which))[:-1])
    runs = []
    for start, members in zip(first, by_run, strict=True):
        its = rows[members]
        names = [_names_of(its[its["nested"] == nested], ids) for nested in (0, 1)]
        steps = int(its["step"].min()), int(its["step"].max())
        runs.append(_Run(int(rows["start"][start]), int(rows["session"][start]), members, (names[0], names[1]), *steps))
    return runs


def _names_of(rows: NDArray[Any], ids: NDArray[np.int32]) -> Indices:
    lists, first = np.unique(rows["ids"], return_index=True)
    counts = rows["count"][first]
    return np.unique(np.concatenate([ids[:0], *(ids[at : at + n] for at, n in zip(lists, counts, strict=True))]))


def _alike(a: _Run, b: _Run) -> bool:
    return any(len(np.intersect1d(a.names[nested], b.names[nested])) for nested in (0, 1))


def _drop_repeated(
    rows: NDArray[Any], ids: NDArray[np.int32], kept: NDArray[np.bool_], old: Indices, run: _Run
) -> None:
    """Drop rows that were written between two iterations, as at the start of an epoch, and are written again."""
    again = run.rows[rows["iteration"][run.rows] == run.start] if len(old) else old
    for index in old:
        row = rows[index]
        for other in rows[again][rows["step"][again] == row["step"]]:
            old_names, names = (ids[its["ids"] : its["ids"] + its["count"]] for its in (row, other))
            if row["nested"] == other["nested"] and np.isin(old_names, names).all():
                kept[index] = False
