"""MonitorEvents, and the spike that its handlers find in the engine's state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple

from ignite.engine import Engine
from ignite.engine.events import EventEnum


class MonitorEvents(EventEnum):
    """Events inside a train step, fired on the user's engine by the monitors attached to it.

    Handlers and filters use them like Ignite's own events; filters count iterations. They fire in monitored iterations;
    if the user's handlers listen to them, in every iteration.

    - GRADIENTS_READY : a backward that reached a monitored model has ended, and its gradients are reduced.
    - SPIKE_DETECTED : a value exceeded its threshold. ``engine.state.spike`` describes it.
    - THRESHOLD_RESET : several consecutive spikes reset a threshold; ``engine.state.spike`` is the last one.
    - DRIFT_DETECTED : a value drifts from its trend.
    - ROLLED_BACK : an earlier state was restored; fires before other handlers of ITERATION_COMPLETED.
    - OPTIMIZER_STEP_STARTED : an optimizer of a monitored model starts its step; after the first call of a closure.
    - OPTIMIZER_STEP_COMPLETED : the step has returned.
    - TRAIN_STEP_COMPLETED : the train step has returned, and monitors publish; ITERATION_COMPLETED is next.
    """

    GRADIENTS_READY = "gradients_ready"
    SPIKE_DETECTED = "spike_detected"
    THRESHOLD_RESET = "threshold_reset"
    DRIFT_DETECTED = "drift_detected"
    ROLLED_BACK = "rolled_back"
    OPTIMIZER_STEP_STARTED = "optimizer_step_started"
    OPTIMIZER_STEP_COMPLETED = "optimizer_step_completed"
    TRAIN_STEP_COMPLETED = "train_step_completed"


class Phase(Enum):
    """Phases of an event in which monitors are called, after those that listen to the event itself.

    - STEP_DECIDED : of OPTIMIZER_STEP_STARTED: gradients are scaled; not called for a step that is known to be skipped.
    - VALUES_PUBLISHED : of TRAIN_STEP_COMPLETED: for monitors that read what others publish.
    - SIGNALS_PUBLISHED : of TRAIN_STEP_COMPLETED: for handlers that act on what all others have published.
    """

    STEP_DECIDED = "step_decided"
    VALUES_PUBLISHED = "values_published"
    SIGNALS_PUBLISHED = "signals_published"


PHASES = {  # by name of the event
    "OPTIMIZER_STEP_STARTED": (Phase.STEP_DECIDED,),
    "TRAIN_STEP_COMPLETED": (Phase.VALUES_PUBLISHED, Phase.SIGNALS_PUBLISHED),
}


def register_events(engine: Engine) -> None:
    """Register :class:`MonitorEvents` on an engine, once."""
    if not engine.has_registered_events(MonitorEvents.TRAIN_STEP_COMPLETED):
        engine.register_events(*MonitorEvents, event_to_attr=dict.fromkeys(MonitorEvents, "iteration"))


class NonFiniteSource(NamedTuple):
    """Source of the first non-finite value.

    Attributes:
        name: name of a module, ``_root_`` for the whole model; else empty.
        kind: ``"forward"``: the module's inputs are finite, its output is not. ``"backward"``: an operation of its
            forward turns a finite gradient into a non-finite one. ``"input"``: the model's inputs are not finite.
            ``"loss"``: the model's outputs are finite, the gradient that they receive is not.
        text: the same as a sentence.
    """

    name: str
    kind: str
    text: str


class Spike(NamedTuple):
    """``engine.state.spike`` while handlers of SPIKE_DETECTED and THRESHOLD_RESET run.

    Attributes:
        monitor: the monitor that has detected the spike.
        name: name of the value: ``grad/norm``, for example.
        value: the value.
        threshold: its threshold; inf as long as there is none.
        culprits: parameter -> share of the excess, where single tensors have thresholds too; else empty.
        source: source of a non-finite value, as far as a ``GradMonitor`` has located it; else None.
    """

    monitor: Any
    name: str
    value: float
    threshold: float
    culprits: Mapping[str, float]
    source: NonFiniteSource | None = None


@contextmanager
def exposed_spike(engine: Engine, spike: Spike) -> Iterator[None]:
    """Set ``engine.state.spike`` for the duration of a context."""
    attributes = vars(engine.state)
    before = {"spike": attributes["spike"]} if "spike" in attributes else {}
    attributes["spike"] = spike
    try:
        yield
    finally:
        attributes.pop("spike", None)
        attributes.update(before)
