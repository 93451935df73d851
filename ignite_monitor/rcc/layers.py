"""What a call of a layer, beside the same call of its reference, says of weights and inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ignite_monitor.model._torch import buffers_in, modules_in, parameters_in
from ignite_monitor.model._torch import version as version_of
from ignite_monitor.model.forward import before_forward
from ignite_monitor.model.linear_maps import feature_dim, is_plain, linear_map
from ignite_monitor.model.norms import any_sharded
from ignite_monitor.model.tensors import floating_tensors
from ignite_monitor.rcc.terms import (
    QUANTITIES,
    Norms,
    change_norms,
    feature_norms,
    input_norms,
    linear_change,
    normalized_change,
    output_change,
)
from ignite_monitor.reference.call import Call, Comparison, NotComparableError
from ignite_monitor.reference.reference import Reference

Weights = dict[str, Tensor]


class LayerCalls(Comparison):
    """Measures the calls of a model's layers."""

    def __init__(self, reference: Reference, names: Iterable[str]) -> None:
        self.layers = {name: layer_of(name, reference) for name in names}

    def keep(self, call: Call) -> list[Tensor | None]:
        return self.layers[call.name].keep(call)

    def enter(self, call: Call) -> Any:
        return self.layers[call.name].enter(call)

    def leave(self, call: Call) -> Norms:
        return self.layers[call.name].leave(call)


class _Layer:
    """A layer whose change is known before it runs, and of which only the input is kept.

    Attributes:
        places: of how many of :data:`Norms` there can be any.
    """

    def __init__(self, name: str, reference: Reference) -> None:
        self._name = name
        self._reference = reference.modules[name]
        self._run = reference.run
        self._dim = feature_dim(self._reference)
        self.places = len(QUANTITIES)

    def keep(self, call: Call) -> list[Tensor | None]:
        return [_first(call.args, call.kwargs)]

    @torch.no_grad()
    def enter(self, call: Call) -> Norms:
        # First of all, since ranks may communicate here and must not part before.
        weights, theirs = self._weights(call)
        x, reference_x = _first(call.args, call.kwargs), call.kept.pop()
        if x is None or reference_x is None:
            raise NotComparableError("no floating-point tensor is among its inputs")
        _check(x, reference_x)
        with _without_autocast(x):
            dtype = _wide_dtype(x.dtype, weights["weight"].dtype)
            return self._norms(call, x.to(dtype), reference_x.to(dtype), _to(dtype, weights), _to(dtype, theirs))

    def leave(self, call: Call) -> Norms:
        norms: Norms = call.entered
        return norms

    def _norms(self, call: Call, x: Tensor, reference_x: Tensor, weights: Weights, theirs: Weights) -> Norms:
        raise NotImplementedError

    def _weights(self, call: Call) -> tuple[Weights, Weights]:
        """The model's and the reference's parameters by name.

        Raises:
            NotComparableError: if one of them can't be had whole.
        """
        module: Any = call.module
        ours = {name: getattr(module, name) for name, each in parameters_in(module).items() if each is not None}
        theirs = {name: getattr(self._reference, name) for name in ours}
        if any(map(_dispatches, (*ours.values(), *theirs.values()))):
            # A layer that fully_shard has been given is whole while it runs, and not a moment longer.
            def look(*_: Any) -> None:
                theirs.update((name, getattr(self._reference, name).clone()) for name in ours)

            if any_sharded(theirs.values()):
                with before_forward([self._reference], look):
                    self._run(self._name, call.args, call.kwargs)
            if any_sharded([*ours.values(), *theirs.values()]):
                raise NotComparableError("its weights are sharded, here or in the reference; one that is not would do")
        # Mixed precision of fully_shard rounds weights; the reference's are rounded alike.
        return ours, {name: theirs[name].to(each.dtype) for name, each in ours.items()}


class _Linear(_Layer):
    def __init__(self, name: str, reference: Reference) -> None:
        super().__init__(name, reference)
        self.places *= 1 if parameters_in(self._reference).get("bias") is None else 2

    def _norms(self, call: Call, x: Tensor, reference_x: Tensor, weights: Weights, theirs: Weights) -> Norms:
        bound = linear_map(call.module)
        if bound is None:
            raise NotComparableError("its forward has been replaced since the handler was made")
        function, input_change = bound(call.args, call.kwargs), x - reference_x
        norms = input_norms(x, input_change, self._dim)
        change = linear_change(function, weights["weight"] - theirs["weight"], theirs["weight"], input_change, x)
        if "bias" not in weights:
            return norms | change_norms(change, self._dim)
        moved = (weights["bias"] - theirs["bias"]).reshape(-1, *[1] * (-self._dim - 1))
        return norms | change_norms(change, self._dim, norms, moved)


class _Normalization(_Layer):
    def __init__(self, name: str, reference: Reference) -> None:
        super().__init__(name, reference)
        self.places *= 2

    def _norms(self, call: Call, x: Tensor, reference_x: Tensor, weights: Weights, theirs: Weights) -> Norms:
        settings: Any = call.module
        norms = input_norms(x, x - reference_x, self._dim)
        normalized = normalized_change(
            x, reference_x, settings.normalized_shape, settings.eps, centred=isinstance(settings, nn.LayerNorm)
        )
        moved = {name: weights[name] - theirs[name] for name in weights}
        change = linear_change(torch.mul, moved["weight"], theirs["weight"], normalized[1], normalized[0])
        product = input_norms(*normalized, self._dim)
        return norms | change_norms(change, self._dim, product, moved.get("bias"))


class _LowPrecision(_Layer):
    """A small layer whose rounded outputs would differ by their rounding: it is evaluated in float32."""

    def _norms(self, call: Call, x: Tensor, reference_x: Tensor, weights: Weights, theirs: Weights) -> Norms:
        if len(call.args) + len(call.kwargs) > 1:
            raise NotComparableError("it should have one floating-point tensor as its input")
        runs = ((x, weights), (x, theirs), (reference_x, theirs))
        change = output_change(*(self._run(self._name, (at,), {}, each) for at, each in runs))
        return input_norms(x, x - reference_x, self._dim) | change_norms(change, self._dim)


class _Embedding(_Layer):
    def __init__(self, name: str, reference: Reference) -> None:
        super().__init__(name, reference)
        self.places = 1

    def keep(self, call: Call) -> list[Tensor | None]:
        return []

    @torch.no_grad()
    def enter(self, call: Call) -> Norms:
        rows = call.args[0] if call.args else call.kwargs["input"]
        ours, theirs = (F.embedding(rows, each["weight"]) for each in self._weights(call))
        dtype = _wide_dtype(ours.dtype)
        return {0: feature_norms(ours.to(dtype) - theirs.to(dtype))}


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


def layer_of(name: str, reference: Reference) -> _Layer:
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


def _to(dtype: torch.dtype, weights: Weights) -> Weights:
    return {name: each.to(dtype) for name, each in weights.items()}


def _without_autocast(values: Tensor) -> contextlib.AbstractContextManager[Any]:
    kind = values.device.type
    if not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=False)
