"""Finding: one thing that happened in a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

SEVERITIES = ("problem", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One thing that happened in a run.

    Attributes:
        kind: what kind of thing it is, a word for machines.
        severity: ``problem`` (the run is damaged), ``warning`` (it may be) or ``note`` (good to know).
        text: what happened, in words.
        metrics: the names of the metrics that tell it.
        iterations: where it happened.
        values: the numbers in the words.
    """

    kind: str
    severity: str
    text: str
    metrics: tuple[str, ...] = ()
    iterations: tuple[int, ...] = ()
    values: dict[str, float] = field(default_factory=dict)


def steps(of: Iterable[int]) -> tuple[int, ...]:
    """Steps of an array as Python's own numbers."""
    return tuple(int(step) for step in of)
