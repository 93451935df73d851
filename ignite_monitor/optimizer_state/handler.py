"""OptimizerStateHandler: what an optimizer's moments say of its steps."""

from __future__ import annotations

import functools
import heapq
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from ignite.engine import Engine
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.checks import check_count
from ignite_monitor.events.gradient_tracker import OptimizerStep
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.keys import OPTIMIZER_STATE
from ignite_monitor.model.names import tags
from ignite_monitor.model.optimizers import check_holds, check_optimizer
from ignite_monitor.model.sharding import check_whole
from ignite_monitor.model.updates import order_statistics
from ignite_monitor.monitor.base import Handlers, Monitor
from ignite_monitor.optimizer_state.sampled_step import Measured, SampledStep


class OptimizerStateHandler(Monitor, schema=OPTIMIZER_STATE):
    r"""Watches what Adam and its kin, SGD with momentum, Muon and Lion keep of each parameter, and their steps by it.

    For any optimizer with ``exp_avg``, ``exp_avg_sq`` or ``momentum_buffer`` in its state, whatever its class. Of each
    tensor, with its gradient g as the step uses it (reduced, unscaled, clipped), and the moments as the step leaves
    them:

    .. math::
        \mathrm{RMS} = \sqrt{\frac{1}{n} \sum_i \frac{g_i^2}{\max(\hat v_i, \epsilon^2)}}, \qquad
        \frac{\#\{i : \sqrt{\hat v_i} < \epsilon\}}{n}, \qquad
        \frac{\langle g, m \rangle}{\lVert g \rVert \lVert m \rVert},

    with m in ``exp_avg`` or ``momentum_buffer``, and :math:`\hat v = v / (1 - \beta_2^t)` with v in ``exp_avg_sq``
    (``max_exp_avg_sq`` where there is one). Without a count t of steps, or where there are not two ``betas``,
    :math:`\hat v` is v as it is. An RMS far above 1 says that the second moment is stale: the gradient has become
    larger, and steps are too large for it (`arXiv:2304.13013 <https://arxiv.org/abs/2304.13013>`_, section 3.4, which
    relates values above 2.3 to spikes of the loss). Where :math:`\epsilon` rules, a step is no longer adapted to the
    size of the gradient.

    {keys}

    The last kind is named by values, so it appears when a logger writes. What an optimizer does not keep is absent,
    as are tensors with sparse gradients or complex elements, with moments in another shape, on another device, in 8
    bits or in a basis of their own, and steps that are left out. Where several steps are made in an iteration, the last
    one counts.

    Tensors are looked at through a sample of their elements, as :class:`WeightUpdateHandler` does it; of DTensors each
    rank looks at its part, and one collective per mesh and sharded dimension puts these together.

    Args:
        model: the model, as the train step uses it (wrapped, where it is wrapped).
        optimizer: the optimizer whose state is measured.
        sample_size: how many elements of a parameter to look at; None for all.
        top_k: how many tensors at most to publish by name.
        prefix: what the values' names start with.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument has a value it can't have, the optimizer holds none of the model's parameters, or
            FullyShardedDataParallel has sharded them.

    Examples:
        .. code-block:: python

            handler = OptimizerStateHandler(model, optimizer)
            handler.attach(trainer, Events.ITERATION_STARTED(every=100))
            handler.log_to(tensorboard_logger, trainer)
    """

    _state_dict_all_req_keys = ("sample_size",)

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        sample_size: int | None = 256,
        top_k: int = 5,
        prefix: str = "optimizer",
    ) -> None:
        super().__init__(model, prefix)
        check_optimizer(optimizer)
        check_whole(model)
        check_holds(optimizer, model)
        self.optimizer = optimizer
        self.sample_size = None if sample_size is None else check_count("sample_size", sample_size, least=1)
        self.top_k = check_count("top_k", top_k)
        self._tags: list[str] = []
        self._step: SampledStep | None = None  # while a run lasts
        self._measured: Measured | None = None  # of this iteration
        self._is_going_on = False
        self._monitored_count = self._stepped = self._published = 0

    def state_dict(self) -> OrderedDict[str, Any]:
        """How many elements are looked at; what it looks at is the optimizer's to save."""
        return OrderedDict(sample_size=self.sample_size)

    def handlers(self) -> Handlers:
        return [
            (MonitorEvents.OPTIMIZER_STEP_STARTED, self._on_step_started),
            (MonitorEvents.OPTIMIZER_STEP_COMPLETED, self._on_step_completed),
            (MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed),
        ]

    def start_iteration(self, engine: Engine) -> None:
        self._measured, self._is_going_on = None, False

    def on_run_end(self) -> None:
        if self._monitored_count and not self._published:
            why = "its state holds no exp_avg, exp_avg_sq or momentum_buffer of a parameter's shape, element by element"
            self.logger.warning(
                "%s: nothing is published of %s in %d monitored iterations, since %s",
                self.prefix,
                type(self.optimizer).__name__,
                self._monitored_count,
                why if self._stepped else "it made no step in them with a gradient of the model",
            )
        self._monitored_count = self._stepped = self._published = 0

    def reset_run_state(self) -> None:
        self._step = self._measured = None

    def _on_step_started(self, engine: Engine, step: OptimizerStep) -> Callable[[], Callable[[], None]] | None:
        # Once others have clipped or hidden the gradient.
        return (lambda: functools.partial(self._begin, step)) if step.is_of(self.optimizer) else None

    def _begin(self, step: OptimizerStep) -> None:
        if self._step is None or not self._step.fits(step.optimizer):
            self._step = SampledStep(self.model, self.sample_size, step.optimizer)
            self._tags = tags(self._step.samples.names)
        self._step.started(step.optimizer, step.scale)
        self._is_going_on = True

    def _on_step_completed(self, engine: Engine, step: OptimizerStep) -> None:
        if self._step is not None and self._is_going_on and step.is_of(self.optimizer):
            made, measured = self._step.completed(step.optimizer)
            self._is_going_on = False
            self._stepped += made
            self._measured = measured or self._measured

    def _on_train_step_completed(self, engine: Engine) -> None:
        if not self._is_running:
            return
        self._monitored_count += 1
        if self._measured is None:
            return
        self._published += 1
        rms, eps, cosine = order_statistics(self._measured.statistics).unbind()
        median, p95, least, most = range(4)
        self.publish(
            rms_median=rms[median],
            rms_p95=rms[p95],
            rms_max=rms[most],
            eps_share_median=eps[median],
            eps_share_max=eps[most],
            momentum_cosine_median=cosine[median],
            momentum_cosine_min=cosine[least],
            update_norm=self._measured.update_norm,
        )

    # Values on the host

    def deferred_tensors(self) -> list[Tensor]:
        return [] if self._measured is None or not self.metrics else [self._measured.statistics[0]]

    def resolve_deferred(self, extra: list[list[float]]) -> dict[str, float]:
        rms = extra[0] if extra else []
        largest = heapq.nlargest(
            self.top_k, [index for index, each in enumerate(rms) if each >= 0], key=rms.__getitem__
        )
        return {f"topk_rms/{self._tags[index]}": rms[index] for index in largest}
