"""HealthyCheckpoint: a Checkpoint that saves only healthy states."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint

from ignite_monitor.checks import check_count
from ignite_monitor.detection.monitor import CountingMonitor
from ignite_monitor.events.source import EventSource
from ignite_monitor.gradient.handler import GradMonitor
from ignite_monitor.model.tensors import loss_in
from ignite_monitor.monitor.ranks import Group, Ranks
from ignite_monitor.rollback.snapshots import TrainingState, clone, finite

_logger = logging.getLogger(__name__)


class HealthyCheckpoint(Checkpoint):
    """Save a checkpoint only while training is healthy, so that a ruined run never replaces the last good files.

    A state is healthy if the monitors had no spike in the last ``quiet`` iterations of this ``run()``, and the loss in
    the train step's output is finite. All tensors in ``to_save`` that were finite at first have to be finite, too. In
    place of another state the newest healthy one is saved, from a copy in host memory, with a warning that says why.
    All ranks have to call it. Without :meth:`attach`, an engine with a GradMonitor is taken for the trainer, and known
    from the first call on; where another engine calls it, only the tensors decide.

    Args:
        to_save: name -> object with ``state_dict`` and ``load_state_dict``.
        save_handler: directory, or save handler.
        monitors: the monitors whose spikes count, [] for none; None for all on the trainer.
        quiet: number of iterations without a spike, at least 1.
        group: the ranks that save together, a ProcessGroup or DeviceMesh; None: those of the model's wrappers.
        kwargs: further arguments of ``Checkpoint``: ``n_saved``, ``score_function`` …

    Raises:
        TypeError: if an argument has the wrong type, or a monitor detects no spikes.
        ValueError: if ``quiet`` is less than 1, or ``to_save`` has lazy modules.
    """

    _trainer: Callable[[], Engine | None] | None = None  # a weak reference once attached

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
        for monitor in monitors or ():
            if not isinstance(monitor, CountingMonitor):
                raise TypeError(f"Argument monitors should hold monitors that detect spikes, but given {monitor!r}")
        self.monitors, self.quiet = monitors, check_count("quiet", quiet, least=1)
        super().__init__(to_save, save_handler, **kwargs)  # which makes the directory
        self._training = TrainingState(to_save)
        self._ranks = Ranks(group, *self._training.modules)
        self._finite = finite(self._training.state())
        self._counts: dict[int, dict[str, Any]] = {}  # numbers of spikes by prefix after each of the last iterations
        self._healthy = 0  # iteration of the newest healthy state, 0 if none is known
        self._copy: dict[str, Any] = {}  # this state, unless it is in a file

    def attach(self, engine: Engine, event: Any = Events.EPOCH_COMPLETED) -> None:
        """Save at an event of the trainer, and know of the spikes of its run.

        Args:
            engine: the engine that trains.
            event: the event, filtered or not; None if an evaluator calls the checkpoint.
        """
        if self._trainer is None or self._trainer() is not engine:
            self._trainer, self._healthy = weakref.ref(engine), 0
            engine.add_event_handler(Events.STARTED | Events.ITERATION_COMPLETED, self._observe)
        if event is not None:
            engine.add_event_handler(event, self)

    def _observe(self, engine: Engine) -> None:
        iteration = engine.state.iteration
        if engine.last_event_name == Events.STARTED:
            self._counts.clear()
            self._healthy, self._copy = 0, {}
        self._count_spikes(engine)
        is_old = iteration % self.quiet == 0 and iteration - self._healthy > iteration / 10
        if is_old and self.score_function is None and not self._problem(engine):
            self._healthy, self._copy = iteration, clone(super()._setup_checkpoint(), on_host=True)

    def _count_spikes(self, engine: Engine) -> None:
        monitors = getattr(EventSource.on(engine), "monitors", []) if self.monitors is None else self.monitors
        counts = {it.prefix: it.counts()[0] for it in monitors if isinstance(it, CountingMonitor)}
        now = engine.state.iteration
        self._counts = {at: self._counts[at] for at in self._counts if now - self.quiet <= at < now} | {now: counts}

    def _setup_checkpoint(self) -> dict[str, Any]:
        return self._copy or super()._setup_checkpoint()

    def __call__(self, engine: Engine, *args: Any, **kwargs: Any) -> None:
        if self._trainer is None:
            self._trainer = lambda: None
            if any(isinstance(monitor, GradMonitor) for monitor in getattr(EventSource.on(engine), "monitors", [])):
                self.attach(engine, None)
            else:
                _logger.warning("HealthyCheckpoint knows no trainer, and no spikes: call attach(trainer, event)")
        trainer = self._trainer()
        if trainer is not None:  # it may call before _observe()
            self._count_spikes(trainer)
        state, event = (trainer or engine).state, engine.last_event_name
        iteration = state.iteration
        if problem := self._problem(trainer):
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

    def _problem(self, trainer: Engine | None) -> str:
        """Return why training is not healthy, on any rank; synchronizes with the device."""
        counts = [*self._counts.values()] or [{}]
        first, last = counts[0], counts[-1]
        spikes = [prefix for prefix, count in last.items() if float(count) != float(first.get(prefix, 0.0))]
        problems = [f"{prefix} had a spike in the last {self.quiet} iterations" for prefix in spikes]
        loss = None if trainer is None else loss_in(trainer.state.output)
        if loss is not None and not math.isfinite(loss):
            problems.append(f"the loss is {float(loss)}")
        tensors = {} if problems else finite(self._training.state())
        ruined = [place for place in tensors if not tensors[place] and self._finite.get(place, True)]
        problems += [f"{'.'.join(map(str, place))} is not finite" for place in ruined]
        self._ranks.resolve()
        is_any = self._ranks.any(torch.tensor(bool(problems), device=idist.device()))
        return (problems or ["another rank is not healthy"])[0] if is_any.item() else ""
