"""The dimension of the units in a module's output: channels or features."""

from __future__ import annotations

import functools
import weakref
from typing import Any, cast

import torch
from torch import Tensor, nn

from ignite_monitor.model.linear_maps import CONVOLUTIONS, TRANSPOSED, feature_dim

_FEATURES = (nn.Linear, nn.Bilinear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.MultiheadAttention)
_RECURRENT = (nn.RNN, nn.LSTM, nn.GRU)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_LAYERS = (*_FEATURES, *_RECURRENT, *CONVOLUTIONS, *TRANSPOSED, *_BATCH_NORMS, *_INSTANCE_NORMS, nn.GroupNorm)
_LAYERS_OF_OTHERS = {"transformers.pytorch_utils"}  # Conv1D
_ELEMENTWISE = {"torch.nn.modules.activation", "torch.nn.modules.dropout", "transformers.activations"}


class UnitDimensions:
    """Finds the dimension of the units in outputs, in the order of calls; None where it is not known.

    Layers of torch define it. An output that is, or is computed element by element from, a tensor of known units has
    the same. So has one of exactly the shape of a layer's output, unless two layers or two dimensions could be meant.
    """

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._shapes: dict[torch.Size, int | None] = {}  # None if layers disagree

    def of(self, module: nn.Module, args: tuple[Any, ...], tensor: Tensor, is_first: bool) -> int | None:
        """Return the dimension for a tensor of a call's output, the first one or another."""
        is_layer, is_elementwise = _kind_of(cast("Any", type(module)))
        if is_layer and _has_units(module, is_first) and tensor.ndim:
            dim: int | None = feature_dim(module) % tensor.ndim
            self._shapes[tensor.shape] = dim if self._shapes.get(tensor.shape, dim) == dim else None
        else:
            dim = self._dim_of(tensor)
            if dim is None and is_elementwise and args and args[0].shape == tensor.shape:
                dim = self._dim_of(args[0])
            if dim is None:
                dim = self._dim_of_shape(tensor.shape)
        if dim is not None:
            self._tensors[id(tensor)] = weakref.ref(tensor), dim
        return dim

    def _dim_of(self, tensor: Tensor) -> int | None:
        known, dim = self._tensors.get(id(tensor), (None, None))
        return dim if known is not None and known() is tensor else None

    def _dim_of_shape(self, shape: torch.Size) -> int | None:
        dim = self._shapes.get(shape)
        return None if dim is None or shape[1:].count(shape[dim]) > 1 else dim


def defines_units(module: nn.Module) -> bool:
    """Return True for a layer whose outputs have units, which functions of them have too."""
    return _kind_of(cast("Any", type(module)))[0]


@functools.lru_cache(512)
def _kind_of(module: Any) -> tuple[bool, bool]:
    """Return whether modules of a class are layers that define their units, and whether they compute elementwise."""
    is_layer = any(issubclass(module, kind) and module.forward is kind.forward for kind in _LAYERS)
    return (
        is_layer or module.__module__ in _LAYERS_OF_OTHERS,
        module.__module__ in _ELEMENTWISE or module is nn.Identity,
    )


def _has_units(module: nn.Module, is_first: bool) -> bool:
    """Return False for attention weights, and for normalization over several dimensions."""
    is_weights = isinstance(module, nn.MultiheadAttention) and not is_first
    return not is_weights and len(getattr(module, "normalized_shape", (1,))) == 1
