"""MonitorEvents, and the spike that its handlers find in the engine's state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from ignite.engine import Engine
from ignite.engine.events import EventEnum


class MonitorEvents(EventEnum):
    """Events inside a train step, fired on the user's engine by the monitors attached to it.

    Handlers and filters use them like Ignite's own events; filters count iterations. The first monitor attached to an
    engine registers them. They fire in monitored iterations; with handlers of the user's, in every iteration.

    - GRADIENTS_READY : a backward that reached parameters of a monitored model has ended, and its gradients are
      reduced. Once per backward, before ``backward()`` returns. Not under ``no_sync()``, nor where the train step
      calls ``finalize_backward()`` itself. Under ``checkpoint(use_reentrant=True)`` once more for every checkpointed
      segment, the last time with the whole gradient.
    - SPIKE_DETECTED : a value, for example a gradient norm, exceeded its threshold. ``engine.state.spike`` has the
      monitor, name, value, threshold, culprits and source while the handlers run.
    - THRESHOLD_RESET : after several consecutive spikes the threshold rule was reset; ``engine.state.spike`` has the
      last one. Fires before TRAIN_STEP_COMPLETED. On an accelerator a handler synchronizes host and device.
    - ROLLED_BACK : an earlier state of the training was restored; fires before other handlers of ITERATION_COMPLETED.
    - OPTIMIZER_STEP_STARTED : an optimizer that holds parameters of a monitored model starts its step; if the step is
      given a closure, when that has returned for the first time.
    - OPTIMIZER_STEP_COMPLETED : the step has returned.
    - TRAIN_STEP_COMPLETED : the train step has returned, ITERATION_COMPLETED is next; monitors publish their values.
    """

    GRADIENTS_READY = "gradients_ready"
    """triggered when a backward has ended and the gradients are reduced."""
    SPIKE_DETECTED = "spike_detected"
    """triggered when a value exceeds its threshold."""
    THRESHOLD_RESET = "threshold_reset"
    """triggered when a threshold rule is reset."""
    ROLLED_BACK = "rolled_back"
    """triggered when an earlier state of the training was restored."""
    OPTIMIZER_STEP_STARTED = "optimizer_step_started"
    """triggered before an optimizer's step."""
    OPTIMIZER_STEP_COMPLETED = "optimizer_step_completed"
    """triggered after an optimizer's step."""
    TRAIN_STEP_COMPLETED = "train_step_completed"
    """triggered when the train step has returned."""


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
            ``"loss"``: the model's output is finite, the loss is not.
        text: the same as a sentence.
    """

    name: str
    kind: str
    text: str


class Spike(NamedTuple):
    """``engine.state.spike`` while handlers of SPIKE_DETECTED and THRESHOLD_RESET run.

    Attributes:
        monitor: the monitor that has detected the spike.
        name: name of the value: ``grad/norm``, for example, or ``grad/loss`` where only the loss is a spike.
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


_NONE = object()


@contextmanager
def exposed_spike(engine: Engine, spike: Spike) -> Iterator[None]:
    """Set ``engine.state.spike`` for the duration of a context."""
    state: Any = engine.state
    before = getattr(state, "spike", _NONE)
    state.spike = spike
    try:
        yield
    finally:
        if before is _NONE:
            del state.spike
        else:
            state.spike = before
