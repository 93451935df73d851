"""Measuring calls of layers against the same calls of the reference."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator
from contextlib import nullcontext
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.model._torch import (
    buffers_in,
    forward_pre_hooks,
    modules_in,
    parameters_in,
    version,
    with_weights,
)
from ignite_monitor.model.devices import device_of, wide_dtype
from ignite_monitor.model.dtensor import any_dtensor
from ignite_monitor.model.forward import before_forward
from ignite_monitor.model.linear_maps import feature_dim, is_builtin_layer, linear_map
from ignite_monitor.model.modes import full_precision, has_local_data
from ignite_monitor.model.tensors import floating_tensors
from ignite_monitor.monitor.ranks import Ranks
from ignite_monitor.rcc.terms import QUANTITIES, NormSums, mean_norms, norm_sums, table_of
from ignite_monitor.reference.passes import Call, Comparison
from ignite_monitor.reference.reference import NotComparableError, Reference, detached_copy, user_forward_hooks

Weights = dict[str, Tensor]


class LayerChanges(Comparison):
    """Norms of the changes of a model's layers.

    A layer that is linear in its weights and its input is evaluated with their differences, which keep their digits.
    Other layers are evaluated three times; those that hold modules are run as they are, with the reference's weights.

    Args:
        tags: name of each layer -> its name in keys.

    Attributes:
        keys: the keys of the table of layers and quantities, row by row.
    """

    def __init__(self, reference: Reference, tags: dict[str, str]) -> None:
        self._reference = reference
        self._rows = {name: row for row, name in enumerate(tags)}
        self._dims = {name: feature_dim(reference.modules[name]) for name in tags}
        self._linear = {name for name in tags if _is_linear(reference.modules[name])}
        self._run_as_is = {name for name in tags if _is_whole(reference.modules[name])} - self._linear
        self._calls: list[tuple[str, NormSums]] = []
        self.keys = [f"{quantity}/{tag}" for tag in tags.values() for quantity in (*QUANTITIES, "weight_share")]

    def keep(self, call: Call) -> list[Tensor | None]:
        if call.name in self._run_as_is:
            return [_first((call.args, call.kwargs)), _first(call.output)]
        return [*_inputs(call)]

    def enter(self, call: Call) -> tuple[Tensor | None, int, Any]:
        """Return the input, its version, and the sums, or the reference's output of a layer that is run as it is."""
        x = _first((call.args, call.kwargs))
        if call.name not in self._run_as_is:
            result: Any = self._evaluated(call)
        elif call.name:
            initial_on_input = _first(self._reference.run(call.name, call.args, call.kwargs))
            result = None if initial_on_input is None else initial_on_input.detach()
        else:
            result = call.kept[1]  # the inputs of the whole model are those of the reference
        return x, 0 if x is None else version(x), result

    def leave(self, call: Call) -> None:
        x, before, result = call.entered
        if x is not None and version(x) != before:
            raise NotComparableError("it changes its input in place")
        self._calls.append((call.name, self._compared(call, x, result) if call.name in self._run_as_is else result))

    def clear(self) -> None:
        self._calls = []

    def means(self, incomplete: Collection[str], ranks: Ranks) -> Tensor:
        """Mean norms of each layer over all calls and ranks, as :func:`mean_norms`; NaN if a rank's are incomplete."""
        calls = [(self._rows[name], result) for name, result in self._calls]
        rows, device = [self._rows[name] for name in incomplete], device_of(self._reference.root)
        return mean_norms(*ranks.sum(table_of(calls, rows, len(self._rows), device)))

    def _compared(self, call: Call, x: Tensor | None, initial_on_input: Tensor | None) -> NormSums:
        outputs = [item for item in (_first(call.output), initial_on_input, call.kept[1]) if item is not None]
        inputs = [item for item in (x, call.kept[0]) if item is not None]
        if len(outputs) < 3:
            raise NotComparableError("no floating-point tensor is in its output")
        _check([outputs[0], outputs[0], *inputs[:1]], [*outputs[1:], *inputs[1:]])
        with full_precision(outputs[0].device):
            inputs = [item.to(_wide(inputs)) for item in inputs]
            moved = [inputs[0], inputs[0] - inputs[1]] if inputs else []
            return norm_sums(*_changes(item.to(_wide(outputs)) for item in outputs), moved, self._dims[call.name])

    @torch.no_grad()
    def _evaluated(self, call: Call) -> NormSums:
        weights, initial = self._weights(call)  # first, since FSDP2 may communicate
        inputs, reference_inputs = _inputs(call), [x for x in call.kept if x is not None]
        _check([*inputs, *weights.values()], [*reference_inputs, *initial.values()])
        dtype, device = _wide([*inputs, *weights.values()]), next(iter(weights.values())).device
        if call.name not in self._linear and _is_of_torch(self._reference.modules[call.name]):
            dtype = wide_dtype(device)  # a user's forward may compute in another dtype
        with full_precision(device):
            inputs, reference_inputs = ([x.to(dtype) for x in tensors] for tensors in (inputs, reference_inputs))
            weights, initial = (
                {key: item.to(dtype) for key, item in tensors.items()} for tensors in (weights, initial)
            )
            moved = [inputs[0], inputs[0] - reference_inputs[0]] if inputs else []
            if call.name in self._linear:
                changes = self._linear_changes(call, moved, weights, initial)
            else:
                runs = ((inputs, weights), (inputs, initial), (reference_inputs, initial))
                changes = _changes(self._evaluate(call, *run) for run in runs)
            return norm_sums(*changes, moved, self._dims[call.name])

    def _linear_changes(
        self, call: Call, inputs: list[Tensor], weights: Weights, initial: Weights
    ) -> tuple[Tensor, Tensor]:
        if not _is_linear(call.module):
            raise NotComparableError("its forward has been replaced since the handler was made")
        updates = {key: item - initial[key] for key, item in weights.items()}
        product_of = linear_map(call.module)
        if product_of is None or not inputs:  # Embedding
            update = self._evaluate(call, inputs, updates)
            return update, update
        product = product_of(call.args, call.kwargs)
        update = product(inputs[0], updates["weight"])
        if "bias" in updates:
            update += updates["bias"].view(-1, *[1] * (-1 - self._dims[call.name]))
        return update, product(inputs[1], initial["weight"])

    def _evaluate(self, call: Call, tensors: list[Tensor], weights: Weights) -> Tensor:
        module, dtype = self._reference.modules[call.name], next(iter(weights.values())).dtype
        others = iter(tensors)
        args, kwargs = _with_tensors((call.args, call.kwargs), others)
        if next(others, None) is not None:
            raise NotComparableError("a tensor of its input is in an object that can't be taken apart")
        draws_nothing = _is_of_torch(module) and not isinstance(module, nn.RNNBase)
        with nullcontext() if draws_nothing else self._reference.isolated(call.name):
            if not _is_of_torch(module):  # it may change tensors in place, and keep state
                hooks = [hook for registry in user_forward_hooks([module]).values() for hook in registry.values()]
                memo = {id(item): item for item in (*hooks, *module.parameters())}
                module, weights, args, kwargs = detached_copy((module, weights, args, kwargs), memo)
            buffers = {
                key: item if item is None else item.to(dtype if item.is_floating_point() else item.dtype, copy=True)
                for key, item in buffers_in(module).items()
            }
            other: Any = with_weights(module, weights, buffers)
            other.training = call.module.training
            output = _first(type(other).forward(other, *args, **kwargs))
        if output is None:
            raise NotComparableError("no floating-point tensor is in its output")
        return output.to(dtype)

    def _weights(self, call: Call) -> tuple[Weights, Weights]:
        reference = self._reference.modules[call.name]
        weights: Weights = {key: item for key, item in parameters_in(call.module).items() if item is not None}
        initial: Weights = {key: getattr(reference, key) for key in weights}
        if any_dtensor(initial.values()):
            # FSDP2 gathers weights while the module runs.
            def gathered(*_: Any) -> None:
                initial.update((key, getattr(reference, key).clone()) for key in weights)

            with before_forward([reference], gathered):
                self._reference.run(call.name, call.args, call.kwargs)
        if not all(map(has_local_data, [*weights.values(), *initial.values()])):
            raise NotComparableError("its weights are sharded, in the model or in the reference")
        # Mixed precision of FSDP2 rounds the model's weights.
        return weights, {key: initial[key].to(item.dtype) for key, item in weights.items()}


def _is_linear(module: nn.Module) -> bool:
    is_embedding = is_builtin_layer(module, nn.Embedding) and getattr(module, "max_norm", None) is None
    return is_embedding or linear_map(module) is not None


def _is_whole(module: nn.Module) -> bool:
    return bool(modules_in(module) or "forward" in vars(module) or forward_pre_hooks(module))


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).forward.__module__.startswith("torch.nn.modules.")


def _inputs(call: Call) -> list[Tensor]:
    return [tensor for _, tensor in floating_tensors((call.args, call.kwargs))]


def _with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """A copy of tuples, lists and dicts, nested or not, with other floating-point tensors."""
    if isinstance(value, Tensor):
        return next(tensors) if value.is_floating_point() else value
    if type(value) is tuple or hasattr(value, "_make"):
        items = [_with_tensors(item, tensors) for item in value]
        return value._make(items) if hasattr(value, "_make") else tuple(items)
    if isinstance(value, (list, dict)):
        value = copy.copy(value)
        for key in range(len(value)) if isinstance(value, list) else value:
            value[key] = _with_tensors(value[key], tensors)
    return value


def _changes(outputs: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Weight update and input drift, from :math:`f_t(x_t)`, :math:`f_0(x_t)` and :math:`f_0(x_0)`."""
    output, initial_on_input, reference_output = outputs
    return output - initial_on_input, initial_on_input - reference_output


def _first(value: Any) -> Tensor | None:
    return next((tensor for _, tensor in floating_tensors(value)), None)


def _check(values: list[Tensor], others: list[Tensor]) -> None:
    if not all(map(has_local_data, values)):
        raise NotComparableError("its tensors are sharded, nested or sparse")
    shapes, expected = ([tuple(item.shape) for item in tensors] for tensors in (values, others))
    if shapes != expected:
        raise NotComparableError(f"its tensors are {shapes}, in the reference {expected}")


def _wide(tensors: Iterable[Tensor]) -> torch.dtype:
    """The common dtype of tensors, float32 or wider."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
