"""Measuring calls of layers against the same calls of the reference."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.model._torch import (
    batch_norm,
    buffers_in,
    hooks_before_forward,
    modules_in,
    parameters_in,
    version,
    with_weights,
)
from ignite_monitor.model.devices import wide_dtype
from ignite_monitor.model.forward import before_forward
from ignite_monitor.model.linear_maps import feature_dim, linear_map
from ignite_monitor.model.linear_maps import is_plain as is_plain_layer
from ignite_monitor.model.modes import is_plain
from ignite_monitor.model.norms import any_sharded
from ignite_monitor.model.tensors import floating_tensors
from ignite_monitor.monitor.ranks import sum_over_ranks, world_size
from ignite_monitor.rcc.terms import (
    QUANTITIES,
    Change,
    NormSums,
    mean_norms,
    norm_sums,
    output_change,
    over_layers,
    table_of,
)
from ignite_monitor.reference.call import Call, Comparison, NotComparableError
from ignite_monitor.reference.copies import detached_copy, user_forward_hooks
from ignite_monitor.reference.reference import Reference

Weights = dict[str, Tensor]

_WITHOUT_RNG = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.PReLU, nn.Embedding, batch_norm)


class LayerChanges(Comparison):
    """Norms of the changes of a model's layers, in one table of layers and quantities.

    Args:
        tags: name of each layer -> its name in keys.
    """

    def __init__(self, reference: Reference, tags: dict[str, str]) -> None:
        self._layers = {name: _layer(name, reference) for name in tags}
        self._rows = {name: row for row, name in enumerate(tags)}
        self._keys = [f"{quantity}/{tag}" for tag in tags.values() for quantity in (*QUANTITIES, "weight_share")]
        self._results: list[tuple[str, NormSums]] = []

    def keep(self, call: Call) -> list[Tensor | None]:
        return self._layers[call.name].keep(call)

    def enter(self, call: Call) -> Any:
        x = _first(call.args, call.kwargs)
        return self._layers[call.name].enter(call), x, x is not None and version(x)

    def leave(self, call: Call) -> NormSums:
        entered, x, before = call.entered
        if x is not None and version(x) != before:
            raise NotComparableError("it changes its input in place")
        return self._layers[call.name].leave(call, entered)

    def passed(self, results: dict[str, list[Any]]) -> None:
        self._results += [(name, result) for name, calls in results.items() for result in calls]

    def clear(self) -> None:
        self._results = []

    def values(self, incomplete: Collection[str], device: torch.device) -> tuple[list[str], Tensor, dict[str, Tensor]]:
        """Keys and means by layer, and statistics over the layers; NaN where nothing was measured.

        Args:
            incomplete: names of layers to exclude.
            device: device of the table if nothing was measured.
        """
        results = [(self._rows[name], result) for name, result in self._results if name not in incomplete]
        if results:
            rows, calls = zip(*results, strict=True)
            table = table_of(rows, calls, len(self._rows))
        elif world_size() == 1:
            return [], torch.empty(0), {}
        else:
            table = torch.zeros(2, len(self._rows), len(QUANTITIES), dtype=wide_dtype(device), device=device)
        # Ranks may have measured different layers: the table has the same shape on all of them.
        means = mean_norms(*sum_over_ranks(table))
        return self._keys, means.flatten(), over_layers(means)


class _Layer:
    """A layer that is evaluated with the model's and the reference's weights, in float32 or wider."""

    def __init__(self, name: str, reference: Reference) -> None:
        self._name = name
        self._reference = reference
        self._module = reference.modules[name]
        self._dim = feature_dim(self._module)

    def keep(self, call: Call) -> list[Tensor | None]:
        return list(_tensors((call.args, call.kwargs)))

    @torch.no_grad()
    def enter(self, call: Call) -> NormSums:
        weights, initial = self._weights(call)  # first, since FSDP2 may communicate
        tensors, others = list(_tensors((call.args, call.kwargs))), call.kept
        if len(tensors) != len(others):
            raise NotComparableError("its inputs are other than in the reference")
        for tensor, other in zip(tensors, others, strict=True):
            _check(tensor, other)
        x, reference_x = (tensors[0], others[0]) if tensors else (None, None)
        dtype = self._dtype([*tensors, *weights.values()])
        with _no_autocast(next(iter(weights.values()))):
            if x is None or reference_x is None:
                update = self._change(call, [], [], weights, initial, dtype).weight_update
                return norm_sums(update, None, None, None, self._dim)
            wide = [item.to(dtype) for item in tensors]
            reference_wide = [item.to(dtype) for item in others if item is not None]
            change = self._change(call, wide, reference_wide, weights, initial, dtype)
            return norm_sums(*change, wide[0], wide[0] - reference_wide[0], self._dim)

    def leave(self, call: Call, entered: Any) -> NormSums:
        result: NormSums = entered
        return result

    def _dtype(self, tensors: list[Tensor]) -> torch.dtype:
        """float64 where differences of outputs are taken, if that is sure to be computed in it."""
        if _is_of_torch(self._module):
            return wide_dtype(tensors[0].device)
        return _promoted(tensors)

    def _change(
        self, call: Call, x: list[Tensor], reference_x: list[Tensor], weights: Weights, initial: Weights, dtype: Any
    ) -> Change:
        runs = ((x, weights), (x, initial), (reference_x, initial))
        outputs = [self._evaluate(call, inputs, own, dtype) for inputs, own in runs]
        return output_change(*outputs)

    def _evaluate(self, call: Call, tensors: list[Tensor], weights: Weights, dtype: torch.dtype) -> Tensor:
        if not _is_of_torch(self._module):  # its forward may change tensors in place
            tensors = [tensor.clone() for tensor in tensors]
            weights = {name: weight.clone() for name, weight in weights.items()}
        args, kwargs = _replaced((call.args, call.kwargs), iter(tensors))
        isolated: AbstractContextManager[Any] = nullcontext()
        if not isinstance(self._module, _WITHOUT_RNG) and linear_map(self._module) is None:
            isolated = self._reference.isolated(self._name)
        with isolated:
            module: Any = _with_weights(self._module, {name: item.to(dtype) for name, item in weights.items()}, dtype)
            module.training = call.module.training
            output = _first((type(module).forward(module, *args, **kwargs),), {})
        if output is None:
            raise NotComparableError("no floating-point tensor is in its output")
        return output.to(dtype)

    def _weights(self, call: Call) -> tuple[Weights, Weights]:
        """Parameters of the model's and the reference's module by name.

        Raises:
            NotComparableError: if one of them is sharded.
        """
        module: Any = call.module
        reference: Any = self._module
        weights = {name: getattr(module, name) for name, item in parameters_in(module).items() if item is not None}
        initial = {name: getattr(reference, name) for name in weights}
        if any_sharded(initial.values()):
            # FSDP2 gathers weights while the module runs.
            def gathered(*_: Any) -> None:
                initial.update((name, getattr(reference, name).clone()) for name in weights)

            with before_forward([reference], gathered):
                self._reference.run(self._name, call.args, call.kwargs)
        if not all(map(is_plain, [*weights.values(), *initial.values()])):
            raise NotComparableError("its weights are sharded, in the model or in the reference")
        # Mixed precision of FSDP2 rounds the model's weights.
        return weights, {name: initial[name].to(item.dtype) for name, item in weights.items()}


class _Linear(_Layer):
    """A layer that is linear in its weights and its input: differences are taken before it, and keep their digits."""

    def _dtype(self, tensors: list[Tensor]) -> torch.dtype:
        return _promoted(tensors)

    def _change(
        self, call: Call, x: list[Tensor], reference_x: list[Tensor], weights: Weights, initial: Weights, dtype: Any
    ) -> Change:
        if type(self._module) not in type(call.module).__mro__ or "forward" in vars(call.module):
            raise NotComparableError("its forward has been replaced since the handler was made")
        moved = {name: item.to(dtype) - initial[name].to(dtype) for name, item in weights.items()}
        update = self._evaluate(call, x, moved, dtype)
        if not x:
            return Change(update, update)
        without_bias = {name: torch.zeros_like(item) if name == "bias" else item for name, item in initial.items()}
        return Change(update, self._evaluate(call, [x[0] - reference_x[0]], without_bias, dtype))


class _Whole(_Layer):
    """A layer that holds other modules or has hooks: it is run as it is, with the reference's weights."""

    def keep(self, call: Call) -> list[Tensor | None]:
        return [_first(call.args, call.kwargs), _first((call.output,), {})]

    def enter(self, call: Call) -> Any:
        x, reference_x = _first(call.args, call.kwargs), call.kept[0]
        if x is not None:
            _check(x, reference_x)
        inputs = None if x is None or reference_x is None else (x.detach().clone(), reference_x)
        # The inputs of the whole model are those of the reference.
        if not self._name:
            return inputs, call.kept[1]
        crossed = _first((self._reference.run(self._name, call.args, call.kwargs),), {})
        return inputs, None if crossed is None else crossed.detach()

    def leave(self, call: Call, entered: Any) -> NormSums:
        inputs, crossed = entered
        output, reference_output = _first((call.output,), {}), call.kept[1]
        if output is None or crossed is None or reference_output is None:
            raise NotComparableError("no floating-point tensor is in its output")
        _check(output, crossed)
        _check(output, reference_output)
        with _no_autocast(output):
            change = output_change(*_promote(output, crossed, reference_output))
            if inputs is None:
                return norm_sums(change.weight_update, None, None, None, self._dim)
            x, reference_x = _promote(*inputs)
            return norm_sums(*change, x, x - reference_x, self._dim)


def _layer(name: str, reference: Reference) -> _Layer:
    module = reference.modules[name]
    if is_plain_layer(module, nn.Embedding) and getattr(module, "max_norm", None) is None:
        return _Linear(name, reference)
    if linear_map(module) is not None:
        return _Linear(name, reference)
    is_whole = modules_in(module) or "forward" in vars(module) or hooks_before_forward(module)
    return (_Whole if is_whole else _Layer)(name, reference)


def _with_weights(module: nn.Module, weights: Weights, dtype: torch.dtype) -> nn.Module:
    """Copy of a module without children that has other weights, and buffers of a dtype."""
    buffers = {
        name: item if item is None else item.to(dtype if item.is_floating_point() else item.dtype, copy=True)
        for name, item in buffers_in(module).items()
    }
    if not _is_of_torch(module) and linear_map(module) is None:  # a user's module may keep state in its attributes
        memo = {id(hook): hook for _, hooks in user_forward_hooks([module]) for hook in hooks.values()}
        memo |= {id(item): weights.get(name) for name, item in parameters_in(module).items()}
        module = detached_copy(module, memo)
    return with_weights(module, weights, buffers)


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).forward.__module__.startswith("torch.nn.modules.")


def _tensors(value: Any) -> Iterator[Tensor]:
    """Floating-point tensors in inputs, nested tuples, lists and dicts."""
    if isinstance(value, Tensor) and value.is_floating_point():
        yield value
    elif type(value) in (tuple, list, dict):
        for member in value.values() if isinstance(value, dict) else value:
            yield from _tensors(member)


def _replaced(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The same inputs with other tensors, in the order of :func:`_tensors`."""
    if isinstance(value, Tensor):
        return next(tensors) if value.is_floating_point() else value
    if type(value) is dict:
        return {key: _replaced(member, tensors) for key, member in value.items()}
    return type(value)(_replaced(member, tensors) for member in value) if type(value) in (tuple, list) else value


def _first(args: Any, kwargs: Any) -> Tensor | None:
    return next((tensor for _, tensor in floating_tensors((*args, *kwargs.values()))), None)


def _check(values: Tensor, others: Tensor | None) -> None:
    if not is_plain(values):
        raise NotComparableError("its tensors are sharded, nested or sparse")
    if others is not None and values.shape != others.shape:
        raise NotComparableError(f"its tensors are {tuple(values.shape)}, in the reference {tuple(others.shape)}")


def _promoted(tensors: list[Tensor]) -> torch.dtype:
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def _promote(*tensors: Tensor) -> Iterator[Tensor]:
    dtype = _promoted([*tensors])
    return (item.to(dtype) for item in tensors)


def _no_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
