"""SpectralNormHandler: the largest singular value of every weight, and of its change in a train step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from ignite.engine import Engine
from torch import Tensor, nn

from ignite_monitor.checks import check_choice, check_count, check_type
from ignite_monitor.events.gradient_tracker import OptimizerStep
from ignite_monitor.events.monitor_events import MonitorEvents, Phase
from ignite_monitor.keys import SPECTRAL
from ignite_monitor.model.devices import move
from ignite_monitor.model.dtensor import any_dtensor, reshard
from ignite_monitor.model.names import Pattern, Selection, listed, named_parameters, tags, top
from ignite_monitor.model.norms import order_statistics
from ignite_monitor.model.sampled_step import UpdatedParameters
from ignite_monitor.monitor.base import Handlers, Monitor
from ignite_monitor.monitor.ranks import Group
from ignite_monitor.monitor.transfer import DeferredFlag
from ignite_monitor.spectral.effective_weights import (
    EffectiveWeight,
    Label,
    effective_weights,
    embedding,
    labelled_matrices,
)
from ignite_monitor.spectral.norm import METHODS, SpectralNorms
from ignite_monitor.spectral.spectra import measure_all

_NOT_COMPUTED = "nothing is reported, since a weight can't be computed"


class SpectralNormHandler(Monitor, schema=SPECTRAL):
    r"""Measure the spectral norm of every weight after the train step.

    .. math:: \sigma = \lVert W\rVert_2 = \max_{\lVert x\rVert = 1} \lVert W x\rVert

    Parameters of two dimensions or more are measured, unless their names end in ``bias``, frozen ones included and
    shared ones once: convolutions flattened to (out, in·k…), stacked matrices (experts) one by one as ``{name}/{i}``.
    Embeddings and stacked matrices, whose output dimension is unknown, have no spectral scale. Weights
    that a module computes are measured as computed. Complex ones are not measured.

    {keys}

    ``"power"`` is a block Lanczos iteration, with a bound of its error by the residual. ``"ns5-fast"`` and
    ``"ns3-accurate"`` are Newton-Schulz iterations, biased and without a bound. Only weights that a step
    was to move count for updates. The ``topk`` keys appear when a logger writes.

    Args:
        model: the model, as the train step uses it (wrapped, if it is wrapped).
        method: ``"power"``, ``"ns5-fast"`` or ``"ns3-accurate"``.
        include: a regular expression: measure parameters in whose name it is found; None for all.
        exclude: a regular expression: skip parameters in whose name it is found.
        updates: whether to measure the change of each train step, which keeps a copy of the weights.
        top_k: the number of largest norms to publish by name.
        per_parameter: whether to publish every norm by name.
        group: the ranks whose optimizers step together, a ProcessGroup or DeviceMesh; no value is reduced over them.
        prefix: the first part of the keys.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument has a value it can't have, no parameter is left to be measured, or
            FullyShardedDataParallel has sharded them.

    Examples:
        .. code-block:: python

            handler = SpectralNormHandler(model, include=r"layers\..*\.weight", updates=True)
            handler.attach(trainer, Events.ITERATION_STARTED(every=100))
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        method: str = "power",
        include: Pattern = None,
        exclude: Pattern = None,
        updates: bool = False,
        top_k: int = 5,
        per_parameter: bool = False,
        group: Group = None,
        prefix: str = "spectral",
    ) -> None:
        super().__init__(model, prefix, group=group)
        check_choice("method", method, *METHODS)
        check_type("updates", updates, bool, "bool")
        check_type("per_parameter", per_parameter, bool, "bool")
        self.method = method
        self.updates = updates
        self.top_k = check_count("top_k", top_k)
        self.per_parameter = per_parameter
        self._selection = Selection(include, exclude)
        self._nonfinite = DeferredFlag()  # a weight or an update
        names = [name for name, parameter, _ in named_parameters(model) if parameter.is_complex()]
        skipped = [name for name in names if name in self._selection]
        if not self._effective():
            reason = f"; complex ones are not measured: {listed(skipped, 5)}" if skipped else ""
            raise ValueError(
                f"Argument model should have real weights of two dimensions or more that are selected{reason}"
            )
        if skipped:
            self.report("complex_weights", f"complex weights are not reported: {listed(skipped, 5)}", names=skipped)
        self._before: dict[str, tuple[int, Tensor]] = {}  # by name, index in ``_stepped`` and a copy
        self._stepped = UpdatedParameters({})
        self._names: list[str] = []
        self._norms: Tensor | None = None

    def handlers(self) -> Handlers:
        handlers: Handlers = [(Phase.STEP_DECIDED, self._on_step_decided)] if self.updates else []
        return [*handlers, (MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed)]

    @torch.no_grad()
    def start_iteration(self, engine: Engine) -> None:
        self._norms, self._before = None, {}
        self._report_nonfinite()
        if not self.updates:
            return
        indices: dict[int, int] = {}  # by id of a parameter; one for weights that share parameters
        with self._training_continues("not_measured", _NOT_COMPUTED):
            for weight in self._effective():
                ids = [id(part) for part in weight.parameters]
                index = next((indices[key] for key in ids if key in indices), len(self._before))
                indices.update(dict.fromkeys(ids, index))
                self._before[weight.name] = index, weight.value().detach().clone()
        self._stepped = UpdatedParameters(indices)

    def reset_run_state(self) -> None:
        self._report_nonfinite(wait=True)
        self._before, self._stepped = {}, UpdatedParameters({})

    def _on_step_decided(self, engine: Engine, step: OptimizerStep) -> None:
        self._stepped.started(step.optimizer)

    @torch.no_grad()
    def _on_train_step_completed(self, engine: Engine) -> None:
        if self._is_running:
            with self._training_continues("not_measured", _NOT_COMPUTED):
                self._measure()
            self._before = {}

    def _measure(self) -> None:
        weights = self._effective()
        if not weights:
            self.report("no_weights", "the model has no weight matrices any more, so nothing is published")
            return
        matrices = (pair for weight in weights for pair in labelled_matrices(weight, weight.value()))
        labels, measured = measure_all(matrices, self.method)
        self._names, self._norms = [label.name for label in labels], measured.norms
        norm, error, scale, rank = self._order_statistics(labels, measured)
        unit = norm[3].clamp(min=torch.finfo(norm.dtype).tiny)  # squares of float64 may leave its range
        relative = measured.norms / unit
        mean = relative.nanmean()
        values: dict[str, float | Tensor] = {
            "norm_max": norm[3],
            "norm_mean": mean * unit,
            "norm_std": (relative - mean).square().nanmean().sqrt() * unit,
            "stable_rank_min": rank[2],
            "stable_rank_median": rank[0],
            "error_max": error[3],
            "iterations": measured.steps,
            "weight_spectral_scale_max": scale[3],
            "weight_spectral_scale_median": scale[0],
        }
        if self.per_parameter:
            kinds = ["embedding" if label.weight.layout is embedding else "norm" for label in labels]
            keys = [f"{kind}/{tag}" for kind, tag in zip(kinds, tags(self._names), strict=True)]
            self.publish_table(keys, measured.norms)
        if self.updates:
            values |= self._update_values(weights)
        self.publish(**values)
        self._report_nonfinite()

    def _update_values(self, weights: list[EffectiveWeight]) -> dict[str, Tensor]:
        shapes = {name: before.shape for name, (_, before) in self._before.items()}
        weights = [weight for weight in weights if shapes.get(weight.name) == weight.shape]
        # Without a step on this rank there may be one on another rank, which gathers DTensors.
        is_dtensor = any_dtensor(part for weight in weights for part in weight.parameters)
        if not weights or not (self._stepped or is_dtensor):
            return {}
        matrices = (pair for weight in weights for pair in labelled_matrices(weight, self._change(weight)))
        labels, measured = measure_all(matrices, self.method)
        device, indices = measured.norms.device, [self._before[label.weight.name][0] for label in labels]
        moved = self._stepped.mask(len(self._before), device)[move(torch.tensor(indices, device="cpu"), device)]
        norm, error, scale, _ = self._order_statistics(labels, measured, moved)
        if not self._stepped:
            return {}
        return {
            "update_norm_max": norm[3],
            "update_error_max": error[3],
            "update_spectral_scale_max": scale[3],
            "update_spectral_scale_median": scale[0],
        }

    def _change(self, weight: EffectiveWeight) -> Tensor:
        _, before = self._before[weight.name]
        wide = torch.promote_types(before.dtype, torch.float32)
        return weight.value().to(wide) - before.to(wide)

    def _order_statistics(
        self, labels: list[Label], measured: SpectralNorms, counted: Tensor | None = None
    ) -> Sequence[Tensor]:
        """Statistics of norms, errors, spectral scales and stable ranks, of the weights whose norms are not NaN."""
        norms = measured.norms
        self._nonfinite.set(norms.isnan().any())
        norms = norms if counted is None else torch.where(counted, norms, torch.nan)
        scales = torch.tensor([label.scale for label in labels], dtype=norms.dtype, device="cpu")
        ranks = (measured.frobenius / norms).square()
        return order_statistics(
            torch.stack([norms, measured.errors + 0 * norms, norms / move(scales, norms.device), ranks])
        ).unbind()

    def _report_nonfinite(self, wait: bool = False) -> None:
        if self._nonfinite.take(wait):
            self.report("nonfinite", "weights or updates that are not finite are not reported")

    def _effective(self) -> list[EffectiveWeight]:
        reshard(self.model)
        return [weight for weight in effective_weights(self.model) if weight.name in self._selection]

    def deferred_tensors(self) -> list[Tensor]:
        return [] if self._norms is None or not self.top_k or not self.metrics else [self._norms]

    def resolve_deferred(self, extra: list[list[float]]) -> dict[str, float]:
        return top("topk", tags(self._names), extra[0], self.top_k) if extra else {}
