"""SpectralNormHandler: the largest singular value of every weight, and of its change in a train step."""

from __future__ import annotations

import functools
import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from ignite.engine import Engine
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.checks import check_choice, check_count, check_type
from ignite_monitor.events.gradient_tracker import OptimizerStep
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.keys import SPECTRAL
from ignite_monitor.model.devices import upload
from ignite_monitor.model.names import Pattern, Selection, named_parameters, tags
from ignite_monitor.model.norms import any_sharded
from ignite_monitor.model.samples import reshard
from ignite_monitor.model.sharding import check_whole
from ignite_monitor.model.updates import order_statistics
from ignite_monitor.monitor.base import Handlers, Monitor
from ignite_monitor.monitor.stepped import SteppedParameters
from ignite_monitor.spectral.effective_weights import EffectiveWeight, Weight, as_weights, effective_weights
from ignite_monitor.spectral.norm import METHODS
from ignite_monitor.spectral.spectra import Spectra, SpectralMeter


class SpectralNormHandler(Monitor, schema=SPECTRAL):
    r"""Measure the spectral norm of every weight after the train step.

    .. math:: \sigma = \lVert W\rVert_2 = \max_{\lVert x\rVert = 1} \lVert W x\rVert

    Weights that are matrices are measured, frozen ones included and shared ones once. Convolutions are flattened to
    (out, in·k…); stacked matrices, as experts of shape (n, out, in), are measured one by one as ``{name}/{i}``;
    embeddings have a norm, and no part in the conditions. Where a module computes its weight, by a parametrization,
    normalization or pruning, the result is measured. DTensors are gathered one at a time.

    {keys}

    ``"power"`` is a block Lanczos iteration, with a bound of its error by the residual. ``"ns5-fast"`` and
    ``"ns3-accurate"`` are Newton-Schulz iterations, biased and without a bound; if one fails, "power" replaces it.
    The condition keys stay of order 1 where features are learned at every width (arXiv:2310.17813); only weights that a
    step was to move count for updates. The ``topk`` keys appear when a logger writes.

    Args:
        model: the model, as the train step uses it (wrapped, where it is wrapped).
        method: ``"power"``, ``"ns5-fast"`` or ``"ns3-accurate"``.
        include: a regular expression: measure parameters in whose name it is found; None for all.
        exclude: a regular expression: skip parameters in whose name it is found.
        updates: whether to measure the change of each train step, which keeps a copy of the weights.
        top_k: the number of largest norms to publish by name.
        per_parameter: whether to publish every norm by name.
        prefix: the first part of the keys.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument has a value it can't have, no parameter is left to be measured, or
            FullyShardedDataParallel has sharded them.

    Examples:
        .. code-block:: python

            handler = SpectralNormHandler(model, include=r"layers\..*\.weight", updates=True)
            handler.attach(trainer, Events.ITERATION_STARTED(every=100))
            handler.log_to(tensorboard_logger, trainer)
    """

    _state_dict_all_req_keys = ("weights", "updates")

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
        check_whole(model)
        check_choice("method", method, *METHODS)
        check_type("updates", updates, bool, "bool")
        check_type("per_parameter", per_parameter, bool, "bool")
        self.method = method
        self.updates = updates
        self.top_k = check_count("top_k", top_k)
        self.per_parameter = per_parameter
        self._selection = Selection(include, exclude)
        about = f"{type(self).__name__} ({prefix})"
        self._weights = SpectralMeter(method, self.logger, f"{about}: weights")
        self._updates = SpectralMeter(method, self.logger, f"{about}: updates")
        if not self._effective():
            raise ValueError("Argument model should have parameters of two dimensions or more that are selected")
        complex_names = [name for name, each, _ in named_parameters(model) if each.is_complex()]
        skipped = ", ".join(name for name in complex_names if name in self._selection)
        if skipped:
            self._warn_once("complex weights are not reported: %s", skipped)
        self._before: dict[str, tuple[int, Tensor]] = {}  # by name, index of an effective weight and a copy
        self._stepped = SteppedParameters({})
        self._names: list[str] = []
        self._norms: Tensor | None = None

    @property
    def iterations(self) -> int:
        """How many steps "power" took in the last measurement, for the weight that needed most."""
        return self._weights.steps

    def state_dict(self) -> OrderedDict[str, Any]:
        """The methods in use: a quick one may have been replaced."""
        return OrderedDict(weights=self._weights.method, updates=self._updates.method)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            TypeError: if it is no mapping.
            ValueError: if it was saved by a monitor of another kind, or is damaged.
        """
        super().load_state_dict(state_dict)
        for name in ("weights", "updates"):
            check_choice(f"state_dict[{name!r}]", state_dict[name], *METHODS)
        for name, meter in (("weights", self._weights), ("updates", self._updates)):
            if state_dict[name] == "power":  # another method has been replaced
                meter.method = "power"

    def handlers(self) -> Handlers:
        handlers: Handlers = [(MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed)]
        if self.updates:
            handlers += [
                (MonitorEvents.OPTIMIZER_STEP_STARTED, self._on_step_started),
            ]
        return handlers

    @torch.no_grad()
    def start_iteration(self, engine: Engine) -> None:
        self._norms = None
        self._weights.warn()
        if self.updates:
            weights = self._effective()
            self._stepped = SteppedParameters(
                {id(part): i for i, each in enumerate(weights) for part in each.parameters}
            )
            self._before = {each.name: (i, each.value().detach().clone()) for i, each in enumerate(weights)}

    def reset_run_state(self) -> None:
        self._weights.warn(wait=True)
        self._before = {}
        self._stepped = SteppedParameters({})

    def _on_step_started(self, engine: Engine, step: OptimizerStep) -> Callable[[], Callable[[], object]]:
        # After the other monitors, which may hide gradients.
        return lambda: functools.partial(self._start_step, step.optimizer)

    def _start_step(self, optimizer: Optimizer) -> None:
        self._stepped.started(optimizer)

    @torch.no_grad()
    def _on_train_step_completed(self, engine: Engine) -> None:
        if not self._is_running:
            return
        weights = self._effective()
        measured = self._weights.measure(part for each in weights for part in as_weights(each, each.value()))
        values = self._summary(measured)
        self._names, self._norms = measured.names, measured.norms
        if self.per_parameter:
            kinds = ["embedding" if math.isnan(scale) else "norm" for scale in measured.scales]
            keys = [f"{kind}/{tag}" for kind, tag in zip(kinds, tags(measured.names), strict=True)]
            self.publish_table(keys, measured.norms)
        if self.updates:
            values |= _conditions("weight", measured.norms, measured.scales) | self._update_values(weights)
        self._before = {}
        self.publish(**values)

    def _summary(self, measured: Spectra) -> dict[str, Tensor]:
        norms = measured.norms
        is_known = ~norms.isnan()
        count = is_known.sum()
        mean = torch.where(is_known, norms, 0.0).sum() / count
        spread = torch.where(is_known, (norms - mean).square(), 0.0).sum() / count
        ranks = (measured.frobenius / norms).square()
        median, _, least, _ = order_statistics(ranks).unbind()
        return {
            "norm_max": _largest(norms),
            "norm_mean": mean,
            "norm_std": spread.sqrt(),
            "stable_rank_min": least,
            "stable_rank_median": median,
            "error_max": _largest(measured.errors),
            "iterations": torch.full_like(mean, self._weights.steps),
        }

    def _update_values(self, weights: list[EffectiveWeight]) -> dict[str, Tensor]:
        # Without a step on this rank there may be one on another rank, which gathers DTensors.
        if not self._stepped and not any_sharded(part for each in weights for part in each.parameters):
            return {}
        origins: list[int] = []

        def changes() -> Iterator[Weight]:
            for each in weights:
                origin, before = self._before.get(each.name, (0, None))
                if before is not None and before.shape == each.shape:
                    wide = torch.promote_types(before.dtype, torch.float32)
                    parts = as_weights(each, each.value().to(wide) - before.to(wide))
                    origins.extend([origin] * len(parts))
                    yield from parts

        if not any(each.name in self._before for each in weights):
            return {}
        measured = self._updates.measure(changes())
        if not self._stepped:
            return {}
        device = measured.norms.device
        at = upload(torch.tensor(origins, device="cpu"), device)
        moved = self._stepped.mask(1 + max(origins), device)[at]
        norms = torch.where(moved, measured.norms, torch.nan)
        return {
            "update_norm_max": _largest(norms),
            "update_error_max": _largest(torch.where(moved, measured.errors, torch.nan)),
            **_conditions("update", norms, measured.scales),
        }

    def _effective(self) -> list[EffectiveWeight]:
        reshard(self.model)
        return [each for each in effective_weights(self.model) if each.name in self._selection]

    # Values on the host

    def deferred_tensors(self) -> list[Tensor]:
        return [] if self._norms is None or not self.top_k or not self.metrics else [self._norms]

    def resolve_deferred(self, extra: list[list[float]]) -> dict[str, float]:
        if not extra:
            return {}
        known = [(norm, tag) for tag, norm in zip(tags(self._names), extra[0], strict=True) if not math.isnan(norm)]
        return {f"topk/{tag}": norm for norm, tag in heapq.nlargest(self.top_k, known, key=lambda each: each[0])}


def _largest(values: Tensor) -> Tensor:
    """The largest number; NaN if there is none."""
    return order_statistics(values)[3]


def _conditions(of: str, norms: Tensor, scales: list[float]) -> dict[str, Tensor]:
    r"""Norms over :math:`\sqrt{out/in}`, without those of embeddings."""
    divisors = upload(torch.tensor(scales, dtype=norms.dtype, device="cpu"), norms.device)
    median, _, _, largest = order_statistics(norms / divisors).unbind()
    return {f"{of}_condition_max": largest, f"{of}_condition_median": median}
