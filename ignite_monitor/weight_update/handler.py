"""WeightUpdateHandler: how much every train step moves each parameter, and which have stopped learning."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from ignite.engine import Engine
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ignite_monitor.checks import check_count, check_real, check_type
from ignite_monitor.events.gradient_tracker import GradientsReady, OptimizerStep
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.keys import WEIGHT_UPDATE
from ignite_monitor.model.names import named_parameters, tags
from ignite_monitor.model.optimizers import check_holds, check_optimizer, held_by
from ignite_monitor.model.sharding import check_whole
from ignite_monitor.model.updates import order_statistics, update_ratios
from ignite_monitor.monitor.base import Handlers, Monitor
from ignite_monitor.weight_update.frozen import FrozenParameters, LostUpdates, on_host
from ignite_monitor.weight_update.train_step import SampledTrainStep, unknown_where
from ignite_monitor.weight_update.untrained import UntrainedParameters


class ParameterDiagnostics(NamedTuple):
    """What the last monitored iteration that had a gradient or a step said of one parameter.

    Attributes:
        grad_norm: norm of its gradient; NaN if it had none that is new.
        update_ratio: how much the train step moved it for its size; NaN if it had no step.
        is_vanishing: whether the norm is below ``vanishing_grad_threshold``.
        is_exploding: whether the norm is above ``exploding_grad_threshold``, or not finite.
        is_frozen: whether it had a step, and that and all of the last ``frozen_patience_steps`` have not moved it.
    """

    grad_norm: float
    update_ratio: float
    is_vanishing: bool
    is_exploding: bool
    is_frozen: bool


class WeightUpdateHandler(Monitor, schema=WEIGHT_UPDATE):
    r"""Watches how much each train step moves every parameter, and sums it up in a few values.

    The update ratio of a parameter is

    .. math:: \frac{\lVert w' - w\rVert_2}{\lVert w\rVert_2 + \epsilon}

    over sampled elements, where w is the weight when the iteration starts and w' when the train step has returned:
    momentum, weight decay, clipping and all steps of all optimizers are in it. Around 1e-3 is usual; it is
    dimensionless. The gradient's norm is that of what backward left: unscaled, reduced over ranks, not yet clipped. It
    is that of the parameter's own last step, or where it had none of its last backward; gradients left over from an
    earlier iteration have none.

    {keys}

    ``topk_grad`` and ``topk_frozen`` are named by values, so they appear when a logger writes, or :attr:`diagnostics`
    is read. The others wait for nothing.

    A parameter is frozen once its update ratio has been at most ``frozen_update_ratio_threshold`` in
    ``frozen_patience_steps`` monitored steps in a row; a warning in the log names it. Only steps that were to move it
    count: of an optimizer that holds it, with ``requires_grad`` and a learning rate other than 0, and not those that a
    GradScaler or :class:`GradMonitor` leaves out. In an iteration without any, update ratios and ``frozen_count`` are
    absent. A parameter without a new gradient counts as neither vanishing nor exploding; a gradient that is not finite
    has the norm inf, or none with a ``scaler``, which looks after it.

    **Sampling.** Of parameters with more than ``sample_size`` elements that many are looked at, at places derived from
    the parameter's name, the same in every run and on every rank; of a two-dimensional one that has more rows than
    that, one of each row, since it may be an embedding, of which a step moves few. With ``sample_size=None``, and for
    smaller parameters, all is exact. Otherwise the ratio has a relative standard error of about :math:`\sqrt{(\kappa_w
    + \kappa_{\Delta} - 2) / 4k}`, and a gradient's norm of :math:`\sqrt{(\kappa_g - 1) / 4k}`, for a sample of k
    elements and kurtosis :math:`\kappa = E x^4 / (E x^2)^2`: 3 % and 2 % for normally distributed ones (:math:`\kappa
    = 3`) and k = 1024, more where few elements hold most of the norm. The median over many parameters is nearer than
    that. Norms of sparse gradients are exact.

    **Low precision.** Weights in bfloat16 or float16 move only by whole roundings (2\ :sup:`-8` of their size, or
    2\ :sup:`-11`), so the ratio is of what is left of an update after rounding: 0 for one that is lost, which does
    freeze the parameter, and the warning says that rounding does it. Where the optimizer keeps a float32 copy of a
    weight in its state, under a key with "master" or "fp32" in it, the ratio is that of the copy.
    ``lost_update_fraction`` is the share of the elements with a gradient other than 0 that the train step left bit for
    bit what they were, over all weights of low precision without such a copy, estimated by the sample: for bfloat16
    weights of a usual size under Adam 0.3 to 0.9, 0.6 to 0.8 and 0.95 to 0.98 at learning rates of 1e-3, 1e-4 and 1e-5
    after 100 steps, and less at first. A warning says once that most updates are lost. Parameters are left out whose
    optimizer makes up for rounding, with a key with "kahan" or "compensation" in its state.

    **Untrained parameters.** After ``frozen_patience_steps`` monitored steps those are named that no optimizer holds
    whose step was seen, and those of the others that have not had a gradient so far, ``requires_grad=False`` included.
    Where they are more than ``top_k``, the modules are named that they are in; the value says how many they are.

    Args:
        model: the model, as the train step uses it (wrapped, where it is wrapped).
        optimizer: the optimizer whose parameters count; None for those of any optimizer.
        scaler: the GradScaler of the train step.
        sample_size: how many elements of a parameter to look at; None for all.
        vanishing_grad_threshold: the smallest gradient norm that is not vanishing.
        exploding_grad_threshold: the largest gradient norm that is not exploding.
        frozen_update_ratio_threshold: the largest update ratio that means standing still.
        frozen_patience_steps: after how many monitored steps of standing still a parameter is frozen.
        top_k: how many parameters at most to publish by name, of each kind.
        eps: :math:`\epsilon`, greater than 0.
        prefix: what the values' names start with.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument has a value it can't have, the optimizer holds none of the model's parameters, or
            FullyShardedDataParallel has sharded them.

    Examples:
        .. code-block:: python

            handler = WeightUpdateHandler(model, optimizer)
            handler.attach(trainer, Events.ITERATION_STARTED(every=100))
            handler.log_to(tensorboard_logger, trainer)
            trainer.run(loader, max_epochs=5)
            print([name for name, parameter in handler.diagnostics.items() if parameter.is_frozen])
    """

    _state_dict_all_req_keys = ("names", "still")

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        scaler: GradScaler | None = None,
        sample_size: int | None = 1024,
        vanishing_grad_threshold: float = 1e-7,
        exploding_grad_threshold: float = 1e2,
        frozen_update_ratio_threshold: float = 1e-12,
        frozen_patience_steps: int = 3,
        top_k: int = 5,
        eps: float = 1e-12,
        prefix: str = "monitor",
    ) -> None:
        super().__init__(model, prefix)
        check_whole(model)
        if optimizer is not None:
            check_optimizer(optimizer, optional=True)
            check_holds(optimizer, model)
        if scaler is not None:
            check_type("scaler", scaler, GradScaler, "torch.amp.GradScaler or None")
        self.optimizer = optimizer
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.sample_size = None if sample_size is None else check_count("sample_size", sample_size, least=1)
        self.vanishing_grad_threshold = _check_threshold("vanishing_grad_threshold", vanishing_grad_threshold)
        self.exploding_grad_threshold = _check_threshold("exploding_grad_threshold", exploding_grad_threshold)
        self.frozen_update_ratio_threshold = _check_threshold(
            "frozen_update_ratio_threshold", frozen_update_ratio_threshold
        )
        self.frozen_patience_steps = check_count("frozen_patience_steps", frozen_patience_steps, least=1)
        self.top_k = check_count("top_k", top_k)
        self.eps = check_real("eps", eps, above=0.0, below=math.inf)
        if self.vanishing_grad_threshold > self.exploding_grad_threshold:
            raise ValueError(
                "Argument vanishing_grad_threshold should be at most exploding_grad_threshold, "
                f"but given {vanishing_grad_threshold} and {exploding_grad_threshold}"
            )

        self._names = [name for name, _, _ in named_parameters(model)]
        self._tags = tags(self._names)
        self._frozen = FrozenParameters(self._names, self.frozen_update_ratio_threshold, self.frozen_patience_steps)
        self._lost = LostUpdates(self.frozen_patience_steps)
        self._untrained = UntrainedParameters(self.frozen_patience_steps, self.top_k)
        self._step: SampledTrainStep | None = None  # while a run lasts
        self._table: Tensor | None = None  # of the last monitored iteration: gradient norms, ratios, still
        self._rows: list[list[float]] | None = None  # the same on the host
        self._rounded: frozenset[str] = frozenset()
        self._monitored_count = self._stepped = 0
        self._replaced_reported = False

    @property
    def diagnostics(self) -> dict[str, ParameterDiagnostics]:
        """What the last monitored iteration that had a gradient or a step said of every parameter, by name.

        Brings it to the host.
        """
        rows = self._look()
        if rows is None:
            nan = [math.nan] * len(self._names)
            rows = [nan, nan, nan]
        return {
            name: ParameterDiagnostics(
                norm,
                ratio,
                norm < self.vanishing_grad_threshold,
                norm > self.exploding_grad_threshold,
                self._frozen.is_frozen(ratio, still),
            )
            for name, norm, ratio, still in zip(self._names, *rows, strict=True)
        }

    def state_dict(self) -> OrderedDict[str, Any]:
        """What the monitored steps have shown of each parameter: names, numbers and a tensor."""
        return OrderedDict(**self._frozen.state_dict(), untrained=self._untrained.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state; parameters that it does not know start anew.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            TypeError: if it is no mapping, or holds something else than names and counts.
            ValueError: if it was saved by a monitor of another kind, or of another model, or is damaged.
        """
        super().load_state_dict(state_dict)
        self._frozen.load_state_dict(state_dict)
        if "untrained" in state_dict:
            self._untrained.load_state_dict(state_dict["untrained"])
        self._step = None  # the counts are on the CPU now: the next iteration takes them to the device

    def detach(self) -> None:
        """Undo ``attach`` and ``log_to``; :attr:`diagnostics` keeps what it last knew."""
        super().detach()
        self._look()
        self._table = None

    # What it listens to

    def handlers(self) -> Handlers:
        return [
            (MonitorEvents.GRADIENTS_READY, self._on_gradients_ready),
            (MonitorEvents.OPTIMIZER_STEP_STARTED, self._on_step_started),
            (MonitorEvents.OPTIMIZER_STEP_COMPLETED, self._on_step_completed),
            (MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed),
        ]

    def start_iteration(self, engine: Engine) -> None:
        if self._frozen.changed():
            self._warn()
        self._lost.warn(self.logger, self.prefix)
        if self._step is None or not self._step.fits():
            self._sample(engine)
        if self._step is not None:
            self._step.start()

    def on_run_end(self) -> None:
        if self._monitored_count and not self._stepped:
            self.logger.warning(
                "%s: none of %d monitored iterations had an optimizer step with a gradient of the model, so no update "
                "ratio is published. Either model or optimizer is not the one that the train step uses, or only "
                "iterations without a step are monitored: then attach with another filter.",
                self.prefix,
                self._monitored_count,
            )
        self._monitored_count = self._stepped = 0

    def reset_run_state(self) -> None:
        self._step = None
        if self._frozen.changed(wait=True):
            self._warn()
        self._lost.warn(self.logger, self.prefix, wait=True)
        self._lost.restart()

    def _on_gradients_ready(self, engine: Engine, backward: GradientsReady) -> None:
        if self._step is not None:
            self._step.gradients_ready(backward.scale(self.scaler), backward.reached, backward.optimizer)
            self._untrained.gradients_found(self._step.trainable)

    def _on_step_started(self, engine: Engine, step: OptimizerStep) -> None:
        if self._step is not None:
            self._step.step_started(step.optimizer, step.scale, step.tracker.reduced)
            self._untrained.gradients_found(self._step.trainable)
            self._untrained.step_made(self._step.trainable, held_by(step.optimizer))

    def _on_step_completed(self, engine: Engine, step: OptimizerStep) -> None:
        if self._step is not None:
            self._step.step_completed(step.optimizer)

    def _on_train_step_completed(self, engine: Engine) -> None:
        if not self._is_running or self._step is None:
            return
        if not self._step.fits():
            self._report_replaced(engine)
            return
        self._monitored_count += 1
        measured = self._step.completed()
        self._stepped += self._step.stepped
        if measured is None:
            return
        norms = measured.gradients
        if measured.with_gradient is not None:
            norms = norms.masked_fill(norms.isnan(), math.inf)
            if self.scaler is not None:  # which looks after overflows
                norms = norms.masked_fill(norms.isinf(), math.nan)
        norms = unknown_where(norms, measured.with_gradient)
        ratios = update_ratios(measured.changes, measured.weights, self.eps)
        ratios = unknown_where(ratios.masked_fill(ratios.isinf(), math.nan), measured.moved)
        values: dict[str, Tensor | float] = {}
        of_norms, of_ratios = order_statistics(torch.stack([norms, ratios])).unbind()
        if measured.with_gradient is not None:
            values |= _named("grad", of_norms)
            values["vanishing_count"] = (norms < self.vanishing_grad_threshold).sum(dtype=norms.dtype)
            values["exploding_count"] = (norms > self.exploding_grad_threshold).sum(dtype=norms.dtype)
        if measured.moved is not None:
            values |= _named("update_ratio", of_ratios)
            frozen = self._frozen.observe(ratios, measured.moved)
            values["frozen_count"] = torch.where(measured.moved.any(), frozen.sum(dtype=ratios.dtype), math.nan)
            if measured.lost is not None:
                values["lost_update_fraction"] = measured.lost
                self._lost.observe(measured.lost)
            values |= self._untrained.observe(self._step.trainable)
        self._table, self._rows = torch.stack([norms, ratios, self._frozen.still]), None
        self._rounded = frozenset(self._step.rounded)
        self.publish(**values)

    def _sample(self, engine: Engine) -> None:
        again = self._step is not None
        self._lost.restart()
        self._step = SampledTrainStep(self.model, self.sample_size, self.optimizer)
        samples = self._step.samples
        self._frozen.rename(samples.names, like=torch.empty(0, dtype=samples.dtype, device=samples.device))
        if samples.names == self._names:
            return
        added = [name for name in samples.names if name not in set(self._names)]
        self._names, self._tags = samples.names, tags(samples.names)
        self._table = self._rows = None
        if added:
            self.logger.warning(
                "%s: added to the model since %s, and measured from iteration %d on: %s",
                self.prefix,
                "the last monitored iteration" if again else "the handler was made or last ran",
                engine.state.iteration,
                ", ".join(added),
            )

    def _report_replaced(self, engine: Engine) -> None:
        # Of those that are added the next monitored iteration tells.
        added = any(name not in set(self._names) for name, _, _ in named_parameters(self.model))
        if not added and not self._replaced_reported:
            self._replaced_reported = True
            self.logger.warning(
                "%s: parameters were replaced after iteration %d had started, so nothing is published of it",
                self.prefix,
                engine.state.iteration,
            )

    # Values on the host

    def deferred_tensors(self) -> list[Tensor]:
        return [] if self._table is None or not self.metrics else [self._table]

    def resolve_deferred(self, extra: list[list[float]]) -> dict[str, float]:
        if not extra:
            return {}
        (flat,) = extra
        count = len(self._names)
        self._rows = [flat[i * count : (i + 1) * count] for i in range(3)]
        norms, ratios, still = self._rows
        self._warn()
        with_norm = [index for index in range(count) if norms[index] >= 0]
        largest = heapq.nlargest(self.top_k, with_norm, key=lambda index: norms[index])
        frozen = [i for i in range(count) if still[i] and self._frozen.is_frozen(ratios[i], still[i])]
        longest = heapq.nlargest(self.top_k, frozen, key=lambda index: still[index])
        return {f"topk_grad/{self._tags[index]}": norms[index] for index in largest} | {
            f"topk_frozen/{self._tags[index]}": still[index] for index in longest
        }

    def _warn(self) -> None:
        if self._table is None:
            return
        if self._rows is not None:
            has_gradient = [norm >= self.vanishing_grad_threshold for norm in self._rows[0]]
            still = self._frozen.is_still(self._rows[2])
        else:
            has_gradient = on_host(self._table[0] >= self.vanishing_grad_threshold)
            still = self._frozen.is_still()
        rounded = [gradient and name in self._rounded for name, gradient in zip(self._names, has_gradient, strict=True)]
        self._frozen.report(self.logger, self.prefix, still, rounded)

    def _look(self) -> list[list[float]] | None:
        if self._rows is None and self._table is not None:
            self.on_host()
            if self._rows is None:  # nothing is published, as after the run
                self.resolve_deferred([self._table.flatten().tolist()])
        return self._rows


def _named(name: str, statistics: Tensor) -> dict[str, Tensor]:
    kinds = ("median", "p95", "min", "max")
    return {f"{name}_{kind}": each for kind, each in zip(kinds, statistics.unbind(), strict=True)}


def _check_threshold(name: str, value: object) -> float:
    number = check_real(name, value)
    if number < 0:
        raise ValueError(f"Argument {name} should be at least 0, but given {value}")
    return number
