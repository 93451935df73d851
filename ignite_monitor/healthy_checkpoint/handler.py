"""HealthyCheckpoint: a Checkpoint that saves only healthy states."""

from __future__ import annotations

import logging
import math
import weakref
from collections import deque
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint
from torch import Tensor

from ignite_monitor.checks import check_count
from ignite_monitor.detection.monitor import CountingMonitor
from ignite_monitor.events.source import EventSource
from ignite_monitor.model.tensors import loss_in
from ignite_monitor.monitor.ranks import Group, Ranks
from ignite_monitor.rollback.snapshots import TrainingState, clone, finite

_logger = logging.getLogger(__name__)


class HealthyCheckpoint(Checkpoint):
    """Save a checkpoint only while training is healthy, so that a ruined run never replaces the last good files.

    A state is healthy if the trainer's monitors had no spike in the last ``quiet`` iterations of this ``run()``, the
    loss in the train step's output is finite, and so are all tensors in ``to_save`` that were finite at first. In place
    of another state the newest healthy one is saved, from a copy in host memory, with a warning that says why. All
    ranks have to call it. Without :meth:`attach`, the engine that calls it is the trainer if it has monitors that
    detect spikes; else only the tensors decide.

    Args:
        to_save: name -> object with ``state_dict`` and ``load_state_dict``.
        save_handler: directory, or save handler.
        quiet: number of iterations without a spike, at least 1.
        group: the ranks that save together, a ProcessGroup or DeviceMesh; None: those of the model's wrappers.
        kwargs: further arguments of ``Checkpoint``: ``n_saved``, ``score_function`` …

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if ``quiet`` is less than 1, or ``to_save`` has lazy modules.
    """

    _engine: weakref.ref[Engine] | None = None  # that trains
    _has_warned = False

    def __init__(self, to_save: Any, save_handler: Any, *, quiet: int = 20, group: Group = None, **kwargs: Any) -> None:
        self.quiet = check_count("quiet", quiet, least=1)
        super().__init__(to_save, save_handler, **kwargs)  # which makes the directory
        self._training = TrainingState(to_save)
        self._ranks = Ranks(group, *self._training.modules)
        self._finite = finite(self._training.state())
        self._counts: deque[dict[str, Tensor]] = deque(maxlen=quiet)  # spikes by prefix before each of these iterations
        self._healthy = 0  # iteration of the newest healthy state, 0 if none is known
        self._copy: dict[str, Any] = {}  # this state, unless it is in a file

    def attach(self, engine: Engine, event: Any = Events.EPOCH_COMPLETED) -> None:
        """Save at an event of the trainer, and know of the spikes of its run.

        Args:
            engine: the engine that trains.
            event: the event, filtered or not; None if an evaluator calls the checkpoint.
        """
        if engine is not self._trainer:
            self._engine = weakref.ref(engine)
            engine.add_event_handler(Events.STARTED, self._start_run)
            engine.add_event_handler(Events.ITERATION_STARTED, self._count_spikes)
            engine.add_event_handler(Events.ITERATION_COMPLETED, self._keep_copy)
        if event is not None:
            engine.add_event_handler(event, self)

    @property
    def _trainer(self) -> Engine | None:
        return None if self._engine is None else self._engine()

    def _start_run(self) -> None:
        self._counts.clear()
        self._healthy, self._copy = 0, {}

    def _count_spikes(self, engine: Engine) -> None:
        self._counts.append(_spike_counts(engine))

    def _keep_copy(self, engine: Engine) -> None:
        """Copy a healthy state if the newest one is older than a tenth of the run: copying everything is slow."""
        iteration = engine.state.iteration
        is_due = iteration % self.quiet == 0 and iteration - self._healthy > iteration / 10
        if is_due and self.score_function is None and not self._problem():
            self._healthy, self._copy = iteration, clone(super()._setup_checkpoint(), on_host=True)

    def _setup_checkpoint(self) -> dict[str, Any]:
        return self._copy or super()._setup_checkpoint()

    def __call__(self, engine: Engine, *args: Any, **kwargs: Any) -> None:
        if self._trainer is None and _spike_counts(engine):
            self.attach(engine, None)  # its spikes are known from now on
        elif self._trainer is None and not self._has_warned:
            self._has_warned = True
            _logger.warning("HealthyCheckpoint knows no trainer, and no spikes: call attach(trainer, event)")
        state, event = (self._trainer or engine).state, engine.last_event_name
        iteration = state.iteration
        if problem := self._problem():
            which = f"that of iteration {self._healthy}" if self._healthy else "not known"
            text = "HealthyCheckpoint: iteration %d: %s; the newest healthy state is %s"
            _logger.warning(text, iteration, problem, which)
            if not self._copy:
                return
        else:
            self._healthy, self._copy = iteration, {}
        state.iteration = self._healthy  # by which Ignite names the file
        try:
            super().__call__(engine, *args, **kwargs)
        finally:
            state.iteration, engine.last_event_name, self._copy = iteration, event, {}

    def _problem(self) -> str:
        """Return why training is not healthy, on any rank; synchronizes with the device."""
        problems = []
        if self._trainer is not None:
            counts, loss = _spike_counts(self._trainer), loss_in(self._trainer.state.output)
            first = self._counts[0] if self._counts else counts
            spikes = [prefix for prefix in counts if float(counts[prefix]) > float(first.get(prefix, 0.0))]
            problems = [f"{prefix} had a spike in the last {self.quiet} iterations" for prefix in spikes]
            if loss is not None and not math.isfinite(loss):
                problems.append(f"the loss is {float(loss)}")
        tensors = {} if problems else finite(self._training.state())
        ruined = [place for place in tensors if not tensors[place] and self._finite.get(place, True)]
        problems += [f"{'.'.join(map(str, place))} is not finite" for place in ruined]
        self._ranks.resolve()
        is_any = self._ranks.any(torch.tensor(bool(problems), device=idist.device()))
        return (problems or ["another rank is not healthy"])[0] if is_any.item() else ""


def _spike_counts(engine: Engine) -> dict[str, Tensor]:
    """Numbers of spikes so far, by prefix of the engine's monitors."""
    monitors = getattr(EventSource.on(engine), "monitors", [])
    return {monitor.prefix: monitor.counts()[0] for monitor in monitors if isinstance(monitor, CountingMonitor)}
