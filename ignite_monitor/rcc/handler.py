"""RCCHandler: whether it is the weights or their inputs that change what a layer computes."""

from __future__ import annotations

import functools
import math
import os
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from ignite.engine import Engine
from torch import Tensor, nn

from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.model.device_of import device_of
from ignite_monitor.model.devices import move_like, upload, wide_dtype
from ignite_monitor.model.eager import Eager
from ignite_monitor.model.names import tags
from ignite_monitor.model.selection import Pattern, Selection
from ignite_monitor.model.structure import is_layer
from ignite_monitor.model.updates import order_statistics
from ignite_monitor.monitor.base import Handlers, Monitor
from ignite_monitor.monitor.rank_reduction import is_joined
from ignite_monitor.monitor.ranks import sum_over_ranks, world_size
from ignite_monitor.rcc.layer_changes import QUANTITIES, LayerChanges, Sums
from ignite_monitor.rcc.terms import weight_share
from ignite_monitor.reference.passes import ReferencePasses
from ignite_monitor.reference.reference import Reference

_PLACES = 2 * len(QUANTITIES)  # with the bias, and without it
_WIDTH = _PLACES + 2  # and the weights' share in either
_UPDATES, _DRIFTS = [0, len(QUANTITIES)], [1, len(QUANTITIES) + 1]


class RCCHandler(Monitor):
    r"""Splits each layer's change since the reference into what its weights do and what reaches it.

    This is the refined coordinate check of `On the Surprising Effectiveness of Large Learning Rates under Standard
    Width Scaling <https://arxiv.org/abs/2505.22491>`_.

    In monitored iterations a frozen reference, by default the model as it was when the handler was made, is run on
    the same inputs as the model, with the same dropout masks. For a layer with weights :math:`W_t` (:math:`W_0` in the
    reference) and input :math:`x_t` (:math:`x_0`),

    .. math:: W_t x_t - W_0 x_0 = (W_t - W_0)\, x_t + W_0\, (x_t - x_0)

    and for any other function f of its weights, :math:`f_t(x_t) - f_0(x_0) = (f_t(x_t) - f_0(x_t)) + (f_0(x_t) -
    f_0(x_0))`.

    =======================================================  ====================================================
    in ``engine.state.metrics`` (0-dim tensors)              meaning
    =======================================================  ====================================================
    ``rcc/weight_update/{layer}``                            :math:`\lVert(W_t - W_0)\, x_t\rVert`
    ``rcc/input_drift/{layer}``                              :math:`\lVert W_0\, (x_t - x_0)\rVert`
    ``rcc/input/{layer}``                                    :math:`\lVert x_t\rVert`
    ``rcc/input_change/{layer}``                             :math:`\lVert x_t - x_0\rVert`
    ``rcc/output_change/{layer}``                            :math:`\lVert W_t x_t - W_0 x_0\rVert`
    ``rcc/weight_share/{layer}``                             ``weight_update / (weight_update + input_drift)``
    ``rcc/weight_update_max``, ``rcc/weight_update_median``  of the layers' ``weight_update``
    ``rcc/input_drift_max``, ``rcc/input_drift_median``      of the layers' ``input_drift``
    =======================================================  ====================================================

    Norms are l2 over the features (the last dimension; that of the channels for convolutions, BatchNorm, InstanceNorm,
    GroupNorm and PReLU), and means over all else: positions, samples, calls, micro-batches and ranks. Where a layer
    has a bias, its change belongs to ``weight_update`` and ``output_change``; the first six are there a second time as
    ``rcc/…/{layer}.weight``, without it. LayerNorm and RMSNorm are taken as functions of their input x, and as
    ``{layer}.weight`` as products of weight and normalised input. A layer without a floating-point input, as an
    Embedding, has ``weight_update`` alone. All are 0 before the first update. What no rank measures, and what isn't
    finite, is absent; where only a device knows, it is NaN there and is not logged.

    **Layers** are all modules with parameters of their own, those of the user included; tied weights count in either
    module. For Linear, convolutions, Embedding, LayerNorm and RMSNorm, both terms are computed from differences, in
    float32 or better whatever autocast does, so that an update of a millionth has as many digits as any. Normalizations
    of your own in low precision, classes whose names end in ``Norm``, are evaluated in float32. Of all others the
    reference's module is evaluated once more on the model's input, under the model's autocast; of those that hold
    other layers, an nn.MultiheadAttention or a model with a position embedding of its own, the whole is taken, what is
    in it included. Of several inputs or outputs the first floating-point tensor is the one that is measured. Weights
    are those at the time of the forward pass.

    Passes of the whole model in training mode count; not what activation checkpointing repeats. A layer that the model
    calls more or less often than the reference does, as experts to which tokens are routed, is left out with a
    warning, and so is everything where the reference can't be run.

    **Training** is the same, as far as can be seen from outside: what the reference draws from the generators of torch,
    NumPy and Python, and from those that modules have as attributes, the model draws once more. A generator at the top
    of a file, and counters and caches there that a forward changes, move on in both passes. Compiled models run eagerly
    in monitored iterations; eager and compiled code round differently, and with some compilers, inductor among them,
    dropout draws other masks in either.

    **Several ranks.** A monitored iteration takes one collective. Under ``join()`` of DistributedDataParallel, where
    not all ranks have data, nothing is published.

    **Cost** of a monitored iteration: a forward pass without gradients, two products with each weight, and memory for
    the reference's weights and for its layers' inputs, which are freed as the model reaches them.

    Args:
        model: the model, as the train step uses it (wrapped, where it is wrapped).
        reference: ``"init"`` for a frozen copy of the model as it is now, which is saved with the handler; a module of
            the same structure, on the same device; or the path of a file with a state_dict.
        include: a regular expression, to be found in the names of the layers to measure; None for all of them.
        exclude: a regular expression that must not be found in them.
        offload: whether the layers' inputs wait in the host's memory.
        prefix: what the values' names start with.

    Attributes:
        reference: the reference, a module.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument has a value it can't have, or the reference is of another structure than the model;
            where the model can't be copied, as one of ``fully_shard``, a module has to be given.

    Examples:
        .. code-block:: python

            handler = RCCHandler(model)
            handler.attach(trainer, Events.ITERATION_STARTED(every=100))
            handler.log_to(tensorboard_logger, trainer)
            trainer.run(loader, max_epochs=5)
    """

    _state_dict_all_req_keys = ("reference",)

    def __init__(
        self,
        model: nn.Module,
        *,
        reference: str | os.PathLike[str] | nn.Module = "init",
        include: Pattern = None,
        exclude: Pattern = None,
        offload: bool = False,
        prefix: str = "rcc",
    ) -> None:
        super().__init__(model, prefix)
        selection = Selection(include, exclude)
        self._reference = Reference(model, reference)
        self.reference = self._reference.module
        self._layers = [
            name for name, module in self._reference.modules.items() if is_layer(name, module) and name in selection
        ]
        if not self._layers:
            raise ValueError("Arguments include and exclude should leave a layer with parameters, but leave none")
        self._tags = tags(name or "_root_" for name in self._layers)
        warn = functools.partial(self.logger.warning, "%s: %s", prefix)
        self._changes = LayerChanges(self._reference, self._layers)
        self._passes = ReferencePasses(self._reference, self._layers, self._changes, warn, offload=bool(offload))
        self._monitored_count = 0

    def paused(self) -> AbstractContextManager[None]:
        """A context in which forward passes are not seen."""
        return self._passes.paused()

    def state_dict(self) -> OrderedDict[str, Any]:
        """The weights of the reference; None where it was given as a module or a path."""
        return OrderedDict(reference=self._reference.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Compare with the reference of a saved run from now on.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            TypeError: if it is no mapping.
            ValueError: if it was saved by a monitor of another kind, or with a reference of another kind or structure.
        """
        super().load_state_dict(state_dict)
        self._reference.load_state_dict(state_dict["reference"])

    # What it listens to

    def handlers(self) -> Handlers:
        return [(MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed)]

    def contexts(self) -> list[AbstractContextManager[Any]]:
        if not self._is_running:
            return []
        return [Eager(self.model, self._reference.module), self._passes.watched()]

    def start_iteration(self, engine: Engine) -> None:
        self._changes.norms = []
        self._monitored_count += 1

    def on_host(self) -> dict[str, float]:
        return {name: value for name, value in super().on_host().items() if not math.isnan(value)}

    def ended(self) -> None:
        if self._monitored_count and not self._changes.seen and not self._passes.warned:
            self.logger.warning(
                "%s: none of %d monitored iterations had a forward pass of the whole model in training mode, so "
                "nothing is published",
                self.prefix,
                self._monitored_count,
            )

    def release(self) -> None:
        self._changes.norms = []

    def _on_train_step_completed(self, engine: Engine) -> None:
        if not self._is_running:
            return
        norms, self._changes.norms = self._changes.norms, []
        if world_size() > 1 and is_joined(self.model):
            self._passes.say("ranks may have run out of data under join(), so nothing is published")
            return
        table, measured = self._mean_over_ranks(norms)
        shares = weight_share(table[:, _UPDATES], table[:, _DRIFTS])
        table = torch.cat([table, shares], 1)
        # Of what is measured on no rank, or isn't finite.
        table = torch.where(table.isfinite(), table, math.nan)
        drifts = [(cell - cell % _WIDTH, cell % _WIDTH) for cell in measured if cell % _WIDTH in _DRIFTS]
        cells = sorted(measured | {start + _PLACES + _DRIFTS.index(place) for start, place in drifts})
        values = table.flatten()[upload(torch.tensor(cells, dtype=torch.long, device="cpu"), table.device)]
        # On the CPU there is no waiting to learn what is not there.
        if values.device.type == "cpu" and len(missing := values.isnan().nonzero()):
            absent = set(missing.flatten().tolist())
            cells = [cell for i, cell in enumerate(cells) if i not in absent]
            values = values[~values.isnan()]
        if not cells:
            return
        for place, kind in enumerate(("weight_update", "input_drift")):
            if any(cell % _WIDTH == place for cell in cells):
                median, _, _, largest = order_statistics(table[:, place]).unbind()
                self.publish(**{f"{kind}_max": largest, f"{kind}_median": median})
        self.publish_table([self._name_of(cell) for cell in cells], values)

    def _name_of(self, cell: int) -> str:
        row, place = divmod(cell, _WIDTH)
        if place < _PLACES:
            without, quantity = divmod(place, len(QUANTITIES))
            kind = QUANTITIES[quantity]
        else:
            without, kind = place - _PLACES, "weight_share"
        return f"{kind}/{self._tags[row]}{'.weight' if without else ''}"

    def _mean_over_ranks(self, norms: list[Sums]) -> tuple[Tensor, set[int]]:
        """Means by layer and place, NaN where there is none; and the cells that some rank may have measured.

        The size is the same on every rank, whatever that has reached, and so is the number of collectives.
        """
        rows = {name: row for row, name in enumerate(self._layers)}
        device = norms[0][1].device if norms else device_of(self.model)
        dtype = wide_dtype(device)
        counts = [0] * (len(rows) * _PLACES)
        cells = [[rows[name] * _PLACES + place for name, place in where] for where, _, _ in norms]
        for each, (_, _, count) in zip(cells, norms, strict=True):
            for cell in each:
                counts[cell] += count
        both = torch.zeros(2, len(counts), dtype=dtype, device=device)
        both[1] = upload(torch.tensor(counts, dtype=dtype, device="cpu"), device)
        if norms:
            index = upload(torch.tensor([cell for each in cells for cell in each], device="cpu"), device)
            both[0].index_add_(0, index, torch.cat([move_like(totals, both) for _, totals, _ in norms]))
        if world_size() == 1:
            measured = {cell for cell, count in enumerate(counts) if count}
        else:
            both = sum_over_ranks(both)
            measured = {row * _PLACES + place for name, row in rows.items() for place in self._changes.places(name)}
        means = (both[0] / both[1]).reshape(-1, _PLACES)
        return means, {cell // _PLACES * _WIDTH + cell % _PLACES for cell in measured}
