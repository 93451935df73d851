"""StepStatsHandler: duration, throughput, memory, learning rates and parameter norm of train steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any

import torch
from ignite.engine import Engine, Events
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.checks import check_function
from ignite_monitor.events.gradient_tracker import OptimizerStep
from ignite_monitor.events.monitor_events import MonitorEvents, Phase
from ignite_monitor.keys import STEP_STATS
from ignite_monitor.model.devices import device_of, move_like
from ignite_monitor.model.dtensor import any_dtensor, reshard
from ignite_monitor.model.modes import has_local_data
from ignite_monitor.model.names import held_by, learning_rates, parameters_of, tags
from ignite_monitor.model.norms import total_norm
from ignite_monitor.model.sampling import is_measurable
from ignite_monitor.model.tensors import count_items, floating_tensors
from ignite_monitor.monitor.arguments import check_optimizer
from ignite_monitor.monitor.base import Handlers, Monitor
from ignite_monitor.step_stats.measures import StepClock, resident_memory

_MOST_TENSORS = 4  # of a batch, whose RMS is published


class StepStatsHandler(Monitor, schema=STEP_STATS):
    """Duration, throughput, memory, learning rates and parameter norm of train steps.

    {keys}

    On CUDA the duration is measured by events on the device, so it and the values derived from it are published when a
    logger reads them. On devices other than CPU and CUDA they are not reported.

    Args:
        model: the model, as the train step uses it (wrapped, if it is wrapped).
        optimizer: the optimizer whose learning rates to publish.
        items: function of the batch that returns its number of items, a number or a tensor on the CPU; None for the
            length of the batch's first tensor.
        prefix: prefix of the keys.

    Raises:
        TypeError: if an argument has the wrong type.

    Examples:
        .. code-block:: python

            stats = StepStatsHandler(model, optimizer, items=lambda batch: batch["input_ids"].numel())
            stats.attach(trainer, Events.ITERATION_STARTED(every=10))
            stats.log_to(tensorboard_logger, trainer)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        items: Callable[[Any], float] | None = None,
        prefix: str = "step",
    ) -> None:
        super().__init__(model, prefix)
        check_optimizer(optimizer)
        check_function("items", items, "the batch")
        self.optimizer = optimizer
        self.items = items
        self.measures_time = True
        self._forget_data()
        self.reset_run_state()

    def reset_run_state(self) -> None:
        self._clock: StepClock | None = None
        self._items: float | None = None
        self._values: dict[str, float | Tensor] = {}  # values that are known before the train step ends
        self._has_stepped = False

    def engine_handlers(self) -> list[tuple[Events, Callable[..., Any]]]:
        return [
            (Events.STARTED, self._forget_data),
            (Events.GET_BATCH_STARTED, self._on_get_batch_started),
            (Events.GET_BATCH_COMPLETED, self._on_get_batch_completed),
        ]

    def _forget_data(self, *_: Any) -> None:
        # When the engine last asked for a batch, before an iteration, and for how long it waited; NaN without one.
        self._asked_at = self._data_wait = math.nan

    def _on_get_batch_started(self, engine: Engine) -> None:
        self._asked_at = perf_counter()

    def _on_get_batch_completed(self, engine: Engine) -> None:
        self._data_wait = perf_counter() - self._asked_at  # also to start a loader anew

    def handlers(self) -> Handlers:
        return [
            (Phase.STEP_DECIDED, self._on_step_decided),
            (MonitorEvents.OPTIMIZER_STEP_COMPLETED, self._on_step_completed),
            (MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed),
        ]

    def before_train_step(self, engine: Engine) -> None:
        self.reset_run_state()
        with self._training_continues("unreadable_batch", "the batch can't be measured"):
            self._measure_batch(engine.state.batch)  # now, since the train step may change the batch

    def _measure_batch(self, batch: Any) -> None:
        items = count_items(batch) if self.items is None else self.items(batch)
        if isinstance(items, Tensor) and not items.is_cpu:  # reading it would wait for the device
            raise TypeError("items should return a number, or a tensor on the CPU")
        if items is not None:
            self._items = float(items)
        elif self.items is None:
            text = "the batch has no tensor, so items_per_s is not reported: give items, a function of it"
            self.report("unknown_items", text, severity="note")
        floating = [pair for pair in floating_tensors(batch) if has_local_data(pair[1]) and pair[1].numel()]
        places = tags(place or "0" for place, _ in floating[:_MOST_TENSORS])
        for place, (_, item) in zip(places, floating, strict=False):
            part = item.detach().reshape(-1)[: 2**20]
            self._values[f"batch_rms/{place}"] = total_norm([part]) / len(part) ** 0.5

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        device = device_of(self.model)
        self._clock = StepClock(device) if device.type in ("cpu", "cuda") else None
        return [] if self._clock is None else [self._clock]

    def _is_first(self, step: OptimizerStep) -> bool:
        return not self._has_stepped and not held_by(step.optimizer).isdisjoint(held_by(self.optimizer))

    def _on_step_decided(self, engine: Engine, step: OptimizerStep) -> None:
        gradients = [item.grad for item in parameters_of(self.optimizer) if item.grad is not None]
        # A skipped step uses no gradient.
        if self._is_first(step) and step.made is not False and gradients and not any_dtensor(gradients):
            norm = total_norm(gradients)
            norm = norm if step.loss_scale is None else norm / move_like(step.loss_scale, norm)
            # NaN, which is not reported, for a step that the device skips.
            self._values["gradient_norm"] = norm if step.made is True else torch.where(step.made, norm, math.nan)

    def _on_step_completed(self, engine: Engine, step: OptimizerStep) -> None:
        # Before the step handlers may still change the rates, and after it schedulers do.
        if self._is_first(step):
            self._put_rates()

    def _put_rates(self) -> None:
        self._has_stepped = True
        for i, rate in enumerate(learning_rates(self.optimizer)):
            if rate is not None:
                self._values[f"lr/group_{i}"] = rate.clone() if isinstance(rate, Tensor) else rate

    @torch.no_grad()
    def _on_train_step_completed(self, engine: Engine) -> None:
        reshard(self.model)
        if not self._has_stepped:
            self._put_rates()
        device = device_of(self.model)
        values = self._values
        values["data_wait_ms"] = 1e3 * self._data_wait
        if parameters := [parameter for parameter in self.model.parameters() if is_measurable(parameter)]:
            values["parameter_norm"] = total_norm(parameters)
        if device.type == "cuda":
            values["peak_memory_mb"] = torch.cuda.max_memory_allocated(device) / 2**20
            values["reserved_memory_mb"] = torch.cuda.memory_reserved(device) / 2**20
        if device.type == "cpu":
            values |= self._times()
            if (memory := resident_memory()) is not None:
                values["resident_memory_mb"] = memory
        self.publish(**values)

    def _times(self) -> dict[str, float]:
        seconds = None if self._clock is None else self._clock.seconds()
        if not seconds:
            return {}
        wait = self._data_wait
        values = {"time_ms": 1e3 * seconds, "data_wait_share": wait / (wait + seconds)}
        if self._items is not None and self._items >= 0:
            values["items_per_s"] = self._items / seconds
        return values

    def resolve_deferred(self, extra: list[list[float]]) -> dict[str, float]:
        return self._times()
