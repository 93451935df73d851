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
from ignite_monitor.events.source import EventSource
from ignite_monitor.model.tensors import loss_in
from ignite_monitor.monitor.base import Monitor
from ignite_monitor.monitor.ranks import all_take_part, max_over_ranks
from ignite_monitor.rollback.snapshots import TrainingState, finite


class HealthyCheckpoint(Checkpoint):
    """Save a checkpoint only while training is healthy, so that a ruined run never replaces the last good files.

    A checkpoint is saved if the last ``quiet`` iterations had no spike, the loss in the train step's output is finite,
    and so are all tensors in ``to_save`` that were finite at the beginning. Otherwise a warning gives the reason, and
    the checkpoint is saved after the first healthy iteration. All ranks have to call it; they save together.

    Args:
        to_save: name -> object with a ``state_dict``, as for Ignite's ``Checkpoint``.
        save_handler: directory, or save handler.
        monitors: the monitors whose spikes count; None for all on the engine.
        quiet: number of iterations without a spike, at least 1.
        kwargs: further arguments of ``Checkpoint``: ``n_saved``, ``score_function`` …

    Raises:
        TypeError: if an argument is of another type, or a monitor detects no spikes.
        ValueError: if ``quiet`` is less than 1.
    """

    def __init__(
        self, to_save: Any, save_handler: Any, *, monitors: list[Monitor] | None = None, quiet: int = 20, **kwargs: Any
    ) -> None:
        super().__init__(to_save, save_handler, **kwargs)
        self.greater_or_equal |= self.score_function is None  # a postponed file may have the name of the next one
        for monitor in monitors or ():
            if not isinstance(monitor, Monitor) or monitor.counts() is None:
                raise TypeError(f"Argument monitors should hold monitors that detect spikes, but given {monitor!r}")
        self.monitors, self.quiet = monitors, check_count("quiet", quiet, least=1)
        self._training = TrainingState(to_save)
        self._finite = finite(self._training.state())
        self._earlier: deque[dict[str, Any]] = deque(maxlen=quiet)  # spike counts as the last iterations started
        self._due: Any = None  # event of a checkpoint that is postponed to the next healthy iteration

    def __call__(self, engine: Engine, *args: Any, **kwargs: Any) -> None:
        is_trainer = self._spikes(engine) or self.score_function is None  # an evaluator's score is not known later
        trainer = self.monitors[0]._attached_to() if self.monitors else engine if is_trainer else None
        if trainer is not None and not trainer.has_event_handler(self._on_iteration_completed):
            trainer.add_event_handler(Events.ITERATION_STARTED, lambda e: self._earlier.append(self._spikes(e)))
            trainer.add_event_handler(Events.ITERATION_COMPLETED, self._on_iteration_completed)
        if not (problem := self._problem(engine)):
            self._due = None
            super().__call__(engine, *args, **kwargs)
        elif self._due is None:
            text = "HealthyCheckpoint: iteration %d: no checkpoint is saved, since %s"
            logging.getLogger(__name__).warning(text, (trainer or engine).state.iteration, problem)
            self._due = engine.last_event_name if engine is trainer else None

    def _on_iteration_completed(self, engine: Engine) -> None:
        if self._due is not None and not self._problem(engine):
            engine.last_event_name, self._due = self._due, None  # for global_step_transform
            super().__call__(engine)

    def _problem(self, engine: Engine) -> str:
        """Return why training is not healthy, on any rank; synchronizes with the device."""
        earlier, counts = self._earlier[0] if len(self._earlier) == self.quiet else {}, self._spikes(engine)
        spikes = [prefix for prefix in counts if float(counts[prefix]) != float(earlier.get(prefix, 0.0))]
        problems = [f"{prefix} had a spike in the last {self.quiet} iterations" for prefix in spikes]
        if (loss := loss_in(engine.state.output)) is not None and not math.isfinite(loss):
            problems.append(f"the loss is {float(loss)}")
        now = {} if problems else finite(self._training.state())
        problems += [f"{path} is not finite" for path in now if not now[path] and self._finite.get(path, True)]
        is_any = torch.tensor([float(bool(problems))], device=idist.device())
        is_any = max_over_ranks(is_any) if all(map(all_take_part, self._training.modules)) else is_any
        return (problems or ["another rank is not healthy"])[0] if is_any.item() else ""

    def _spikes(self, engine: Engine) -> dict[str, Any]:
        monitors = self.monitors or getattr(EventSource.on(engine), "monitors", [])
        return {item.prefix: counts[0] for item in monitors if (counts := item.counts()) is not None}
