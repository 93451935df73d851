"""WeightUpdateHandler: update ratios, gradient norms and frozen parameters."""

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
from ignite_monitor.events.monitor_events import MonitorEvents, Phase
from ignite_monitor.keys import WEIGHT_UPDATE
from ignite_monitor.model.names import named_parameters, tags
from ignite_monitor.model.norms import order_statistics
from ignite_monitor.model.sampling import NARROW
from ignite_monitor.monitor import transfer
from ignite_monitor.monitor.arguments import check_holds, check_optimizer
from ignite_monitor.monitor.base import Handlers, Monitor
from ignite_monitor.weight_update.frozen import FrozenParameters
from ignite_monitor.weight_update.train_step import UpdateMeasurement

_ROUNDING = (
    ". Weights in bfloat16 or float16 lose small updates to rounding: keep float32 weights and use torch.autocast, or "
    "an optimizer that keeps float32 copies of them."
)


_ROWS = 5  # of a handler's table
_FEW = 32  # moved elements of a sample, from which a ratio has an error of about 15 %


class ParameterDiagnostics(NamedTuple):
    """One parameter in the last monitored iteration that had a gradient or a step.

    Attributes:
        grad_norm: the norm of its gradient; NaN if it had no new one.
        update_ratio: the norm of its change over its own; NaN if no step was to move it.
        is_vanishing: True if the norm is below ``vanishing_grad_threshold``.
        is_exploding: True if the norm is above ``exploding_grad_threshold``, or not finite.
        is_frozen: True if it had a step, and is unchanged since ``frozen_patience_steps`` monitored steps.
    """

    grad_norm: float
    update_ratio: float
    is_vanishing: bool
    is_exploding: bool
    is_frozen: bool


class WeightUpdateHandler(Monitor, schema=WEIGHT_UPDATE):
    r"""Measure how far each train step moves every parameter, and find parameters that have stopped learning.

    The update ratio of a parameter is

    .. math:: \frac{\lVert w' - w\rVert_2}{\lVert w\rVert_2 + \epsilon}

    with w the weight before the train step and w' after it. Around 1e-3 is usual. The gradient norm is that of the last
    backward before the parameter's last step: unscaled, reduced over ranks, not clipped.

    {keys}

    The change of a parameter with more than ``sample_size`` elements is estimated from a sample; if fewer than 32 of
    its elements have moved, all elements are measured from the next monitored iteration on. Keys with names of
    parameters appear when a logger writes.

    Args:
        model: the model, as the train step uses it (wrapped, if it is wrapped).
        optimizer: the optimizer whose parameters count; None for those of every optimizer.
        scaler: the GradScaler of the train step.
        sample_size: the number of elements to sample per parameter; None for all.
        vanishing_grad_threshold: the smallest gradient norm that is not vanishing.
        exploding_grad_threshold: the largest gradient norm that is not exploding.
        frozen_update_ratio_threshold: the largest update ratio of a step that does not move a parameter; with 0 a step
            that changes any element moves it.
        frozen_patience_steps: the number of such consecutive steps after which a parameter is frozen, with a warning.
        top_k: the number of parameters to publish by name, of each kind; 0 for no names.
        eps: :math:`\epsilon`, greater than 0.
        prefix: the first part of the keys.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument has a value it can't have, the optimizer holds none of the model's parameters, or
            FullyShardedDataParallel has sharded them.

    Examples:
        .. code-block:: python

            handler = WeightUpdateHandler(model, optimizer)
            handler.attach(trainer, Events.ITERATION_STARTED(every=100))
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
        frozen_update_ratio_threshold: float = 0.0,
        frozen_patience_steps: int = 3,
        top_k: int = 5,
        eps: float = 1e-12,
        prefix: str = "monitor",
    ) -> None:
        super().__init__(model, prefix)
        check_optimizer(optimizer, optional=True)
        if optimizer is not None:
            check_holds(optimizer, model)
        if scaler is not None:
            check_type("scaler", scaler, GradScaler, "torch.amp.GradScaler or None")
        self.optimizer = optimizer
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.sample_size = None if sample_size is None else check_count("sample_size", sample_size, least=1)
        self.vanishing_grad_threshold = check_real("vanishing_grad_threshold", vanishing_grad_threshold, least=0.0)
        self.exploding_grad_threshold = check_real("exploding_grad_threshold", exploding_grad_threshold, least=0.0)
        self.frozen_patience_steps = patience = check_count("frozen_patience_steps", frozen_patience_steps, least=1)
        ratio = check_real("frozen_update_ratio_threshold", frozen_update_ratio_threshold, least=0.0)
        self.frozen_update_ratio_threshold = ratio
        self.top_k = check_count("top_k", top_k)
        self.eps = check_real("eps", eps, above=0.0, below=math.inf)
        if vanishing_grad_threshold > exploding_grad_threshold:
            raise ValueError(
                "Argument vanishing_grad_threshold should be at most exploding_grad_threshold, "
                f"but given {vanishing_grad_threshold} and {exploding_grad_threshold}"
            )

        self._names = [name for name, _, _ in named_parameters(model)]
        # Of the last monitored iteration, by parameter: gradient norms, update ratios, counts of unmoved steps, and
        # whether few sampled elements have moved; and norms.
        self._table: Tensor | list[list[float]] = [[math.nan] * len(self._names)] * _ROWS
        self._frozen = FrozenParameters(self._names, patience)
        self._narrow = {name for name, parameter, _ in named_parameters(model) if parameter.dtype in NARROW}
        self._whole: set[str] = set()  # names of parameters of which all elements are measured
        self._step: UpdateMeasurement | None = None  # while a run lasts
        self._reported: set[str] = set()  # names of parameters that were reported as frozen

    @property
    def diagnostics(self) -> dict[str, ParameterDiagnostics]:
        """Diagnostics of parameters by name, in the last monitored iteration with a gradient or a step.

        Synchronizes with the device.
        """
        return {
            name: ParameterDiagnostics(
                norm,
                ratio,
                norm < self.vanishing_grad_threshold,
                norm > self.exploding_grad_threshold,
                not math.isnan(ratio) and self._frozen.is_frozen(still),
            )
            for name, norm, ratio, still, *_ in zip(self._names, *self._rows(), strict=True)
        }

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return how many monitored steps in a row have not moved each parameter, and which are not sampled."""
        return OrderedDict(self._frozen.state_dict(), whole=sorted(self._whole))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state; parameters that it does not know start at 0.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            TypeError: if it holds something else than names and counts.
            ValueError: if it was saved by a monitor of another kind, or of another model, or is damaged.
        """
        super().load_state_dict(state_dict)
        self._frozen.load_state_dict(state_dict)
        self._whole = set(state_dict.get("whole", ()))
        self._step = None  # the counts are on the CPU: the next iteration moves them to the device

    def handlers(self) -> Handlers:
        return [
            (MonitorEvents.GRADIENTS_READY, self._on_gradients_ready),
            (Phase.STEP_DECIDED, self._on_step_decided),
            (MonitorEvents.OPTIMIZER_STEP_COMPLETED, self._on_step_completed),
            (MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed),
        ]

    def start_iteration(self, engine: Engine) -> None:
        if self._step is None or not self._step.fits():
            self._step = UpdateMeasurement(self.model, self.sample_size, self.optimizer)
            samples = self._step.samples
            self._frozen.rename(samples.names, like=samples.factors)
            if samples.names != self._names:
                self._names, self._table = samples.names, [[math.nan] * len(samples.names)] * _ROWS
        for index, name in enumerate(self._names if self._whole else ()):
            if name in self._whole and self._step.samples.is_sampled(index):
                self._step.samples.take_whole(index)
        self._step.start()

    def reset_run_state(self) -> None:
        self._step = None

    def _on_gradients_ready(self, engine: Engine, backward: GradientsReady) -> None:
        if self._step is not None:
            self._step.gradients_ready(backward.reached, backward.scale(self.scaler))

    def _on_step_decided(self, engine: Engine, step: OptimizerStep) -> None:
        if self._step is not None:
            self._step.measured_step_started(step)

    def _on_step_completed(self, engine: Engine, step: OptimizerStep) -> None:
        if self._step is not None:
            self._step.step_completed()

    def _on_train_step_completed(self, engine: Engine) -> None:
        if not self._is_running or self._step is None:
            return
        if not self._step.fits():
            text = f"parameters were replaced in the train step of iteration {engine.state.iteration}, so nothing is "
            self.report("parameters_replaced", f"{text}reported of it")
            return
        measured = self._step.completed()
        if measured is None:
            return
        norms = measured.gradients
        if self.scaler is not None:  # which handles overflows
            norms = norms.masked_fill(norms.isinf(), math.nan)
        ratios, is_few = torch.full_like(norms, math.nan), torch.zeros_like(norms)
        values: dict[str, Tensor] = {}
        if measured.moved is not None:
            ratios = measured.changes / (measured.weights + self.eps)
            is_equal = measured.changed_counts == 0
            # A sample of which nothing has moved says nothing of the other elements.
            ratios = ratios.masked_fill(~measured.moved | ratios.isinf() | is_equal & measured.is_sampled, math.nan)
            unmoved = is_equal & ~measured.is_sampled
            if self.frozen_update_ratio_threshold:
                unmoved |= ratios <= self.frozen_update_ratio_threshold
            frozen = self._frozen.observe(unmoved, measured.moved)
            limits = (self._step.samples.counts / _FEW).clamp(max=_FEW)
            is_few = (measured.moved & measured.is_sampled & (measured.changed_counts < limits)).to(norms.dtype)
            values["frozen_count"] = torch.where(measured.moved.any(), frozen.sum(dtype=ratios.dtype), math.nan)
            if measured.lost is not None:
                values["lost_update_fraction"] = measured.lost
        statistics = order_statistics(torch.stack([norms, ratios])).unbind()
        if measured.has_gradients:
            values |= _named("grad", statistics[0])
            values["vanishing_count"] = (norms < self.vanishing_grad_threshold).sum(dtype=norms.dtype)
            values["exploding_count"] = (norms > self.exploding_grad_threshold).sum(dtype=norms.dtype)
        if measured.moved is not None:
            values |= _named("update_ratio", statistics[1])
        self._table = torch.stack([norms, ratios, self._frozen.counts, is_few, measured.weights])
        self.publish(**values)
        if transfer.is_cpu(self._table):
            self._learn(self._table.tolist())

    def deferred_tensors(self) -> list[Tensor]:
        return [self._table] if self.metrics and isinstance(self._table, Tensor) else []

    def resolve_deferred(self, extra: list[list[float]]) -> dict[str, float]:
        if not extra:
            return {}
        count = len(self._names)
        self._table = [extra[0][i * count : (i + 1) * count] for i in range(_ROWS)]
        norms, ratios, still, _, weights = self._table
        self._learn(self._table)
        names = tags(self._names)
        largest = heapq.nlargest(self.top_k, (i for i in range(count) if norms[i] >= 0), key=norms.__getitem__)
        smallest = heapq.nsmallest(self.top_k, (i for i in range(count) if norms[i] >= 0), key=norms.__getitem__)
        heaviest = heapq.nlargest(self.top_k, (i for i in range(count) if weights[i] >= 0), key=weights.__getitem__)
        frozen = [i for i in range(count) if not math.isnan(ratios[i]) and self._frozen.is_frozen(still[i])]
        longest = heapq.nlargest(self.top_k, frozen, key=still.__getitem__)
        values = {f"topk_grad/{names[i]}": norms[i] for i in largest}
        values |= {f"smallest_grad/{names[i]}": norms[i] for i in smallest}
        values |= {f"largest_weight/{names[i]}": weights[i] for i in heaviest}
        values |= {f"topk_frozen/{names[i]}": still[i] for i in longest}
        for group, members in enumerate(self._groups()):
            moved = [i for i in members if ratios[i] >= 0]
            if moved:
                fastest = max(moved, key=ratios.__getitem__)
                values[f"largest_update_ratio/group_{group}/{names[fastest]}"] = ratios[fastest]
        return values

    def _groups(self) -> list[list[int]]:
        """Indices of the parameters in each group of the given optimizer."""
        if self.optimizer is None or self._step is None or not self.top_k:
            return []
        indices = {id(parameter): index for index, parameter in enumerate(self._step.samples.parameters)}
        groups = [map(id, group["params"]) for group in self.optimizer.param_groups]
        return [[indices[key] for key in group if key in indices] for group in groups]

    def _rows(self) -> list[list[float]]:
        self.on_host()
        # The table is still on the device if nothing is published, as after the run.
        rows: list[list[float]] = self._table.tolist() if isinstance(self._table, Tensor) else self._table
        self._table = rows
        self._learn(rows)
        return rows

    def _learn(self, rows: list[list[float]]) -> None:
        """Report parameters that are frozen, and choose those to measure whole, when the host knows the table."""
        new = {}
        for name, norm, ratio, count, is_few, _ in zip(self._names, *rows, strict=True):
            if self._frozen.is_frozen(count) and name not in self._reported:
                new[name] = norm
            # Updates of low-precision weights that rounding loses are no reason to copy the weights.
            if is_few and (math.isnan(ratio) or name not in self._narrow):
                self._whole.add(name)
        self._reported.update(new)
        if new:
            advice = _ROUNDING if self._step is not None and self._step.rounds(new) else ""
            steps = f"the last {self.frozen_patience_steps} monitored steps"
            text = f"parameters unchanged during {steps}: {', '.join(new)}{advice}"
            # Without a gradient it may be a part of the model that is rarely used.
            severity = "warning" if any(norm > 0 for norm in new.values()) else "note"
            self.report("frozen_parameters", text, severity=severity, names=tuple(new), once=False)


def _named(name: str, statistics: Tensor) -> dict[str, Tensor]:
    kinds = ("median", "p95", "min", "max")
    return {f"{name}_{kind}": value for kind, value in zip(kinds, statistics.unbind(), strict=True)}
