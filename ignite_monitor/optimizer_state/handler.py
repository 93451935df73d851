"""OptimizerStateHandler: gradients against the moments of an optimizer."""

from __future__ import annotations

from ignite.engine import Engine
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.checks import check_count
from ignite_monitor.events.gradient_tracker import OptimizerStep
from ignite_monitor.events.monitor_events import MonitorEvents, Phase
from ignite_monitor.keys import OPTIMIZER_STATE
from ignite_monitor.model.names import tags, top
from ignite_monitor.model.norms import order_statistics
from ignite_monitor.monitor.arguments import check_optimizer
from ignite_monitor.monitor.base import Handlers, Monitor
from ignite_monitor.optimizer_state.measured_step import MomentMeasurement, MomentStatistics


class OptimizerStateHandler(Monitor, schema=OPTIMIZER_STATE):
    r"""Compare gradients with the moments of optimizers of ``torch.optim``: Adam, AdamW, SGD with momentum, Muon ….

    For each tensor, with the moments as the step leaves them, and its gradient g as the step uses it: reduced,
    unscaled, clipped, negated with ``maximize``, and with the weight decay that is added to it:

    .. math:: \mathrm{RMS} = \sqrt{\frac{1}{n} \sum_i \frac{g_i^2}{\max(\hat v_i, \epsilon^2)}}

    with :math:`\hat v = v / (1 - \beta_2^t)` and v in ``exp_avg_sq`` (``max_exp_avg_sq`` where there is one), after t
    steps.

    {keys}

    Momentum SGD reports only momentum cosine and update norm. Nothing is reported of optimizers of other classes, also
    where they inherit from one of torch. The last kind appears when a logger writes.

    Args:
        model: the model, as the train step uses it (wrapped, if it is wrapped).
        optimizer: the optimizer whose state is measured.
        sample_size: the number of elements to sample per parameter; None for all.
        top_k: the number of tensors to publish by name.
        prefix: the first part of the keys.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument has a value it can't have, the optimizer holds none of the model's parameters, or
            FullyShardedDataParallel has sharded them.

    Examples:
        .. code-block:: python

            handler = OptimizerStateHandler(model, optimizer)
            handler.attach(trainer, Events.ITERATION_STARTED(every=100))
    """

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
        check_optimizer(optimizer, model)
        self.optimizer = optimizer
        self.sample_size = None if sample_size is None else check_count("sample_size", sample_size, least=1)
        self.top_k = check_count("top_k", top_k)
        self._step: MomentMeasurement | None = None  # while a run lasts
        self._measured: MomentStatistics | None = None  # of this iteration

    def handlers(self) -> Handlers:
        return [
            (Phase.STEP_DECIDED, self._on_step_decided),
            (MonitorEvents.OPTIMIZER_STEP_COMPLETED, self._on_step_completed),
            (MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed),
        ]

    def before_train_step(self, engine: Engine) -> None:
        self._measured = None
        if self._step is None or not self._step.fits():
            self._step = MomentMeasurement(self.model, self.sample_size, self.optimizer)
        self._step.start()

    def reset_run_state(self) -> None:
        self._step = self._measured = None

    def _on_step_decided(self, engine: Engine, step: OptimizerStep) -> None:
        if self._step is not None and step.is_of(self.optimizer):
            self._step.keep_gradients(step)

    def _on_step_completed(self, engine: Engine, step: OptimizerStep) -> None:
        if self._step is None or step.made is False or not step.is_of(self.optimizer) or not self._step.fits():
            return
        measured = self._step.completed(step.optimizer)
        if measured is not None:
            self._measured = measured
        elif self._step.stepped:
            text = "of torch's optimizers, exp_avg, exp_avg_sq and momentum_buffer of dense real gradients are measured"
            self.report("nothing_measured", f"nothing is reported of {type(step.optimizer).__name__}: {text}")

    def _on_train_step_completed(self, engine: Engine) -> None:
        if not self._is_running or self._measured is None:
            return
        rms, fraction, cosine = (row.unbind() for row in order_statistics(self._measured.statistics))
        self.publish(
            rms_median=rms[0],
            rms_p95=rms[1],
            rms_max=rms[3],
            epsilon_dominated_median=fraction[0],
            epsilon_dominated_max=fraction[3],
            momentum_cosine_median=cosine[0],
            momentum_cosine_min=cosine[2],
            update_norm=self._measured.update_norm,
        )

    def deferred_tensors(self) -> list[Tensor]:
        return [] if self._measured is None or not self.metrics else [self._measured.statistics[0]]

    def resolve_deferred(self, extra: list[list[float]]) -> dict[str, float]:
        if self._measured is None or not extra:
            return {}
        return top("topk_rms", tags(self._measured.names), extra[0], self.top_k)
