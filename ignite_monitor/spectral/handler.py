"""SpectralNormHandler: the largest singular value of every weight, and of what each step did to it."""

from __future__ import annotations

import functools
import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
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
    r"""Measures the spectral norm of every weight, as the train step leaves it.

    .. math:: \sigma = \lVert W\rVert_2 = \max_{\lVert x\rVert = 1} \lVert W x\rVert

    the largest singular value, of every weight that is a matrix, frozen ones included and shared ones once.
    Convolutions are flattened to (out, in·k…). Of matrices that are stacked in one parameter, as experts of shape (n,
    out, in), each is measured by itself, as ``{name}/{i}``. Tables (embeddings, and positions of shape (1, L, d)) have
    a norm, and no part in the conditions below. Where a weight is computed of others, by a parametrization, weight or
    spectral normalisation, or LoRA (PEFT), the result is measured, under the name that the module's weight has.

    {keys}

    The values named ``topk`` appear when a logger writes. The others wait for nothing.
    A weight that is not finite is left out, with one warning; one that is 0 has norm 0 and no stable rank.

    **Methods.** ``"power"`` is power iteration on WᵀW from the vectors that the last measurement ended with, in its
    accelerated form: block Lanczos, with fresh random vectors besides. These find what the known vectors have no part
    of, and bound what has not been found: the error exceeds its bound once in 100,000 times at most, whatever has
    happened to the weight in between. On the CPU it goes on until the bound is 1e-3 (64 steps at most). On other
    devices, and for sharded weights, looking at the bound would mean to wait: there the number of steps is fixed, more
    the first time and after a measurement whose bound was above 1e-3, and ``error_max`` says what came of it. Where a
    side of a weight is 224 or less, WᵀW is small enough to be looked at itself, which needs no steps.

    ``"ns5-fast"`` and ``"ns3-accurate"`` estimate the norm by Newton-Schulz iterations, which bring small singular
    values to 1 too slowly: on Gaussian matrices from 256² to 2048² the first is off by −34 % to −2 %, the second by
    −5 % to −21 % (and seven plain power iterations by −5 %), and they take longer. Where one gives what no matrix can
    have, ``"power"`` takes its place, and a warning says so. ``"svd"`` is exact to rounding, and waits for the device.

    Products are made in float32, of weights in bfloat16 and float16 too, whatever precision the training allows;
    the iterations of the Newton-Schulz methods in bfloat16 where the weight is.

    **Spectral condition.** Features of a layer learn at the same rate at every width if both ‖W‖ and ‖ΔW‖ are of the
    order of :math:`\sqrt{out/in}` (arXiv:2310.17813): the conditions stay of order 1. For ``Conv1D`` of transformers
    "in" are the rows. Only weights that an optimizer step was to move count for updates: with a gradient, and a
    learning rate other than 0. In an iteration without a step the update's keys are absent.

    **Memory.** Six vectors for each weight; while it measures, for one batch of weights at a time a float32 copy and
    at most 1200 vectors each, mostly less than 300. With
    ``updates=True`` in monitored iterations a copy of all weights that are measured: use ``include``. Of a DTensor with
    its rows sharded every rank keeps its part and has the norm of the whole; any other placement, and any other method
    than "power", gathers one weight at a time.

    Args:
        model: the model, as the train step uses it (wrapped, where it is wrapped).
        method: ``"power"``, ``"ns5-fast"``, ``"ns3-accurate"`` or ``"svd"``.
        include: a regular expression: measure parameters in whose name it is found; None for all.
        exclude: a regular expression: leave out parameters in whose name it is found.
        updates: whether to measure what each train step changes, too.
        top_k: how many of the largest norms to publish by name.
        per_parameter: whether to publish every norm by name.
        prefix: what the values' names start with.

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
        self._weights = SpectralMeter(method, self.logger, prefix, "weights")
        self._updates = SpectralMeter(method, self.logger, prefix, "updates")
        if not self._acting():
            raise ValueError("Argument model should have parameters of two dimensions or more that are selected")
        left_out = [name for name, each, _ in named_parameters(model) if each.is_complex() and name in self._selection]
        if left_out:
            self.logger.warning("%s: complex weights are left out: %s", prefix, ", ".join(left_out))
        self._before: dict[str, tuple[int, Tensor]] = {}  # of each weight, which acting weight it is of, and its copy
        self._stepped = SteppedParameters({})
        self._names: list[str] = []
        self._norms: Tensor | None = None

    @property
    def iterations(self) -> int:
        """How many steps "power" took in the last measurement, for the weight that needed most."""
        return self._weights.steps

    def state_dict(self) -> OrderedDict[str, Any]:
        """The vectors that the next measurement starts with, by parameter, and how many there have been."""
        return OrderedDict(weights=self._weights.state_dict(), updates=self._updates.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state; parameters that it does not know, or that have another shape, start anew.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            TypeError: if it is no mapping, or holds something else than counts and tensors.
            ValueError: if it was saved by a monitor of another kind, or is damaged.
        """
        super().load_state_dict(state_dict)
        meters = []
        for name, meter in (("weights", self._weights), ("updates", self._updates)):
            loaded = SpectralMeter(meter.method, self.logger, self.prefix, name)
            check_type(f"state_dict[{name!r}]", state_dict[name], Mapping, "dict")
            loaded.load_state_dict(state_dict[name])
            meters.append(loaded)
        self._weights, self._updates = meters

    # What it listens to

    def handlers(self) -> Handlers:
        handlers: Handlers = [(MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed)]
        if self.updates:
            handlers += [
                (MonitorEvents.OPTIMIZER_STEP_STARTED, self._on_step_started),
            ]
        return handlers

    def start_iteration(self, engine: Engine) -> None:
        self._norms = None
        self._weights.warn()
        if not self.updates:
            return
        acting = self._acting()
        self._stepped = SteppedParameters({id(part): i for i, each in enumerate(acting) for part in each.parameters})
        self._before = {
            weight.name: (i, weight.local.clone())
            for i, each in enumerate(acting)
            for weight in as_weights(each, self._updates.is_whole)
        }

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
        acting = self._acting()
        weights = [weight for each in acting for weight in as_weights(each, self._weights.is_whole)]
        measured = self._weights.measure(weights)
        values = self._sums(measured)
        self._names, self._norms = [weight.name for weight in weights], measured.norms
        if self.per_parameter:
            for tag, weight, norm in zip(tags(self._names), weights, measured.norms.unbind(), strict=True):
                values[f"{'table' if math.isnan(weight.scale) else 'norm'}/{tag}"] = norm
        if self.updates:
            values |= _conditions("weight", measured.norms, weights) | self._update_values(acting)
        self._before = {}
        self.publish(**values)

    def _sums(self, measured: Spectra) -> dict[str, Tensor]:
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

    def _update_values(self, acting: list[EffectiveWeight]) -> dict[str, Tensor]:
        # What makes no step on this rank may make one on another, and takes collectives there.
        if not self._stepped and not any_sharded(part for each in acting for part in each.parameters):
            return {}
        changes, origins = [], []
        for weight in (weight for each in acting for weight in as_weights(each, self._updates.is_whole)):
            origin, before = self._before.get(weight.name, (0, None))
            if before is not None and before.shape == weight.local.shape:
                changes.append(weight.less(before))
                origins.append(origin)
        if not changes:
            return {}
        measured = self._updates.measure(changes)
        if not self._stepped:
            return {}
        device = measured.norms.device
        size = 1 + max(origins)
        moved = self._stepped.mask(size, device)[upload(torch.tensor(origins, device="cpu"), device)]
        norms = torch.where(moved, measured.norms, torch.nan)
        return {
            "update_norm_max": _largest(norms),
            "update_error_max": _largest(torch.where(moved, measured.errors, torch.nan)),
            **_conditions("update", norms, changes),
        }

    def _acting(self) -> list[EffectiveWeight]:
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
    """The largest that is not NaN; NaN if there is none."""
    return order_statistics(values)[3]


def _conditions(of: str, norms: Tensor, weights: list[Weight]) -> dict[str, Tensor]:
    r"""Norms over :math:`\sqrt{out/in}`, of those that are no tables."""
    scales = upload(torch.tensor([weight.scale for weight in weights], dtype=norms.dtype, device="cpu"), norms.device)
    median, _, _, largest = order_statistics(norms / scales).unbind()
    return {f"{of}_condition_max": largest, f"{of}_condition_median": median}
