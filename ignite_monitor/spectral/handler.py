"""SpectralNormHandler: the largest singular value of every weight, and of what each step did to it."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from ignite.engine import Engine
from torch import Tensor, nn

from ignite_monitor.checks import check_count, check_type
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.keys import SPECTRAL
from ignite_monitor.model.devices import upload
from ignite_monitor.model.linear_maps import weights_by_input
from ignite_monitor.model.names import named_parameters, tags
from ignite_monitor.model.norms import any_sharded
from ignite_monitor.model.samples import reshard
from ignite_monitor.model.selection import Pattern, Selection
from ignite_monitor.model.sharding import check_whole
from ignite_monitor.model.updates import order_statistics
from ignite_monitor.monitor.base import Handlers, Monitor
from ignite_monitor.monitor.stepped import HostMasks, SteppedParameters
from ignite_monitor.spectral.norm import METHODS
from ignite_monitor.spectral.spectra import Spectra, SpectralMeter
from ignite_monitor.spectral.weights import Weight, as_weight, is_matrix


class SpectralNormHandler(Monitor, schema=SPECTRAL):
    r"""Measures the spectral norm of every weight, as the train step leaves it.

    .. math:: \sigma = \lVert W\rVert_2 = \max_{\lVert x\rVert = 1} \lVert W x\rVert

    the largest singular value, of every parameter with two or more dimensions, frozen ones included and shared ones
    once. Those with more than two are flattened to (out, in·k…). Where a parametrization or weight normalisation makes
    a weight of others, these are the parameters.

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
    order of :math:`\sqrt{out/in}` (arXiv:2310.17813): the conditions stay of order 1. For an embedding, and for
    ``Conv1D`` of transformers, "in" are the rows. Only weights that an optimizer step was to move count for updates:
    with a gradient, and a learning rate other than 0. In an iteration without a step the update's keys are absent.

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
        check_type("method", method, str, "str")
        if method not in METHODS:
            raise ValueError(f"Argument method should be one of {', '.join(METHODS)}, but given {method!r}")
        check_type("updates", updates, bool, "bool")
        check_type("per_parameter", per_parameter, bool, "bool")
        self.method = method
        self.updates = updates
        self.top_k = check_count("top_k", top_k)
        self.per_parameter = per_parameter
        self._selection = Selection(include, exclude)
        self._weights = SpectralMeter(method, self.logger, prefix, "weights")
        self._updates = SpectralMeter(method, self.logger, prefix, "updates")
        self._by_input: dict[int, int] = {}
        if not self._parameters():
            raise ValueError("Argument model should have parameters of two dimensions or more that are selected")
        self._before: dict[str, Tensor] = {}
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
                (MonitorEvents.GRADIENTS_READY, self._on_gradients_ready),
                (MonitorEvents.OPTIMIZER_STEP_STARTED, self._on_step_started),
                (MonitorEvents.OPTIMIZER_STEP_COMPLETED, self._on_step_completed),
            ]
        return handlers

    def start_iteration(self, engine: Engine) -> None:
        self._norms = None
        self._weights.warn()
        if not self.updates:
            return
        parameters = self._parameters()
        self._stepped = SteppedParameters({id(each): place for place, each in enumerate(parameters.values())})
        weights = self._as_weights(parameters, self._updates)
        self._before = {name: weight.local.clone() for name, weight in weights.items()}

    def release(self) -> None:
        self._weights.warn(wait=True)
        self._before = {}
        self._stepped = SteppedParameters({})

    def _on_gradients_ready(self, engine: Engine) -> None:
        if self._is_running and self._source is not None and self._source.stepping is not None:
            self._stepped.met_gradients(self._source.stepping)

    def _on_step_started(self, engine: Engine) -> None:
        if self._is_running and self._source is not None and self._source.stepping is not None:
            self._stepped.started(self._source.stepping)

    def _on_step_completed(self, engine: Engine) -> None:
        if self._is_running and self._source is not None and self._source.stepping is not None:
            self._stepped.completed(self._source.stepping)

    @torch.no_grad()
    def _on_train_step_completed(self, engine: Engine) -> None:
        if not self._is_running:
            return
        parameters = self._parameters()
        weights = self._as_weights(parameters, self._weights)
        measured = self._weights.measure(weights.values())
        conditions = measured.norms / self._scales(weights, parameters, measured.norms)
        values = self._sums(measured)
        if self.per_parameter:
            values |= {f"norm/{tag}": norm for tag, norm in zip(tags(weights), measured.norms.unbind(), strict=True)}
        if self.updates:
            values |= _statistics("weight_condition", conditions)
            values |= self._update_values(parameters)
        self._names, self._norms = list(weights), measured.norms
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

    def _update_values(self, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        # What makes no step on this rank may make one on another, and takes collectives there.
        if not self._stepped and not any_sharded(parameters.values()):
            return {}
        places = {name: place for place, name in enumerate(self._before)}
        parameters = {name: each for name, each in parameters.items() if name in places}
        changes = {
            name: weight.less(self._before[name])
            for name, weight in self._as_weights(parameters, self._updates).items()
            if weight.local.shape == self._before[name].shape
        }
        if not changes:
            return {}
        measured = self._updates.measure(changes.values())
        if not self._stepped:
            return {}
        device = measured.norms.device
        of_changes = upload(torch.tensor([places[name] for name in changes], device="cpu"), device)
        moved = self._stepped.mask(HostMasks(len(places), device))[of_changes]
        norms = torch.where(moved, measured.norms, torch.nan)
        scales = self._scales(changes, parameters, norms)
        return {
            "update_norm_max": _largest(norms),
            "update_error_max": _largest(torch.where(moved, measured.errors, torch.nan)),
            **_statistics("update_condition", norms / scales),
        }

    def _parameters(self) -> dict[str, nn.Parameter]:
        reshard(self.model)
        self._by_input = weights_by_input(self.model)
        return {
            name: parameter
            for name, parameter, _ in named_parameters(self.model)
            if is_matrix(parameter) and name in self._selection
        }

    def _as_weights(self, parameters: dict[str, nn.Parameter], meter: SpectralMeter) -> dict[str, Weight]:
        whole = meter.method != "power"
        return {
            name: as_weight(name, parameter, whole, self._by_input.get(id(parameter), 0))
            for name, parameter in parameters.items()
        }

    def _scales(self, weights: dict[str, Weight], parameters: dict[str, nn.Parameter], like: Tensor) -> Tensor:
        r""":math:`\sqrt{out/in}` of each weight."""
        scales = []
        for name, weight in weights.items():
            rows, columns = weight.rows, weight.local.shape[1]
            is_turned = self._by_input.get(id(parameters[name])) == 0
            scales.append(math.sqrt(columns / rows if is_turned else rows / columns))
        return upload(torch.tensor(scales, dtype=like.dtype, device="cpu"), like.device)

    # Values on the host

    def extra_transfer(self) -> list[Tensor]:
        return [] if self._norms is None or not self.top_k or not self.metrics else [self._norms]

    def on_transfer(self, extra: list[list[float]]) -> dict[str, float]:
        if not extra:
            return {}
        known = [(norm, tag) for tag, norm in zip(tags(self._names), extra[0], strict=True) if not math.isnan(norm)]
        return {f"topk/{tag}": norm for norm, tag in heapq.nlargest(self.top_k, known, key=lambda each: each[0])}


def _largest(values: Tensor) -> Tensor:
    """The largest that is not NaN; NaN if there is none."""
    return order_statistics(values)[3]


def _statistics(name: str, values: Tensor) -> dict[str, Tensor]:
    median, _, _, largest = order_statistics(values).unbind()
    return {f"{name}_max": largest, f"{name}_median": median}
