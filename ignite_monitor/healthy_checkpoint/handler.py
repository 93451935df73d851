"""HealthyCheckpoint: a Checkpoint that saves only while training is healthy."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.handlers.checkpoint import BaseSaveHandler, Checkpoint
from torch import Tensor

from ignite_monitor.checks import check_count
from ignite_monitor.events.source import EventSource
from ignite_monitor.monitor.base import Monitor
from ignite_monitor.monitor.ranks import max_over_ranks
from ignite_monitor.rollback.parts import TrainingState


class HealthyCheckpoint(Checkpoint):
    """Save a checkpoint only while training is healthy, so that a ruined run never replaces the last good files.

    A checkpoint is saved if the last ``quiet`` iterations had no spike, the train step's output is finite if it is one
    number, and all tensors in ``to_save`` are finite, except those that are not from the beginning, attention masks for
    instance. Otherwise a warning gives the reason, and the checkpoint is saved after the first healthy iteration. An
    overflow that a GradScaler handles is no spike.

    Call it on all ranks: they save together. Host and device are synchronized only while a checkpoint is due.

    Args:
        to_save: name -> object with a ``state_dict``, as for Ignite's ``Checkpoint``.
        save_handler: directory, or save handler, as for Ignite's ``Checkpoint``.
        monitors: the monitors whose spikes count; None for all on the engine.
        quiet: number of iterations without a spike, at least 1.
        checkpoint_arguments: further arguments of Ignite's ``Checkpoint``: ``n_saved``, ``score_function`` …

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument has a value that is not allowed, or a monitor in ``monitors`` detects no spikes.

    Examples:
        .. code-block:: python

            checkpoint = HealthyCheckpoint({"model": model, "optimizer": optimizer}, "checkpoints", n_saved=2)
            trainer.add_event_handler(Events.ITERATION_COMPLETED(every=1000), checkpoint)
    """

    def __init__(
        self,
        to_save: Mapping[str, Any],
        save_handler: str | Path | Callable[..., Any] | BaseSaveHandler,
        *,
        monitors: Iterable[Monitor] | None = None,
        quiet: int = 20,
        **checkpoint_arguments: Any,
    ) -> None:
        super().__init__(to_save, save_handler, **checkpoint_arguments)
        self.monitors = None if monitors is None else list(monitors)
        for monitor in self.monitors or ():
            if not isinstance(monitor, Monitor):
                raise TypeError(f"Argument monitors should be a list of monitors, but given {type(monitor)}")
            if monitor.counts() is None:
                raise ValueError(f"Argument monitors should hold monitors that detect spikes, but given {monitor!r}")
        self.quiet = check_count("quiet", quiet, least=1)
        self.logger = logging.getLogger(f"{__name__}.{type(self).__name__}")
        self._state = TrainingState(to_save)
        self._state.exempt_nonfinite()
        self._spike_counts: deque[dict[str, Tensor]] = deque(maxlen=self.quiet)  # as the last iterations started
        self._watched: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._due: Any = None  # the event of a checkpoint that waits for a healthy iteration

    def __call__(self, engine: Engine, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint now, or after the first healthy iteration."""
        engines = (monitor._attached_to() for monitor in self._monitors(engine))
        trainers = {trainer for trainer in engines if trainer is not None}
        for trainer in trainers - set(self._watched):
            self._watched.add(trainer)
            trainer.add_event_handler(Events.ITERATION_STARTED, self._on_iteration_started)
        problem = self._problem(engine)
        if not problem:
            self._save(engine, *args, **kwargs)
        elif self._due is None:
            later = "; it is saved after the first healthy iteration" if engine in trainers else ""
            self.logger.warning(
                "HealthyCheckpoint: iteration %d: no checkpoint is saved, since %s%s",
                *(engine.state.iteration, problem, later),
            )
            if engine in trainers:
                self._due = engine.last_event_name
                engine.add_event_handler(Events.ITERATION_COMPLETED, self._on_iteration_completed)

    def _on_iteration_started(self, engine: Engine) -> None:
        self._spike_counts.append(self._counts(engine))

    def _on_iteration_completed(self, engine: Engine) -> None:
        if self._due is not None and not self._problem(engine):
            engine.last_event_name = self._due  # for global_step_transform
            self._save(engine)

    def _save(self, engine: Engine, *args: Any, **kwargs: Any) -> None:
        if self._due is not None:
            self._due = None
            engine.remove_event_handler(self._on_iteration_completed, Events.ITERATION_COMPLETED)
        super().__call__(engine, *args, **kwargs)

    def _problem(self, engine: Engine) -> str:
        """Return why training is not healthy, the same on all ranks if it is; synchronizes with the device."""
        problem = self._own_problem(engine)
        on_any = max_over_ranks(torch.tensor([float(bool(problem))], device=idist.device()))
        return problem or ("another rank is not healthy" if on_any.item() else "")

    def _own_problem(self, engine: Engine) -> str:
        earlier = self._spike_counts[0] if len(self._spike_counts) == self.quiet else {}
        for prefix, count in self._counts(engine).items():
            if float(count) != float(earlier.get(prefix, 0.0)):
                return f"{prefix} had a spike in the last {self.quiet} iterations"
        output: Any = engine.state.output
        is_number = isinstance(output, Real) or (isinstance(output, Tensor) and output.numel() == 1)
        if is_number and not torch.as_tensor(output).isfinite().all():
            return f"the output of the train step is {output}"
        paths = self._state.nonfinite()
        return f"{paths[0]} is not finite" if paths else ""

    def _counts(self, engine: Engine) -> dict[str, Tensor]:
        counts = ((monitor.prefix, monitor.counts()) for monitor in self._monitors(engine))
        return {prefix: count[0] for prefix, count in counts if count is not None}

    def _monitors(self, engine: Engine) -> list[Monitor]:
        if self.monitors is not None:
            return self.monitors
        source = EventSource.on(engine)
        monitors = [] if source is None else source.monitors
        return [monitor for monitor in monitors if monitor.counts() is not None]
