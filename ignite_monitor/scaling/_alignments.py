"""The alignment of a model's layers in the calls of a train step."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.model.devices import device_of, move_like, upload, wide_dtype
from ignite_monitor.model.linear_maps import CONVOLUTIONS, TRANSPOSED, feature_dim, linear_map
from ignite_monitor.model.modes import aside, full_precision, is_plain
from ignite_monitor.model.structure import modules_by_name
from ignite_monitor.monitor.ranks import sum_over_ranks
from ignite_monitor.reference.call import Call, Comparison, NotComparableError
from ignite_monitor.reference.reference import Reference
from ignite_monitor.scaling._layers import layer_name
from ignite_monitor.scaling.alignment import TERMS, alignment_sums
from ignite_monitor.scaling.parametrization import Parametrization


class AlignmentCalls(Comparison):
    """Measures how the calls of a model's layers are aligned.

    Args:
        layers: what each layer's modules are called, by its name.
        sample_size: how many rows of a batch to measure.

    Attributes:
        layers: names of the layers.
        rows: name of a module -> row of its layer.
    """

    def __init__(self, reference: Reference, layers: Mapping[str, Sequence[str]], sample_size: int) -> None:
        self.layers = list(layers)
        self.rows = {name: row for row, names in enumerate(layers.values()) for name in names}
        self._reference = reference
        self._sample_size = sample_size
        self._sums: list[tuple[str, Tensor]] = []

    def clear(self) -> None:
        self._sums = []

    def keep(self, call: Call) -> list[Tensor | None]:
        return [self._sample(call)]

    def enter(self, call: Call) -> Tensor:
        module: Any = call.module
        bound = linear_map(module)
        if bound is None:
            raise NotComparableError("its forward has been replaced since the handler was made")
        theirs: Any = self._reference.modules[call.name]
        weight, initial = module.weight, theirs.weight
        x0, x = call.kept.pop(), self._sample(call)
        if x is None or x0 is None:
            raise NotComparableError("its input is no dense tensor on one device")
        if x.shape != x0.shape:
            raise NotComparableError(f"its inputs are {tuple(x.shape)}, in the reference {tuple(x0.shape)}")
        if not isinstance(weight, Tensor) or not is_plain(weight):
            raise NotComparableError("its weight is sharded while it runs")
        wide = wide_dtype(x.device)
        with aside(), full_precision(x.device):
            # Mixed precision of fully_shard rounds weights; the reference's are rounded alike.
            w0 = initial.to(weight.dtype).to(wide)
            z0 = x0.to(wide)
            product, change = bound(call.args, call.kwargs), weight.to(wide) - w0
            return alignment_sums(product, fan_in(module), z0, x.to(wide) - z0, w0, change)

    def passed(self, results: dict[str, list[Any]]) -> None:
        self._sums += [(name, sums) for name, calls in results.items() for sums in calls]

    def result(self, incomplete: Collection[str]) -> Tensor:
        """The alignments over all ranks, each of which has to ask: a row for each layer, NaN where there is none.

        Args:
            incomplete: names of modules whose layers are left out.
        """
        device = device_of(self._reference.module)
        table = torch.zeros(len(self.layers), 2, len(TERMS), dtype=wide_dtype(device), device=device)
        without = {self.rows[name] for name in incomplete}
        found = [(self.rows[name], sums) for name, sums in self._sums if self.rows[name] not in without]
        if found:
            rows = upload(torch.tensor([row for row, _ in found], device="cpu"), device)
            table.index_add_(0, rows, torch.stack([move_like(sums, table) for _, sums in found]))
        table = sum_over_ranks(table)
        return torch.where(table[:, 1] > 0, table[:, 0] / table[:, 1], math.nan)

    def _sample(self, call: Call) -> Tensor | None:
        x = call.args[0] if call.args else call.kwargs.get("input")
        if not isinstance(x, Tensor) or not is_plain(x) or not x.is_floating_point():
            return None
        with aside():
            # A row has all dimensions from that of the features on.
            rows = x.detach().reshape(-1, *x.shape[x.ndim + feature_dim(call.module) :])
            step = max(len(rows) // self._sample_size, 1)
            # A copy, so that no whole batch stays with it, and nothing that the model does in place changes it.
            return rows[::step][: self._sample_size].clone()


def fan_in(module: nn.Module) -> float:
    """How many products each output of a linear map is the sum of.

    Args:
        module: a module for which :func:`linear_map` gives something.
    """
    weight: Any = module.weight
    if isinstance(module, TRANSPOSED):
        return float(weight[:, 0].numel() / module.groups / math.prod(module.stride))
    if isinstance(module, (nn.Linear, *CONVOLUTIONS)):
        return float(weight.numel() / weight.shape[0])
    return float(weight.shape[0])


def find_layers(model: nn.Module, parametrization: Parametrization | None) -> dict[str, list[str]]:
    """The layers whose alignment is defined, each with the names of its modules.

    Args:
        parametrization: with it only its layers count, and only those whose inputs grow with the width.
    """
    modules = modules_by_name(model)
    found: dict[str, list[str]] = {}
    wanted: dict[nn.Module, str] = {}
    if parametrization is not None:
        for layer in parametrization.layers.values():
            if layer.layer_type in ("hidden", "readout") and layer.is_module:
                wanted |= dict.fromkeys(layer.module.modules(), layer.name)
    for name, module in modules.items():
        weight: Any = getattr(module, "weight", None)
        if linear_map(module) is None or not weight.numel() or fan_in(module) <= 1:
            continue
        layer_is = layer_name(modules, name) if parametrization is None else wanted.get(module)
        if layer_is is not None:
            found.setdefault(layer_is, []).append(name)
    return found
