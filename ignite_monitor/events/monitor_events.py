"""MonitorEvents: what happens inside a train step, and what an event tells of itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from ignite.engine import Engine
from ignite.engine.events import EventEnum

from ignite_monitor.model._torch import sees_backward


class MonitorEvents(EventEnum):
    """What happens inside a train step, fired on the user's engine by the monitors attached to it.

    Handlers, filters and loggers use them like Ignite's own events; a filter counts iterations. They are registered
    on an engine by the first monitor attached to it, and fire in monitored iterations; where handlers of the user's
    own listen to them, in every iteration.

    - GRADIENTS_READY : a backward that reached the parameters of a monitored model has ended, with everything
      reduced (a backward under ``no_sync()`` of DistributedDataParallel has not been, and fires nothing). Once per
      backward, before ``backward()`` returns. Under ``checkpoint(use_reentrant=True)`` once more for every
      checkpointed segment, the last time with the whole gradient.
    - SPIKE_DETECTED : a value exceeded its threshold, a gradient norm for one. ``engine.state.spike`` tells of it while
      the handlers run: monitor, name, value, threshold, culprits, source.
    - THRESHOLD_RESET : so many spikes came in a row that the threshold rule starts afresh from the last one, of which
      ``engine.state.spike`` tells; fired before the train step's end is. On an accelerator a listener waits for it.
    - ROLLED_BACK : the training has gone back to an earlier state; before other handlers of ITERATION_COMPLETED run.
    - OPTIMIZER_STEP_STARTED : an optimizer that holds parameters of a monitored model is about to make its step; where
      the step is given a closure, when that has returned for the first time.
    - OPTIMIZER_STEP_COMPLETED : it has returned from it.
    - TRAIN_STEP_COMPLETED : the train step has returned, ITERATION_COMPLETED is next; monitors publish here.
    """

    GRADIENTS_READY = "gradients_ready"
    """triggered when a backward has ended and the gradients are reduced."""
    SPIKE_DETECTED = "spike_detected"
    """triggered when a value exceeds its threshold."""
    THRESHOLD_RESET = "threshold_reset"
    """triggered when a threshold rule starts afresh."""
    ROLLED_BACK = "rolled_back"
    """triggered when the training has gone back to an earlier state."""
    OPTIMIZER_STEP_STARTED = "optimizer_step_started"
    """triggered before an optimizer's step."""
    OPTIMIZER_STEP_COMPLETED = "optimizer_step_completed"
    """triggered after an optimizer's step."""
    TRAIN_STEP_COMPLETED = "train_step_completed"
    """triggered when the train step has returned."""


def register_events(engine: Engine) -> None:
    """Make an engine know :class:`MonitorEvents`."""
    if not engine.has_registered_events(MonitorEvents.TRAIN_STEP_COMPLETED):
        events = [event for event in MonitorEvents if event != MonitorEvents.GRADIENTS_READY or sees_backward()]
        engine.register_events(*events, event_to_attr=dict.fromkeys(events, "iteration"))


class NonFiniteSource(NamedTuple):
    """What has produced the first number that is not finite.

    Attributes:
        name: a module's name, ``_root_`` for the whole model; where ``kind`` is gradient, that of a parameter; else
            empty.
        kind: ``"forward"``: the module's inputs are finite, and its output is not. ``"backward"``: the gradient of its
            output is finite, and what it makes of that is not. ``"input"``: what the model is called with is not
            finite. ``"loss"``: the model is finite, and what is computed of its output is not. ``"gradient"``: no more
            is known than the first parameter, in backward's order, whose gradient is not finite.
        text: the same as a sentence.
    """

    name: str
    kind: str
    text: str


class Spike(NamedTuple):
    """``engine.state.spike`` while handlers of SPIKE_DETECTED and THRESHOLD_RESET run.

    Attributes:
        monitor: the monitor that has found it.
        name: what has been judged: ``grad/norm`` for one, ``grad/loss`` where the loss alone makes the step a spike.
        value: the value.
        threshold: what it was compared with; inf where nothing is judged by size yet.
        culprits: parameter -> its share of the excess, where single tensors are judged too; else empty.
        source: where a value that is not finite comes from, as far as a ``GradMonitor`` has found it; else None.
    """

    monitor: Any
    name: str
    value: float
    threshold: float
    culprits: Mapping[str, float]
    source: NonFiniteSource | None = None


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
