"""What an event tells of itself: the spike that a monitor has found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from ignite.engine import Engine


class Spike(NamedTuple):
    """``engine.state.spike`` while handlers of SPIKE_DETECTED and LEVEL_CHANGED run.

    Attributes:
        monitor: the monitor that has found it.
        name: what it publishes the value as, ``grad/norm`` for one.
        value: the value.
        threshold: what it was compared with; inf where nothing is judged by size yet.
        culprits: parameter -> its share of the excess, where single tensors are judged too; else empty.
    """

    monitor: Any
    name: str
    value: float
    threshold: float
    culprits: Mapping[str, float]


_ATTRIBUTE = "spike"
_NONE = object()


@contextmanager
def told(engine: Engine, spike: Spike) -> Iterator[None]:
    """Have ``engine.state.spike`` for a while."""
    before = getattr(engine.state, _ATTRIBUTE, _NONE)
    setattr(engine.state, _ATTRIBUTE, spike)
    try:
        yield
    finally:
        if before is _NONE:
            delattr(engine.state, _ATTRIBUTE)
        else:
            setattr(engine.state, _ATTRIBUTE, before)
