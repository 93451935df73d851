"""WeightUpdateHandler: update ratios, gradient norms and frozen parameters."""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from ignite.engine import Engine
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ignite_monitor.checks import check_count, check_real
from ignite_monitor.events.gradient_tracker import GradientsReady, OptimizerStep
from ignite_monitor.events.monitor_events import MonitorEvents, Phase
from ignite_monitor.keys import WEIGHT_UPDATE
from ignite_monitor.model.devices import move_like
from ignite_monitor.model.names import named_parameters, tags, top
from ignite_monitor.model.norms import order_statistics
from ignite_monitor.monitor import transfer
from ignite_monitor.monitor.arguments import check_optimizer
from ignite_monitor.monitor.base import Handlers
from ignite_monitor.monitor.scaler import ScaledMonitor
from ignite_monitor.weight_update.train_step import UpdateMeasurement

_ROWS = 5  # of a handler's table


class ParameterDiagnostics(NamedTuple):
    """One parameter in the last monitored iteration that had a gradient or a step.

    Attributes:
        grad_norm: the norm of its gradient; NaN if it had no new one.
        update_ratio: the norm of its change over its own; NaN if no step was to move it.
        is_vanishing: True if the norm is below ``vanishing_grad_threshold``.
        is_exploding: True if the norm is above ``exploding_grad_threshold``, or not finite.
        is_frozen: True if it had a step, and has not moved since the start of the first of the last
            ``frozen_patience_steps`` monitored ones.
    """

    grad_norm: float
    update_ratio: float
    is_vanishing: bool
    is_exploding: bool
    is_frozen: bool


class WeightUpdateHandler(ScaledMonitor, schema=WEIGHT_UPDATE):
    r"""Measure how far each train step moves every parameter, and find parameters that have stopped learning.

    The update ratio of a parameter is

    .. math:: \frac{\lVert w' - w\rVert_2}{\lVert w\rVert_2 + \epsilon}

    with w the weight before the train step and w' after it. Around 1e-3 is usual. The gradient norm is that of the last
    backward before the parameter's last step: unscaled, reduced over ranks, not clipped.

    {keys}

    The change of a parameter with more than ``sample_size`` elements is estimated from a sample. If fewer than 32 of
    its elements have moved, it is not reported, and all are measured from the next monitored iteration on. Keys with
    names of parameters appear when a logger writes.

    Args:
        model: the model, as the train step uses it (wrapped, if it is wrapped).
        optimizer: the optimizer whose parameters count; None for those of every optimizer.
        scaler: the GradScaler of the train step.
        sample_size: the number of elements to sample per parameter; None for all.
        vanishing_grad_threshold: the smallest gradient norm that is not vanishing.
        exploding_grad_threshold: the largest gradient norm that is not exploding.
        frozen_update_ratio_threshold: the largest update ratio of a parameter that does not move, also of all steps
            from one monitored step to the next together; with 0 a change of any element moves it.
        frozen_patience_steps: the number of consecutive monitored steps without a move after which a parameter is
            frozen, with a warning.
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

    _state_dict_all_req_keys = ("names", "counts", "hashes")

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
        check_optimizer(optimizer, model, optional=True)
        self.set_scaler(scaler)
        self.optimizer = optimizer
        self.sample_size = None if sample_size is None else check_count("sample_size", sample_size, least=1)
        self.vanishing_grad_threshold = check_real("vanishing_grad_threshold", vanishing_grad_threshold, least=0.0)
        self.exploding_grad_threshold = check_real("exploding_grad_threshold", exploding_grad_threshold, least=0.0)
        self.frozen_patience_steps = check_count("frozen_patience_steps", frozen_patience_steps, least=1)
        ratio = check_real("frozen_update_ratio_threshold", frozen_update_ratio_threshold, least=0.0)
        self.frozen_update_ratio_threshold = ratio
        self.top_k = check_count("top_k", top_k)
        self.eps = check_real("eps", eps, above=0.0, below=math.inf)
        self._names = [name for name, _, _ in named_parameters(model)]
        self._counts = torch.zeros(len(self._names), dtype=torch.float64, device="cpu")  # of steps without a move
        self._hashes = torch.zeros(len(self._names), dtype=torch.int64, device="cpu")  # with which the counts hold
        # Of the last monitored iteration, by parameter: norms of gradients, update ratios, counts (NaN without a step),
        # whether few sampled elements have moved, and norms of weights. A list once the host knows it.
        self._table: Tensor | list[list[float]] = _unknown(self._names)
        self._fully_measured: set[str] = set()  # names of parameters whose elements are all measured
        self._step: UpdateMeasurement | None = None  # while a run lasts
        self._reported: set[str] = set()  # names of parameters that were reported as frozen

    @property
    def diagnostics(self) -> dict[str, ParameterDiagnostics]:
        """Diagnostics of parameters by name, in the last monitored iteration with a gradient or a step.

        Synchronizes with the device.
        """
        rows = self._learn(self._table.tolist()) if isinstance(self._table, Tensor) else self._table
        return {
            name: ParameterDiagnostics(
                norm,
                ratio,
                norm < self.vanishing_grad_threshold,
                norm > self.exploding_grad_threshold,
                count >= self.frozen_patience_steps,
            )
            for name, norm, ratio, count, *_ in zip(self._names, *rows, strict=True)
        }

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return how many monitored steps in a row have not moved each parameter, and its hash."""
        hashes = self._hashes if self._step is None else self._step.hashes()
        whole = sorted(self._fully_measured)
        return OrderedDict(names=list(self._names), counts=self._counts, hashes=hashes, whole=whole)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state; parameters that it does not know, or with another hash, start at 0.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            TypeError: if it holds something else than names, counts and hashes.
            ValueError: if it was saved by a monitor of another kind, or of another model.
        """
        super().load_state_dict(state_dict)
        names, *values = state_dict["names"], state_dict["counts"], state_dict["hashes"]
        if not isinstance(names, list) or any(getattr(value, "shape", None) != (len(names),) for value in values):
            text = "Argument state_dict should hold a list in 'names' and tensors of as many elements in 'counts' and "
            raise TypeError(f"{text}'hashes', but it holds {names!r} and {values!r}")
        if set(names).isdisjoint(self._names):
            raise ValueError(f"Argument state_dict should be of this model, but its names are {names[:3]} …")
        saved = dict(zip(names, zip(*(value.tolist() for value in values), strict=True), strict=True))
        counts, hashes = zip(*(saved.get(name, (0, 0)) for name in self._names), strict=True)
        self._counts = torch.tensor(counts, dtype=torch.float64, device="cpu")
        self._hashes = torch.tensor(hashes, dtype=torch.int64, device="cpu")
        self._fully_measured = set(state_dict.get("whole", ()))
        self._step = None  # the counts are on the CPU: the next iteration moves them to the device

    def handlers(self) -> Handlers:
        return [
            *super().handlers(),
            (MonitorEvents.GRADIENTS_READY, self._on_gradients_ready),
            (Phase.STEP_DECIDED, self._on_step_decided),
            (MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed),
        ]

    def before_train_step(self, engine: Engine) -> None:
        if self._step is not None and not self._step.fits():
            self.reset_run_state()
        if self._step is None:
            self._step = UpdateMeasurement(self.model, self.sample_size, self.optimizer, self.eps)
            names = self._step.names
            if names != self._names:
                self._names, self._table = names, _unknown(names)
                self._counts, self._hashes = (it.new_zeros(len(names)) for it in (self._counts, self._hashes))
            self._counts = move_like(self._counts, self._step.factors)
        self._step.take_whole(self._fully_measured)
        self._step.start_from(self._hashes)

    def reset_run_state(self) -> None:
        if self._step is not None:
            self._hashes = torch.zeros_like(self._hashes)
            with contextlib.suppress(Exception):  # a run may end by an error of the device
                self._hashes = self._step.hashes()
        self._step = None

    def _on_gradients_ready(self, engine: Engine, backward: GradientsReady) -> None:
        if self._step is not None:
            self._step.gradients_ready(backward.reached, backward.scale(self.scaler))

    def _on_step_decided(self, engine: Engine, step: OptimizerStep) -> None:
        if self._step is not None:
            self._step.measured_step_started(step)

    def _on_train_step_completed(self, engine: Engine) -> None:
        if not self._is_running or self._step is None or not self._step.fits():
            return
        measured = self._step.completed()
        if measured is None:
            return
        norms, ratios, stepped = measured.gradients, measured.ratios, measured.stepped
        if self.scaler is not None:  # which handles overflows
            norms = norms.masked_fill(norms.isinf(), math.nan)
        statistics = order_statistics(torch.stack([norms, ratios])).unbind()
        values: dict[str, Tensor] = {}
        if measured.has_gradients:
            values |= _named("grad", statistics[0])
            values["vanishing_count"] = (norms < self.vanishing_grad_threshold).sum(dtype=norms.dtype)
            values["exploding_count"] = (norms > self.exploding_grad_threshold).sum(dtype=norms.dtype)
        unmoved, threshold = measured.unmoved, self.frozen_update_ratio_threshold
        if threshold:
            unmoved = unmoved | (ratios <= threshold)
        self._counts = self._counts * (measured.drifts <= threshold)
        self._counts = torch.where(stepped, (self._counts + 1) * unmoved, self._counts)
        counts = torch.where(stepped, self._counts, math.nan)
        if self._step.stepped:
            frozen = (counts >= self.frozen_patience_steps).sum(dtype=ratios.dtype)
            values |= _named("update_ratio", statistics[1])
            values["frozen_count"] = torch.where(stepped.any(), frozen, math.nan)
            if measured.lost is not None:
                values["lost_update_fraction"] = measured.lost
        self._table = torch.stack([norms, ratios, counts, measured.few.to(norms.dtype), measured.weights])
        self.publish(**values)
        if transfer.is_cpu(self._table):
            self._learn(self._table.tolist())

    def deferred_tensors(self) -> list[Tensor]:
        return [*self._table.unbind()] if isinstance(self._table, Tensor) else []

    def resolve_deferred(self, extra: list[list[float]]) -> dict[str, float]:
        if extra:
            self._learn(extra)
        names, (norms, ratios, _, _, weights) = tags(self._names), self._table
        values = top("topk_grad", names, norms, self.top_k) | top("largest_weight", names, weights, self.top_k)
        values |= top("smallest_grad", names, norms, self.top_k, least=True)
        if self.optimizer is not None and self._step is not None:
            indices = {id(parameter): index for index, parameter in enumerate(self._step.parameters)}
            for number, group in enumerate(self.optimizer.param_groups):
                members = [indices[id(item)] for item in group["params"] if id(item) in indices]
                of_group = [names[i] for i in members], [ratios[i] for i in members]
                values |= top(f"largest_update_ratio/group_{number}", *of_group, min(self.top_k, 1))
        return values

    def _learn(self, rows: list[list[float]]) -> list[list[float]]:
        """Keep and return the table, now on the host; report frozen parameters, and choose those to measure whole."""
        self._table, new = rows, {}
        for name, norm, _, count, is_few, _ in zip(self._names, *rows, strict=True):
            if count >= self.frozen_patience_steps and name not in self._reported:
                new[name] = norm
            if is_few:
                self._fully_measured.add(name)
        self._reported.update(new)
        if new:
            text = (
                f"parameters unchanged during the last {self.frozen_patience_steps} monitored steps: {', '.join(new)}"
            )
            # Without a gradient it may be a part of the model that is rarely used.
            severity = "warning" if any(norm > 0 for norm in new.values()) else "note"
            self.report("frozen_parameters", text, severity=severity, names=tuple(new), once=False)
        return rows


def _unknown(names: list[str]) -> list[list[float]]:
    return [[math.nan] * len(names)] * _ROWS


def _named(name: str, statistics: Tensor) -> dict[str, Tensor]:
    kinds = ("median", "p95", "min", "max")
    return {f"{name}_{kind}": value for kind, value in zip(kinds, statistics.unbind(), strict=True)}
