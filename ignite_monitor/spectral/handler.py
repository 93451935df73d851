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
from ignite_monitor.model.names import Pattern, Selection, listed, tags, top
from ignite_monitor.model.norms import order_statistics
from ignite_monitor.model.sampling import UpdatedParameters
from ignite_monitor.monitor.base import Handlers, Monitor
from ignite_monitor.monitor.transfer import DeferredFlag
from ignite_monitor.spectral.matrices import Label, MatrixWeight, labelled_matrices, matrix_weights
from ignite_monitor.spectral.norm import METHODS, SpectralNorms
from ignite_monitor.spectral.spectra import measure_all


class SpectralNormHandler(Monitor, schema=SPECTRAL):
    r"""Measure the spectral norm of every weight after the train step.

    .. math:: \sigma = \lVert W\rVert_2 = \max_{\lVert x\rVert = 1} \lVert W x\rVert

    Parameters of two dimensions or more are measured, unless their names end in ``bias``, frozen ones included and
    shared ones once: convolutions flattened to (out, in·k…), other parameters of more than two dimensions (experts) as
    stacks of matrices, one by one as ``{name}/{i}``. Embeddings and stacks have no spectral scale.
    Not measured are complex parameters, and those from which a module computes its weight (parametrization, weight or
    spectral normalization, pruning).

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
        prefix: str = "spectral",
    ) -> None:
        super().__init__(model, prefix)
        check_choice("method", method, *METHODS)
        check_type("updates", updates, bool, "bool")
        check_type("per_parameter", per_parameter, bool, "bool")
        self.method = method
        self.updates = updates
        self.top_k = check_count("top_k", top_k)
        self.per_parameter = per_parameter
        self._selection = Selection(include, exclude)
        self._nonfinite = DeferredFlag()  # a weight or an update
        if not self._weights():
            text = "real weights of two dimensions or more that are selected, and not computed by their modules"
            raise ValueError(f"Argument model should have {text}")
        self._before: list[tuple[MatrixWeight, Tensor]] = []  # and copies, in the order of ``_stepped``
        self._stepped = UpdatedParameters({})
        self._names: list[str] = []
        self._norms: Tensor | None = None

    def handlers(self) -> Handlers:
        handlers: Handlers = [(Phase.STEP_DECIDED, self._on_step_decided)] if self.updates else []
        return [*handlers, (MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed)]

    @torch.no_grad()
    def before_train_step(self, engine: Engine) -> None:
        self._norms, self._before = None, []
        if not self.updates:
            return
        weights = self._weights()
        self._before = [(weight, weight.parameter.detach().clone()) for weight in weights]
        self._stepped = UpdatedParameters({id(weight.parameter): index for index, weight in enumerate(weights)})

    def on_run_end(self) -> None:
        self._report_nonfinite(wait=True)

    def reset_run_state(self) -> None:
        self._before, self._stepped = [], UpdatedParameters({})
        self._nonfinite = DeferredFlag()

    def _on_step_decided(self, engine: Engine, step: OptimizerStep) -> None:
        self._stepped.started(step.optimizer, step.made)

    @torch.no_grad()
    def _on_train_step_completed(self, engine: Engine) -> None:
        if self._is_running:
            self._measure()
            self._before = []

    def _measure(self) -> None:
        weights = self._weights()
        if not weights:
            return
        matrices = (pair for weight in weights for pair in labelled_matrices(weight, weight.parameter.detach()))
        labels, measured = measure_all(matrices, self.method)
        self._names, self._norms = [label.name for label in labels], measured.norms
        norm, error, scale, rank = self._order_statistics(labels, measured)
        values = {
            "norm_max": norm[3],
            "norm_mean": measured.norms.nanmean(),
            "stable_rank_min": rank[2],
            "stable_rank_median": rank[0],
            "error_max": error[3],
            "weight_spectral_scale_max": scale[3],
            "weight_spectral_scale_median": scale[0],
        }
        if self.per_parameter:
            self.publish_table([f"norm/{tag}" for tag in tags(self._names)], measured.norms)
        if self.updates:
            values |= self._update_values()
        self.publish(**values)
        self._report_nonfinite()

    def _update_values(self) -> dict[str, Tensor]:
        pairs = [(weight, before) for weight, before in self._before if before.shape == weight.parameter.shape]
        # Without a step on this rank there may be one on another rank, which gathers DTensors.
        if not pairs or not (self._stepped or any_dtensor(weight.parameter for weight, _ in pairs)):
            return {}
        matrices = (item for pair in pairs for item in labelled_matrices(pair[0], _change(*pair)))
        labels, measured = measure_all(matrices, self.method)
        indices = {weight.name: index for index, (weight, _) in enumerate(self._before)}
        device = measured.norms.device
        at = torch.tensor([indices[label.weight] for label in labels], device="cpu")
        moved = self._stepped.mask(len(indices), device)[move(at, device)]
        norm, error, scale, _ = self._order_statistics(labels, measured, moved)
        return {
            "update_norm_max": norm[3],
            "update_error_max": error[3],
            "update_spectral_scale_max": scale[3],
            "update_spectral_scale_median": scale[0],
        }

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

    def _weights(self) -> list[MatrixWeight]:
        """Return the weights to measure, and report the first others."""
        reshard(self.model)
        weights, special = matrix_weights(self.model, self._selection)
        if special:
            text = f"complex and computed weights are not measured: {listed(special, 5)}"
            self.report("special_weights", text, names=special)
        return weights

    def deferred_tensors(self) -> list[Tensor]:
        return [] if self._norms is None else [self._norms]

    def resolve_deferred(self, extra: list[list[float]]) -> dict[str, float]:
        return top("topk", tags(self._names), extra[0], self.top_k) if extra else {}


def _change(weight: MatrixWeight, before: Tensor) -> Tensor:
    wide = torch.promote_types(before.dtype, torch.float32)
    return weight.parameter.detach().to(wide) - before.to(wide)
