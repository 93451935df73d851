"""GradientNoiseScaleHandler: the batch size beyond which a larger batch gains little."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from ignite.engine import Engine
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ignite_monitor.checks import check_count, check_function, check_real
from ignite_monitor.events.gradient_tracker import GradientsReady, OptimizerStep
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.keys import NOISE_SCALE
from ignite_monitor.model.devices import device_of, wide_dtype
from ignite_monitor.model.dtensor import any_dtensor
from ignite_monitor.model.names import parameters_of
from ignite_monitor.model.tensors import count_items
from ignite_monitor.monitor.arguments import check_optimizer
from ignite_monitor.monitor.base import Handlers
from ignite_monitor.monitor.ranks import NOT_REDUCED
from ignite_monitor.monitor.scaler import ScaledMonitor
from ignite_monitor.monitor.transfer import DeferredFlag
from ignite_monitor.noise_scale.estimate import FEWEST, RatioOfMeans, noise_and_signal
from ignite_monitor.noise_scale.increments import Increment, IncrementObserver, sums_of

_WIDEST = 10.0  # ratio of the ends of a published interval
_PATIENCE = 50  # monitored steps without a value before a warning


class GradientNoiseScaleHandler(ScaledMonitor, schema=NOISE_SCALE):
    r"""Estimate the simple noise scale: the batch size at which noise and signal of the gradient are equally large.

    .. math:: B = \frac{\mathrm{tr}\,\Sigma}{|G|^2}

    with the covariance :math:`\Sigma` of the gradients of single items, and the true gradient G (arXiv:1812.06162,
    equation 2.9). Both are estimated from gradients of means over items: those of micro-batches, of ranks of
    DistributedDataParallel, or of both (appendix A.1).

    {keys}

    The value is the ratio of the averages over about the last ``1 / (1 - decay)`` steps. It is not reported before 20
    effective steps, nor if its interval spans more than a factor of ten. Steps with another number of backward
    passes than ``micro_batches`` do not count. Gradients have to start from zero, to be finite, and to stay unchanged
    between backward passes. If gradients accumulate over iterations, monitor all of these.

    Args:
        model: the model, as the train step uses it (wrapped, if it is wrapped).
        optimizer: the optimizer whose parameters count.
        micro_batches: number of backward passes per optimizer step, each over items of its own.
        items: function of the batch that returns its number of items, shared equally by the backward passes; None for
            the length of the first tensor.
        scaler: the GradScaler of the train step; without it steps through a GradScaler are not measured.
        decay: weight of earlier steps, greater than 0.905 (20 effective steps) and less than 1.
        prefix: prefix of the keys.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is out of its range, parameters are sharded or not the optimizer's, or there is one
            micro-batch and no DistributedDataParallel.

    Examples:
        .. code-block:: python

            noise = GradientNoiseScaleHandler(model, optimizer, micro_batches=4)
            noise.attach(trainer)
            noise.log_to(tensorboard_logger, trainer)
    """

    _state_dict_all_req_keys = ("moments",)

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        micro_batches: int = 1,
        items: Callable[[Any], float] | None = None,
        scaler: GradScaler | None = None,
        decay: float = 0.99,
        prefix: str = "noise_scale",
    ) -> None:
        super().__init__(model, prefix)
        check_optimizer(optimizer, model)
        if any_dtensor(model.parameters()):
            raise ValueError("Argument model should not be sharded: no rank has a gradient of its own part of a batch")
        self.micro_batches = check_count("micro_batches", micro_batches, least=1)
        if micro_batches == 1 and not any(isinstance(module, DistributedDataParallel) for module in model.modules()):
            raise ValueError(
                "Argument micro_batches should be at least 2 without DistributedDataParallel, but given 1: make each "
                "optimizer step from several backward passes, each over a part of the batch"
            )
        check_function("items", items, "the batch")
        self.optimizer: Optimizer = optimizer
        self.set_scaler(scaler)
        self.items = items
        self._ratio = RatioOfMeans(check_real("decay", decay, above=(FEWEST - 1) / (FEWEST + 1), below=1))
        self._items = math.nan  # of the batch
        self._skipped = 0.0  # steps, until the first value; then infinite
        self.reset_run_state()

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return the moments of numerator and denominator."""
        return OrderedDict(moments=self._ratio.moments.cpu())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        moments = state_dict["moments"]
        if not isinstance(moments, Tensor) or moments.shape != (7,):
            raise TypeError(f"Argument state_dict should hold seven moments, but it holds {moments}")
        self._ratio.moments = moments.detach().clone()

    def handlers(self) -> Handlers:
        return [
            *super().handlers(),
            (MonitorEvents.GRADIENTS_READY, self._on_gradients_ready),
            (MonitorEvents.OPTIMIZER_STEP_COMPLETED, self._on_step_completed),
            (MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed),
        ]

    def before_train_step(self, engine: Engine) -> None:
        self._items = math.nan
        with self._training_continues("unknown_items", "the number of items is not known"):
            items = (self.items or count_items)(engine.state.batch)
            self._items = math.nan if items is None else float(items)

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        if self._source is None:
            return []
        tracker = self._source.trackers[id(self.model)]
        parameters = tracker.parameters_of(self.optimizer)
        parameters = [parameter for parameter in parameters if parameter.requires_grad and not parameter.is_inference()]
        return [IncrementObserver(tracker, parameters, self._window)]

    def reset_run_state(self) -> None:
        self._window: list[Increment] = []  # of the next optimizer step
        self._closed: list[list[Increment]] = []  # of this iteration's steps
        self._changed: Tensor | int = 0  # consecutive steps with gradients that were changed in between
        self._is_silent = DeferredFlag()

    def _on_gradients_ready(self, engine: Engine, ready: GradientsReady) -> None:
        if self._window and not ready.reached.isdisjoint(map(id, ready.tracker.parameters_of(self.optimizer))):
            self._window[-1].is_reduced = True
            self._window[-1].scale = ready.scale(self.scaler)

    def _on_step_completed(self, engine: Engine, step: OptimizerStep) -> None:
        if step.is_of(self.optimizer):
            self._closed.append(list(self._window))
            self._window.clear()

    @torch.no_grad()
    def _on_train_step_completed(self, engine: Engine) -> None:
        new = [part for window in (*self._closed, self._window) for part in window if part.items is None]
        # A backward pass after the last step may be of another batch, through a model that is not being trained.
        is_known = new and self._items % len(new) == 0 and not (self._closed and self._window)
        for part in new:
            part.items = self._items / len(new) if is_known else math.nan
        for window in self._closed:
            self._observe(window)
        self._closed.clear()

    def _observe(self, window: list[Increment]) -> None:
        if self.lacks_scaler or not self.ranks.all_present:
            return
        if not self.ranks.reduces(parameters_of(self.optimizer)):
            self.report("no_value", f"no value: {NOT_REDUCED}")
            return
        device = device_of(self.model)
        unknown = torch.full((6,), math.nan, dtype=wide_dtype(device), device=device)
        sums = sums_of(window) if self._is_complete_window(window) else unknown
        # NaN of one rank is NaN on all.
        square_sum, weighted_sum, items, count, total, changed = self.ranks.sum(sums).unbind()
        self._changed = torch.where(changed > 0, self._changed + 1, 0)
        self._is_silent.set(self._changed >= _PATIENCE)
        if self._is_silent.take():
            text = "gradients did not start from zero, or were changed between two backward passes"
            self.report("no_value", f"no value: in each of the last {_PATIENCE} optimizer steps {text}")
        total = total * self.ranks.size  # the gradients are the ranks' mean
        new = noise_and_signal(square_sum, weighted_sum, items, total, count)
        if window and window[-1].scale is not None:
            new = new / window[-1].scale.to(new) ** 2
        self._ratio.observe(new)
        interval = self._ratio.interval()
        _, low, high = interval.unbind()
        is_known = (low > 0) & (high <= _WIDEST * low) & new.isfinite().all()
        value, low, high = torch.where(is_known, interval, math.nan).unbind()
        self.publish(value=value, low=low, high=high, batch=items + 0 * total)  # NaN of a step that was not measured

    def _is_complete_window(self, window: list[Increment]) -> bool:
        """Return True if the step was made from the expected increments; warn if the first 50 were not."""
        has_all = len(window) == self.micro_batches and window[-1].is_reduced
        is_complete = has_all and all(0 < (part.items or 0) < math.inf for part in window)
        self._skipped = math.inf if is_complete else self._skipped + 1
        if self._skipped == _PATIENCE:
            reason = f"the last was made from {len(window)} backward passes in monitored iterations, and "
            reason += f"micro_batches is {self.micro_batches}"
            if has_all:
                reason = "its backward passes do not share a known number of items equally; see the argument items"
            self.report("no_value", f"no value after {_PATIENCE} optimizer steps: {reason}")
        return is_complete
