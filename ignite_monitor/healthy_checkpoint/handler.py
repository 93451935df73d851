"""HealthyCheckpoint: a Checkpoint that saves only while training is healthy."""

from __future__ import annotations

import logging
import math
from collections import deque
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint

from ignite_monitor.checks import check_count
from ignite_monitor.detection.monitor import CountingMonitor
from ignite_monitor.events.source import EventSource
from ignite_monitor.model.tensors import loss_in
from ignite_monitor.monitor.ranks import Group, Ranks
from ignite_monitor.rollback.snapshots import TrainingState, clone, finite

_LOGGER = logging.getLogger(__name__)
_TITLE = "HealthyCheckpoint: iteration %d:"


class HealthyCheckpoint(Checkpoint):
    """Save a checkpoint only while training is healthy, so that a ruined run never replaces the last good files.

    A checkpoint is saved if the last ``quiet`` iterations had no spike, the loss in the train step's output is finite,
    and so are all tensors in ``to_save`` that were finite at the beginning. Monitors that have failed are not asked.
    Otherwise a warning gives the reason, and the checkpoint is saved after the first healthy iteration, or, if the run
    ends before, the newest healthy state: of the last file, or until there is one, of a copy in host memory. All ranks
    have to call it; they save together.

    Args:
        to_save: name -> object with ``state_dict`` and ``load_state_dict``.
        save_handler: directory, or save handler.
        monitors: the monitors whose spikes count; None for all on the engine.
        quiet: number of iterations without a spike, at least 1.
        group: the ranks that save together, a ProcessGroup or DeviceMesh; None: those of the model's wrappers.
        kwargs: further arguments of ``Checkpoint``: ``n_saved``, ``score_function`` …

    Raises:
        TypeError: if an argument has the wrong type, or a monitor detects no spikes.
        ValueError: if ``quiet`` is less than 1, or ``to_save`` has lazy modules.
    """

    def __init__(
        self,
        to_save: Any,
        save_handler: Any,
        *,
        monitors: list[CountingMonitor] | None = None,
        quiet: int = 20,
        group: Group = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(to_save, save_handler, **kwargs)
        self.greater_or_equal |= self.score_function is None  # a postponed file may have the name of the next one
        for monitor in monitors or ():
            if not isinstance(monitor, CountingMonitor):
                raise TypeError(f"Argument monitors should hold monitors that detect spikes, but given {monitor!r}")
        self.monitors, self.quiet = monitors, check_count("quiet", quiet, least=1)
        self._training = TrainingState(to_save)
        self._ranks = Ranks(group, *self._training.modules)
        self._finite = finite(self._training.state())
        self._earlier: deque[dict[str, Any]] = deque(maxlen=quiet)  # spike counts as the last iterations started
        self._forget()

    def _forget(self) -> None:
        self._earlier.clear()
        self._last = 0  # iteration
        self._due: Any = None  # event of a postponed checkpoint
        self._healthy = 0  # iteration of the newest healthy state
        self._copy: dict[str, Any] = {}  # that state, as long as it has no file

    def _start_run(self, engine: Engine) -> None:
        self._due = None
        if engine.state.iteration != self._last:  # else the run continues
            self._forget()

    def attach(self, engine: Engine, event: Any = Events.EPOCH_COMPLETED) -> None:
        """Save at an event, and know of spikes from the run's start on; with ``add_event_handler`` from the first call.

        Args:
            engine: the engine that trains.
            event: the event, filtered or not.
        """
        is_first = not engine.has_event_handler(self._on_iteration_completed)
        if is_first:
            engine.add_event_handler(Events.STARTED, self._start_run)
            engine.add_event_handler(Events.ITERATION_STARTED, self._on_iteration_started)
            engine.add_event_handler(Events.ITERATION_COMPLETED, self._on_iteration_completed)
        if event is not None:
            engine.add_event_handler(event, self)
        if is_first:  # after the call at this event
            engine.add_event_handler(Events.COMPLETED, self._save_newest)

    def __call__(self, engine: Engine, *args: Any, **kwargs: Any) -> None:
        is_trainer = self._counting(engine) or self.score_function is None  # an evaluator's score is not known later
        trainer = self.monitors[0]._attached_to() if self.monitors else engine if is_trainer else None
        if trainer is not None:
            self.attach(trainer, None)
        iteration = (trainer or engine).state.iteration
        if not (problem := self._problem(engine)):
            self._due, self._healthy, self._copy = None, iteration, {}
            super().__call__(engine, *args, **kwargs)
        elif self._due is None:
            self._due = engine.last_event_name if engine is trainer else None
            _LOGGER.warning(f"{_TITLE} no checkpoint is saved, since %s", iteration, problem)

    def _setup_checkpoint(self) -> dict[str, Any]:
        return self._copy or super()._setup_checkpoint()

    def _on_iteration_started(self, engine: Engine) -> None:
        self._earlier.append(self._spikes(engine))

    def _on_iteration_completed(self, engine: Engine) -> None:
        self._last = iteration = engine.state.iteration
        has_file = self._healthy and not self._copy
        is_old = iteration % self.quiet == 0 and iteration - self._healthy >= iteration / 10 and not has_file
        if (self._due is None and not is_old) or self._problem(engine):
            return
        self._healthy, self._copy = iteration, {}
        if self._due is None:
            self._copy = clone(super()._setup_checkpoint(), on_host=True)
        else:
            self._save(engine)

    def _save_newest(self, engine: Engine) -> None:
        if self._due is None:
            return
        iteration = engine.state.iteration
        if problem := self._problem(engine):
            kept = f"that of iteration {self._healthy}" if self._healthy else "not known"
            text = f"{_TITLE} this state is not saved, since %s; the newest healthy state is %s"
            _LOGGER.warning(text, iteration, problem, kept)
        else:
            self._healthy, self._copy = iteration, {}
        if self._copy or not problem:
            self._save(engine)
        self._due = None

    def _save(self, engine: Engine) -> None:
        """Save as if this were the event and the iteration of the healthy state, by which Ignite names the file."""
        before = engine.last_event_name, engine.state.iteration
        engine.last_event_name, engine.state.iteration = self._due, self._healthy
        try:
            super().__call__(engine)
        finally:
            engine.last_event_name, engine.state.iteration = before
        self._due, self._copy = None, {}

    def _problem(self, engine: Engine) -> str:
        """Return why training is not healthy, on any rank; synchronizes with the device."""
        counts = self._spikes(engine)
        earlier = self._earlier[0] if self._earlier else counts
        spikes = [prefix for prefix in counts if float(counts[prefix]) != float(earlier.get(prefix, 0.0))]
        problems = [f"{prefix} had a spike in the last {self.quiet} iterations" for prefix in spikes]
        if (loss := loss_in(engine.state.output)) is not None and not math.isfinite(loss):
            problems.append(f"the loss is {float(loss)}")
        now = {} if problems else finite(self._training.state())
        problems += [f"{path} is not finite" for path in now if not now[path] and self._finite.get(path, True)]
        self._ranks.resolve()
        is_any = self._ranks.any(torch.tensor(bool(problems), device=idist.device()))
        return (problems or ["another rank is not healthy"])[0] if is_any.item() else ""

    def _counting(self, engine: Engine) -> list[CountingMonitor]:
        monitors = self.monitors or getattr(EventSource.on(engine), "monitors", [])
        return [monitor for monitor in monitors if isinstance(monitor, CountingMonitor)]

    def _spikes(self, engine: Engine) -> dict[str, Any]:
        return {item.prefix: item.counts()[0] for item in self._counting(engine) if not item._has_failed}
