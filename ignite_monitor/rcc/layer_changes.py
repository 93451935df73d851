"""What the calls of a model's layers, beside those of a reference, say of weights and inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ignite_monitor.model._torch import buffers_in, modules_in, parameters_in
from ignite_monitor.model._torch import version as version_of
from ignite_monitor.model.devices import wide_dtype
from ignite_monitor.model.forward import before_forward
from ignite_monitor.model.linear_maps import feature_dim, is_plain, linear_map
from ignite_monitor.model.norms import any_sharded, is_sharded
from ignite_monitor.model.tensors import floating_tensors
from ignite_monitor.rcc.terms import (
    Change,
    feature_norms,
    linear_change,
    normalized_change,
    output_change,
)
from ignite_monitor.reference.passes import NotComparableError
from ignite_monitor.reference.reference import Reference

QUANTITIES = ("weight_update", "input_drift", "input", "input_change", "output_change")

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Norms = list[tuple[int, Tensor]]  # places, see :class:`LayerChanges`, and vectors of norms
Sums = tuple[list[tuple[str, int]], Tensor, int]  # layers and places, for each a sum of norms, and how many these are


class LayerChanges:
    """Measures the calls of a model's layers, for :class:`ReferencePasses`.

    Every layer has a place for each of :data:`QUANTITIES`, and one more for each without the bias.

    Attributes:
        norms: layers and their places, sums of norms for them, and how many norms each is of.
        seen: how many forward passes there were.
    """

    def __init__(self, reference: Reference, layers: Sequence[str]) -> None:
        self._layers = {name: _layer(name, reference) for name in layers}
        self.norms: list[Sums] = []
        self.seen = 0

    def places(self, name: str) -> range:
        """What there can be norms of."""
        return self._layers[name].places()

    def keep(self, name: str, module: nn.Module, args: Args, kwargs: Kwargs, output: Any) -> list[Tensor | None]:
        """The input, and of those that have to be evaluated the output."""
        return self._layers[name].keep(args, kwargs, output)

    def enter(self, name: str, module: nn.Module, args: Args, kwargs: Kwargs, kept: list[Tensor | None]) -> Any:
        """What can be measured before a layer runs: its weights are whole, its inputs still as it gets them."""
        return self._layers[name].enter(module, args, kwargs, kept)

    def leave(self, name: str, output: Any, entered: Any, kept: list[Tensor | None]) -> Norms:
        """The norms of a call.

        Args:
            entered: what :meth:`enter` returned.
        """
        return self._layers[name].leave(output, entered, kept)

    def passed(self, results: dict[str, list[Any]]) -> None:
        """Take the norms of a forward pass in.

        Args:
            results: of each layer, what :meth:`leave` returned.
        """
        self.seen += 1
        vectors: dict[tuple[str, int], list[Tensor]] = {}
        for name, calls in results.items():
            for norms in calls:
                for place, each in norms:
                    vectors.setdefault((name, place), []).append(each)
        # What has as many norms is summed at once.
        alike: dict[Any, list[tuple[str, int]]] = {}
        for where, found in vectors.items():
            alike.setdefault((found[0].device, found[0].dtype, *map(len, found)), []).append(where)
        for (device, _, *sizes), places in alike.items():
            if sum(sizes):
                table = torch.cat([each for where in places for each in vectors[where]]).view(len(places), -1)
                self.norms.append((places, table.sum(1, dtype=wide_dtype(device)), sum(sizes)))


class _Layer:
    """A layer whose change is known before it runs, and of which only the input is kept."""

    def __init__(self, name: str, reference: Reference) -> None:
        self._name = name
        self._reference = reference.modules[name]
        self._run = reference.run
        self._dim = feature_dim(self._reference)

    def places(self) -> range:
        return range(len(QUANTITIES) * (1 if self._reference._parameters.get("bias") is None else 2))

    def keep(self, args: Args, kwargs: Kwargs, output: Any) -> list[Tensor | None]:
        return [_first(args, kwargs)]

    @torch.no_grad()
    def enter(self, module: nn.Module, args: Args, kwargs: Kwargs, kept: list[Tensor | None]) -> Any:
        # First of all, since ranks may communicate here and must not part before.
        parameters = self._parameters(module, args, kwargs)
        x, reference_x = _first(args, kwargs), kept.pop()
        if x is None or reference_x is None:
            raise NotComparableError("no floating-point tensor is among its inputs")
        _check(x, reference_x)
        (weight, reference_weight), bias = parameters["weight"], parameters.get("bias")
        with _without_autocast(x):
            dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
            weights = weight.to(dtype), reference_weight.to(dtype)
            return self._norms(module, (args, kwargs), x.to(dtype), reference_x.to(dtype), weights, bias)

    def leave(self, output: Any, entered: Any, kept: list[Tensor | None]) -> Norms:
        norms: Norms = entered
        return norms

    def _norms(
        self,
        module: nn.Module,
        call: tuple[Args, Kwargs],
        x: Tensor,
        reference_x: Tensor,
        weights: tuple[Tensor, Tensor],
        bias: tuple[Tensor, Tensor] | None,
    ) -> Norms:
        raise NotImplementedError

    def _parameters(self, module: nn.Module, args: Args, kwargs: Kwargs) -> dict[str, tuple[Tensor, Tensor]]:
        """The model's and the reference's weight and bias, by name.

        Raises:
            NotComparableError: if one of them can't be had whole.
        """
        ours: dict[str, Any] = {
            name: each for name in parameters_in(module) if (each := getattr(module, name)) is not None
        }
        theirs = {name: getattr(self._reference, name) for name in ours}
        if any_sharded(theirs.values()):
            # A layer that fully_shard has been given is whole while it runs, and not a moment longer.
            def look(*_: Any) -> None:
                theirs.update((name, getattr(self._reference, name).clone()) for name in ours)

            with before_forward([self._reference], look):
                self._run(self._name, args, kwargs)
        if any_sharded([*ours.values(), *theirs.values()]):
            raise NotComparableError("its weights are sharded, here or in the reference; one that is not would do")
        # Mixed precision of fully_shard rounds weights; the reference's are rounded alike.
        return {name: (each, theirs[name].to(each.dtype)) for name, each in ours.items()}

    def _pair(self, change: Change, change_of_bias: Tensor | None) -> Norms:
        """Norms of a change, with the bias and without it; the change is used up, which spares memory and time."""
        update, drift = change
        plain = [*self._of(0, update), *self._of(1, drift)]
        output = drift.add_(update)
        plain += self._of(4, output)
        if change_of_bias is None:
            return plain
        whole = [*self._of(0, update.add_(change_of_bias)), plain[1], *self._of(4, output.add_(change_of_bias))]
        return whole + _without_bias(plain)

    def _of(self, place: int, values: Tensor) -> Norms:
        dim = self._dim if -values.ndim <= self._dim < values.ndim else -1
        return [(place, feature_norms(values, dim))]


class _Linear(_Layer):
    def _norms(
        self,
        module: nn.Module,
        call: tuple[Args, Kwargs],
        x: Tensor,
        reference_x: Tensor,
        weights: tuple[Tensor, Tensor],
        bias: tuple[Tensor, Tensor] | None,
    ) -> Norms:
        bound = linear_map(module)
        if bound is None:
            raise NotComparableError("its forward has been replaced since the handler was made")
        function, weight_change = bound(*call), weights[0] - weights[1]
        moved = None
        if bias is not None:
            moved = (_wide(bias[0]) - _wide(bias[1])).reshape(-1, *[1] * (-self._dim - 1))
        input_change = x - reference_x
        norms = [*self._of(2, x), *self._of(3, input_change)]
        if moved is not None:
            norms += _without_bias(norms)
        change = linear_change(function, weight_change, weights[1], input_change, x)
        return norms + self._pair(change, moved)


class _Normalization(_Layer):
    def places(self) -> range:
        return range(2 * len(QUANTITIES))

    def _norms(
        self,
        module: nn.Module,
        call: tuple[Args, Kwargs],
        x: Tensor,
        reference_x: Tensor,
        weights: tuple[Tensor, Tensor],
        bias: tuple[Tensor, Tensor] | None,
    ) -> Norms:
        settings: Any = module
        normalized, change = normalized_change(
            x, reference_x, settings.normalized_shape, settings.eps, centred=isinstance(module, nn.LayerNorm)
        )
        norms = [*self._of(2, x), *self._of(3, x - reference_x)]
        norms += _without_bias([*self._of(2, normalized), *self._of(3, change)])
        parts = linear_change(torch.mul, weights[0] - weights[1], weights[1], change, normalized)
        if bias is not None:
            return norms + self._pair(parts, _wide(bias[0]) - _wide(bias[1]))
        without = self._pair(parts, None)
        return norms + without + _without_bias(without)


class _LowPrecision(_Layer):
    """A small layer whose rounded outputs would differ by their rounding: it is evaluated in float32."""

    def places(self) -> range:
        return range(len(QUANTITIES))

    @torch.no_grad()
    def enter(self, module: nn.Module, args: Args, kwargs: Kwargs, kept: list[Tensor | None]) -> Any:
        parameters = self._parameters(module, args, kwargs)
        x, reference_x = _first(args, kwargs), kept.pop()
        if x is None or reference_x is None or len(args) + len(kwargs) > 1:
            raise NotComparableError("it should have one floating-point tensor as its input")
        _check(x, reference_x)
        with _without_autocast(x):
            x, reference_x = _wide(x), _wide(reference_x)
            ours, theirs = ({name: _wide(pair[i]) for name, pair in parameters.items()} for i in (0, 1))
            output, crossed, reference_output = (
                self._run(self._name, (at,), {}, weights)
                for at, weights in ((x, ours), (x, theirs), (reference_x, theirs))
            )
            change = output_change(output, crossed, reference_output)
            return [*self._of(2, x), *self._of(3, x - reference_x), *self._pair(change, None)]


class _Embedding(_Layer):
    def places(self) -> range:
        return range(1)

    def keep(self, args: Args, kwargs: Kwargs, output: Any) -> list[Tensor | None]:
        return []

    @torch.no_grad()
    def enter(self, module: nn.Module, args: Args, kwargs: Kwargs, kept: list[Tensor | None]) -> Any:
        rows = args[0] if args else kwargs["input"]
        weight, reference_weight = self._parameters(module, args, kwargs)["weight"]
        return self._of(0, _wide(F.embedding(rows, weight)) - _wide(F.embedding(rows, reference_weight)))


class _Evaluated(_Layer):
    """Any other layer: the reference's is evaluated on the model's inputs."""

    def places(self) -> range:
        return range(len(QUANTITIES))

    def keep(self, args: Args, kwargs: Kwargs, output: Any) -> list[Tensor | None]:
        return [_first(args, kwargs), _first((output,), {})]

    def enter(self, module: nn.Module, args: Args, kwargs: Kwargs, kept: list[Tensor | None]) -> Any:
        x, reference_x = _first(args, kwargs), kept[0]
        kept[0] = None
        # The inputs of the whole model are those of the reference.
        crossed = _first((self._run(self._name, args, kwargs),), {}) if self._name else kept[1]
        norms: Norms = []
        if x is not None and reference_x is not None:
            _check(x, reference_x)
            with torch.no_grad(), _without_autocast(x):
                norms = [*self._of(2, _wide(x)), *self._of(3, _wide(x) - _wide(reference_x))]
        return norms, None if crossed is None else crossed.detach(), x, None if x is None else version_of(x)

    def leave(self, output: Any, entered: Any, kept: list[Tensor | None]) -> Norms:
        norms: Norms = entered[0]
        crossed, x, version = entered[1:]
        output, reference_output = _first((output,), {}), kept[1]
        if output is None or crossed is None or reference_output is None:
            raise NotComparableError("no floating-point tensor is in its output")
        if x is not None and version_of(x) != version:
            raise NotComparableError("it changes its input in place")
        _check(output, crossed)
        _check(output, reference_output)
        with _without_autocast(output):
            change = output_change(_wide(output), _wide(crossed), _wide(reference_output))
            parts = self._pair(change, None)
        return norms + (parts if norms else parts[:1])


def _layer(name: str, reference: Reference) -> _Layer:
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


def _first(args: Args, kwargs: Kwargs) -> Tensor | None:
    return next((tensor for _, tensor in floating_tensors([*args, *kwargs.values()])), None)


def _check(values: Tensor, others: Tensor) -> None:
    if is_sharded(values) or values.is_nested or values.layout != torch.strided:
        raise NotComparableError("its tensors are sharded, nested or sparse")
    if values.shape != others.shape:
        raise NotComparableError(f"its tensors are {tuple(values.shape)}, in the reference {tuple(others.shape)}")


def _without_bias(norms: Norms) -> Norms:
    return [(place + len(QUANTITIES), each) for place, each in norms]


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _without_autocast(values: Tensor) -> contextlib.AbstractContextManager[Any]:
    kind = values.device.type
    if not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=False)
