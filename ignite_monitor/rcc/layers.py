"""What the calls of layers, beside the same calls of their reference, say of weights and inputs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ignite_monitor.model._torch import buffers_in, foreach_sub, modules_in, parameters_in
from ignite_monitor.model._torch import version as version_of
from ignite_monitor.model.devices import move_like, upload, wide_dtype
from ignite_monitor.model.forward import before_forward
from ignite_monitor.model.linear_maps import feature_dim, is_plain, linear_map
from ignite_monitor.model.norms import any_sharded
from ignite_monitor.model.tensors import floating_tensors
from ignite_monitor.model.updates import order_statistics
from ignite_monitor.monitor.ranks import sum_over_ranks, world_size
from ignite_monitor.rcc.terms import (
    QUANTITIES,
    Norms,
    change_norms,
    feature_norms,
    input_norms,
    normalized_change,
    output_change,
    product_norms,
    weight_share,
)
from ignite_monitor.reference.call import Call, Comparison, NotComparableError
from ignite_monitor.reference.reference import Reference

Weights = dict[str, Tensor]

_COUNT = 2 * len(QUANTITIES)  # with the bias, and without it
_KINDS = (*QUANTITIES, *QUANTITIES, "weight_share", "weight_share")


class LayerChanges(Comparison):
    """Measures the calls of a model's layers, and adds up their norms."""

    def __init__(self, reference: Reference, tags: dict[str, str]) -> None:
        self._layers = {name: _layer_of(name, reference) for name in tags}
        self._rows = {name: row for row, name in enumerate(tags)}
        self._tags = list(tags.values())
        # Layers and offsets, the sum of norms for each, and how many norms that is of.
        self._sums: list[tuple[list[tuple[str, int]], Tensor, int]] = []

    def keep(self, call: Call) -> list[Tensor | None]:
        return self._layers[call.name].keep(call)

    def enter(self, call: Call) -> Any:
        return self._layers[call.name].enter(call)

    def leave(self, call: Call) -> Norms:
        return self._layers[call.name].leave(call)

    def clear(self) -> None:
        self._sums = []

    def passed(self, results: dict[str, list[Any]]) -> None:
        vectors: dict[tuple[str, int], list[Tensor]] = {}
        for name, calls in results.items():
            for norms in calls:
                for offset, each in norms.items():
                    vectors.setdefault((name, offset), []).append(each)
        # What has as many norms is summed at once.
        alike: dict[Any, list[tuple[str, int]]] = {}
        for where, found in vectors.items():
            alike.setdefault((found[0].device, found[0].dtype, *map(len, found)), []).append(where)
        for (device, _, *sizes), cells in alike.items():
            if sum(sizes):
                table = torch.cat([each for cell in cells for each in vectors[cell]]).view(len(cells), -1)
                self._sums.append((cells, table.sum(1, dtype=wide_dtype(device)), sum(sizes)))

    def values(self, incomplete: Collection[str], device: torch.device) -> tuple[list[str], Tensor, dict[str, Tensor]]:
        """Names and values by layer, and what there is over layers by name; NaN stands for what is absent.

        Incomplete layers are left out; where nothing was measured the values are on the device.
        """
        means, measured = self._mean_over_ranks(incomplete, device)
        with_bias, without = means.unflatten(1, (2, -1)).unbind(1)
        shares = [weight_share(each[:, :1], each[:, 1:2]) for each in (with_bias, without)]
        # Of what is measured on no rank, or isn't finite.
        table = torch.cat([means, *shares], 1).nan_to_num_(math.nan, math.nan, math.nan)
        cells = sorted([*measured, *((row, _COUNT + offset // 5) for row, offset in measured if offset in (1, 6))])
        index = [row * len(_KINDS) + offset for row, offset in cells]
        values = table.flatten()[upload(torch.tensor(index, dtype=torch.long, device="cpu"), table.device)]
        over_layers: dict[str, Tensor] = {}
        of_layers = order_statistics(table[:, :2].T)
        for offset, kind in enumerate(QUANTITIES[:2]):
            if any(cell[1] == offset for cell in cells):
                over_layers |= {f"{kind}_max": of_layers[offset, 3], f"{kind}_median": of_layers[offset, 0]}
        return [self._name_of(*cell) for cell in cells], values, over_layers

    def _name_of(self, row: int, offset: int) -> str:
        without = len(QUANTITIES) <= offset < _COUNT or offset > _COUNT
        return f"{_KINDS[offset]}/{self._tags[row]}{'.weight' if without else ''}"

    def _mean_over_ranks(
        self, incomplete: Collection[str], device: torch.device
    ) -> tuple[Tensor, set[tuple[int, int]]]:
        """Means by layer and offset, not finite where there is none; and which of them some rank may have measured.

        The size is the same on every rank, whatever that has reached, and so is the number of collectives.
        """
        device = self._sums[0][1].device if self._sums else device
        size, dtype = len(self._rows) * _COUNT, wide_dtype(device)
        cells: list[int] = []
        counts = [0] * (size + 1)  # the last is of what is left out
        for each, _, count in self._sums:
            for name, offset in each:
                cells.append(size if name in incomplete else self._rows[name] * _COUNT + offset)
                counts[cells[-1]] += count
        both = torch.zeros(2, size + 1, dtype=dtype, device=device)
        both[1] = upload(torch.tensor(counts, dtype=dtype, device="cpu"), device)
        if self._sums:
            index = upload(torch.tensor(cells, device="cpu"), device)
            both[0].index_add_(0, index, torch.cat([move_like(totals, both) for _, totals, _ in self._sums]))
        if world_size() == 1:
            measured = {cell for cell, count in enumerate(counts[:-1]) if count}
        else:
            both = sum_over_ranks(both)
            layers = enumerate(self._layers.values())
            measured = {row * _COUNT + offset for row, layer in layers for offset in range(layer.count)}
        means = (both[0] / both[1])[:-1].view(-1, _COUNT)
        return means, {divmod(cell, _COUNT) for cell in measured}


class _Layer:
    """A layer whose change is known before it runs, and of which only the input is kept.

    Attributes:
        count: of how many of :data:`Norms` there can be any.
    """

    def __init__(self, name: str, reference: Reference) -> None:
        self._name = name
        self._reference = reference.modules[name]
        self._run = reference.run
        self._dim = feature_dim(self._reference)
        self.count = len(QUANTITIES)

    def keep(self, call: Call) -> list[Tensor | None]:
        return [_first(call.args, call.kwargs)]

    @torch.no_grad()
    def enter(self, call: Call) -> Norms:
        # First of all, since ranks may communicate here and must not part before.
        weights, initial = self._weights(call)
        x, reference_x = _first(call.args, call.kwargs), call.kept.pop()
        if x is None or reference_x is None:
            raise NotComparableError("no floating-point tensor is among its inputs")
        _check(x, reference_x)
        with _without_autocast(x):
            dtype = _wide_dtype(x.dtype, weights["weight"].dtype)
            return self._norms(call, x.to(dtype), reference_x.to(dtype), _to(dtype, weights), _to(dtype, initial))

    def leave(self, call: Call) -> Norms:
        norms: Norms = call.entered
        return norms

    def _norms(self, call: Call, x: Tensor, reference_x: Tensor, weights: Weights, initial: Weights) -> Norms:
        raise NotImplementedError

    def _weights(self, call: Call) -> tuple[Weights, Weights]:
        """The model's and the reference's parameters by name.

        Raises:
            NotComparableError: if one of them can't be had whole.
        """
        module: Any = call.module
        weights = {name: getattr(module, name) for name, each in parameters_in(module).items() if each is not None}
        initial = {name: getattr(self._reference, name) for name in weights}
        if any(map(_dispatches, (*weights.values(), *initial.values()))):
            # A layer that fully_shard has been given is whole while it runs, and not a moment longer.
            def look(*_: Any) -> None:
                initial.update((name, getattr(self._reference, name).clone()) for name in weights)

            if any_sharded(initial.values()):
                with before_forward([self._reference], look):
                    self._run(self._name, call.args, call.kwargs)
            if any_sharded([*weights.values(), *initial.values()]):
                raise NotComparableError("its weights are sharded, here or in the reference; one that is not would do")
        # Mixed precision of fully_shard rounds weights; the reference's are rounded alike.
        return weights, {name: initial[name].to(each.dtype) for name, each in weights.items()}


class _Linear(_Layer):
    def __init__(self, name: str, reference: Reference) -> None:
        super().__init__(name, reference)
        self.count *= 1 if parameters_in(self._reference).get("bias") is None else 2

    def _norms(self, call: Call, x: Tensor, reference_x: Tensor, weights: Weights, initial: Weights) -> Norms:
        bound = linear_map(call.module)
        if bound is None:
            raise NotComparableError("its forward has been replaced since the handler was made")
        function, moved = bound(call.args, call.kwargs), _differences(weights, initial)
        bias = moved["bias"].reshape(-1, *[1] * (-self._dim - 1)) if "bias" in moved else None
        values = moved["weight"], initial["weight"], x - reference_x, x
        return product_norms(function, *values, dim=self._dim, bias_change=bias, twice=bias is not None)


class _Normalization(_Layer):
    def __init__(self, name: str, reference: Reference) -> None:
        super().__init__(name, reference)
        self.count *= 2

    def _norms(self, call: Call, x: Tensor, reference_x: Tensor, weights: Weights, initial: Weights) -> Norms:
        settings: Any = call.module
        now, change = normalized_change(
            x, reference_x, settings.normalized_shape, settings.eps, centred=isinstance(settings, nn.LayerNorm)
        )
        moved = _differences(weights, initial)
        values = moved["weight"], initial["weight"], change, now
        norms = product_norms(torch.mul, *values, dim=self._dim, bias_change=moved.get("bias"), twice=True)
        return norms | input_norms(x, x - reference_x, self._dim)


class _LowPrecision(_Layer):
    """A small layer whose rounded outputs would differ by their rounding: it is evaluated in float32."""

    def _norms(self, call: Call, x: Tensor, reference_x: Tensor, weights: Weights, initial: Weights) -> Norms:
        if len(call.args) + len(call.kwargs) > 1:
            raise NotComparableError("it should have one floating-point tensor as its input")
        runs = ((x, weights), (x, initial), (reference_x, initial))
        change = output_change(*(self._run(self._name, (at,), {}, each) for at, each in runs))
        return input_norms(x, x - reference_x, self._dim) | change_norms(change, self._dim)


class _Embedding(_Layer):
    def __init__(self, name: str, reference: Reference) -> None:
        super().__init__(name, reference)
        self.count = 1

    def keep(self, call: Call) -> list[Tensor | None]:
        return []

    @torch.no_grad()
    def enter(self, call: Call) -> Norms:
        rows = call.args[0] if call.args else call.kwargs["input"]
        output, crossed = (F.embedding(rows, each["weight"]) for each in self._weights(call))
        dtype = _wide_dtype(output.dtype)
        return {0: feature_norms(output.to(dtype) - crossed.to(dtype))}


class _Evaluated(_Layer):
    """Any other layer: the reference's is evaluated on the model's inputs."""

    def keep(self, call: Call) -> list[Tensor | None]:
        return [_first(call.args, call.kwargs), _first((call.output,))]

    def enter(self, call: Call) -> Any:
        x, reference_x = _first(call.args, call.kwargs), call.kept[0]
        call.kept[0] = None
        # The inputs of the whole model are those of the reference.
        crossed = _first((self._run(self._name, call.args, call.kwargs),)) if self._name else call.kept[1]
        inputs = None
        if x is not None and reference_x is not None:
            _check(x, reference_x)
            with torch.no_grad(), _without_autocast(x):
                dtype = _wide_dtype(x.dtype)
                wide = x.to(dtype)
                inputs = input_norms(wide, wide - reference_x.to(dtype), self._dim)
        return inputs, None if crossed is None else crossed.detach(), None if x is None else (x, version_of(x))

    def leave(self, call: Call) -> Norms:
        inputs, crossed, seen = call.entered
        output, reference_output = _first((call.output,)), call.kept[1]
        if output is None or crossed is None or reference_output is None:
            raise NotComparableError("no floating-point tensor is in its output")
        if seen is not None and version_of(seen[0]) != seen[1]:
            raise NotComparableError("it changes its input in place")
        _check(output, crossed)
        _check(output, reference_output)
        with _without_autocast(output):
            dtype = _wide_dtype(output.dtype)
            change = output_change(output.to(dtype), crossed.to(dtype), reference_output.to(dtype))
            norms = change_norms(change, self._dim)
        return {0: norms[0]} if inputs is None else inputs | norms


def _layer_of(name: str, reference: Reference) -> _Layer:
    """How to measure one of a reference's layers."""
    module = reference.modules[name]
    if is_plain(module, nn.Embedding) and getattr(module, "max_norm", None) is None:
        return _Embedding(name, reference)
    if is_plain(module, nn.LayerNorm, nn.RMSNorm):
        return _Normalization(name, reference)
    if linear_map(module) is not None:
        return _Linear(name, reference)
    return _LowPrecision(name, reference) if _is_low_norm(module) else _Evaluated(name, reference)


def _is_low_norm(module: nn.Module) -> bool:
    """Whether a module is a normalization in low precision, as the RMSNorm that language models bring along."""
    parameters = {name: each for name, each in parameters_in(module).items() if each is not None}
    return (
        type(module).__name__.endswith("Norm")
        and not modules_in(module)
        and not buffers_in(module)
        and parameters.keys() in ({"weight"}, {"weight", "bias"})
        and all(each.ndim == 1 and each.is_floating_point() and each.itemsize < 4 for each in parameters.values())
    )


def _first(args: Iterable[Any], kwargs: dict[str, Any] | None = None) -> Tensor | None:
    for each in (*args, *(kwargs or {}).values()):
        if isinstance(each, Tensor):
            if each.is_floating_point():
                return each
        elif each is not None and (found := next(floating_tensors(each), None)) is not None:
            return found[1]
    return None


def _check(values: Tensor, others: Tensor) -> None:
    # A DTensor's class is the only one here that dispatches its operations itself.
    if (
        type(values).__torch_dispatch__ is not Tensor.__torch_dispatch__
        or values.is_nested
        or values.layout != _strided
    ):
        raise NotComparableError("its tensors are sharded, nested or sparse")
    if values.shape != others.shape:
        raise NotComparableError(f"its tensors are {tuple(values.shape)}, in the reference {tuple(others.shape)}")


_strided = torch.strided


def _dispatches(tensor: Tensor) -> bool:
    """Whether a tensor is of a class that dispatches its operations, as DTensor does."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def _wide_dtype(*dtypes: torch.dtype) -> torch.dtype:
    dtype = torch.float32
    for each in dtypes:
        dtype = torch.promote_types(dtype, each)
    return dtype


def _differences(weights: Weights, others: Weights) -> Weights:
    return dict(zip(weights, foreach_sub([*weights.values()], [*others.values()]), strict=True))


def _to(dtype: torch.dtype, weights: Weights) -> Weights:
    return {name: each.to(dtype) for name, each in weights.items()}


def _without_autocast(values: Tensor) -> contextlib.AbstractContextManager[Any]:
    kind = values.device.type
    if not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=False)
