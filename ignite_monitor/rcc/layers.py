"""Measuring calls of layers against the same calls of the reference."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial, reduce

import torch
from torch import Tensor, nn

from ignite_monitor.model._torch import buffers_in, parameters_in, with_weights
from ignite_monitor.model.devices import device_of, wide_dtype
from ignite_monitor.model.linear_maps import feature_dim, is_builtin_layer, is_linear, linear_output
from ignite_monitor.model.modes import full_precision, has_local_data
from ignite_monitor.model.tensors import floating_tensors
from ignite_monitor.monitor.ranks import Ranks
from ignite_monitor.rcc.terms import QUANTITIES, NormSums, mean_norms, norm_sums, table_of
from ignite_monitor.reference.passes import Call, Comparison
from ignite_monitor.reference.reference import NotComparableError, Reference

Weights = dict[str, Tensor]

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, *_BATCH_NORMS, *_INSTANCE_NORMS)


def is_measured(module: nn.Module) -> bool:
    """Return True for linear layers, convolutions, Embedding and normalization layers that compute as torch's."""
    is_embedding = is_builtin_layer(module, nn.Embedding) and getattr(module, "max_norm", None) is None
    return is_embedding or is_linear(module) or is_builtin_layer(module, *_NORMS)


class LayerChanges(Comparison):
    """Norms of the changes of a model's layers.

    A layer that is linear in its weights and its input is evaluated with their differences, which keep their digits.
    Normalization layers are evaluated three times, in float64 (float32 on devices without it).

    Args:
        tags: name of each layer -> its name in keys.

    Attributes:
        keys: the keys of the table of layers and quantities, row by row.
    """

    def __init__(self, reference: Reference, tags: dict[str, str]) -> None:
        self._reference = reference
        self._rows = {name: row for row, name in enumerate(tags)}
        self._calls: list[tuple[int, NormSums]] = []
        self.keys = [f"{quantity}/{tag}" for tag in tags.values() for quantity in (*QUANTITIES, "weight_share")]

    def keep(self, call: Call) -> Tensor | None:
        return next((tensor for _, tensor in floating_tensors((call.args, call.kwargs))), None)

    def compare(self, call: Call, kept: Tensor | None) -> None:
        self._calls.append((self._rows[call.name], self._changes(call, kept)))

    def clear(self) -> None:
        self._calls = []

    def means(self, incomplete: Collection[str], ranks: Ranks) -> Tensor:
        """Mean norms of each layer over all calls and ranks, as :func:`mean_norms`; NaN if a rank's are incomplete."""
        rows, device = [self._rows[name] for name in incomplete], device_of(self._reference.root)
        return mean_norms(*ranks.sum(table_of(self._calls, rows, len(self._rows), device)))

    def _changes(self, call: Call, kept: Tensor | None) -> NormSums:
        module, reference, dim = call.module, self._reference.modules[call.name], feature_dim(call.module)
        if not is_measured(module):
            raise NotComparableError("its forward has been replaced since the handler was made")
        weights: Weights = {key: item for key, item in parameters_in(module).items() if item is not None}
        # Mixed precision of FSDP2 rounds the model's weights.
        initial: Weights = {key: getattr(reference, key).to(item.dtype) for key, item in weights.items()}
        inputs = [x for x in (self.keep(call), kept) if x is not None]
        _check([*inputs[:1], *weights.values()], [*inputs[1:], *initial.values()])
        device, is_product = weights["weight"].device, is_linear(module)
        with full_precision(device):
            dtype = _wide([*inputs, *weights.values()])
            if inputs and not is_product:
                dtype = wide_dtype(device)
            weights, initial = _converted(weights, dtype), _converted(initial, dtype)
            if not inputs:  # Embedding
                updates = {"weight": weights["weight"] - initial["weight"]}
                update: Tensor = with_weights(module, updates, {}).forward(*call.args, **call.kwargs)
                return norm_sums(update, update, [], dim)
            x, x0 = (item.to(dtype) for item in inputs)
            moved = x - x0
            if not is_product:
                runs = ((x, weights), (x, initial), (x0, initial))
                owners = module, reference, reference  # of the running statistics
                output, initial_on_input, reference_output = (
                    _normalized(owner, module, *run) for owner, run in zip(owners, runs, strict=True)
                )
                update, drift = output - initial_on_input, initial_on_input - reference_output
            else:
                product = partial(linear_output, module, call.args, call.kwargs)
                update = product(x, weights["weight"] - initial["weight"])
                drift = product(moved, initial["weight"])
                if "bias" in weights:
                    update += (weights["bias"] - initial["bias"]).view(-1, *[1] * (-1 - dim))
            return norm_sums(update, drift, [x, moved], dim)


def _normalized(owner: nn.Module, module: nn.Module, x: Tensor, weights: Weights) -> Tensor:
    """The output of a normalization layer with other weights, in the model's mode."""
    buffers = {
        key: item if item is None else item.to(x.dtype if item.is_floating_point() else item.dtype, copy=True)
        for key, item in buffers_in(owner).items()
    }
    other = with_weights(owner, weights, buffers)
    other.training = module.training
    return other.forward(x)  # type: ignore[no-any-return]


def _check(values: list[Tensor], others: list[Tensor]) -> None:
    if not all(map(has_local_data, [*values, *others])):
        raise NotComparableError("its tensors are sharded, nested or sparse, in the model or in the reference")
    shapes, expected = ([tuple(item.shape) for item in tensors] for tensors in (values, others))
    if shapes != expected:
        raise NotComparableError(f"its tensors are {shapes}, in the reference {expected}")


def _converted(tensors: Weights, dtype: torch.dtype) -> Weights:
    return {key: item.to(dtype) for key, item in tensors.items()}


def _wide(tensors: Iterable[Tensor]) -> torch.dtype:
    """The common dtype of tensors, float32 or wider."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
