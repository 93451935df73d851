"""The dimension of the units in a module's output: channels or features."""

from __future__ import annotations

import functools
import weakref
from typing import Any

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

    Layers of torch define it. Modules that compute element by element, or return a tensor that was known before, keep
    it. Tensors are recognized as objects, since shapes do not tell channels from positions.
    """

    def __init__(self) -> None:
        # id -> tensor, strides, dimension
        self._known: dict[int, tuple[weakref.ref[Tensor], tuple[int, ...], int]] = {}

    def of(self, module: nn.Module, args: tuple[Any, ...], tensor: Tensor, is_first: bool) -> int | None:
        """Return the dimension for a tensor of a call's output, the first one or another."""
        kind: Any = type(module)
        if _is_layer(kind):
            dim = feature_dim(module) % tensor.ndim if tensor.ndim and _has_units(module, is_first) else None
        else:
            source = args[0] if args and isinstance(args[0], Tensor) and _is_elementwise(kind) else tensor
            dim = self._dim_of(source) if source.shape == tensor.shape else None
        if dim is not None:
            self._known[id(tensor)] = weakref.ref(tensor), tensor.stride(), dim
        return dim

    def _dim_of(self, tensor: Tensor) -> int | None:
        known, strides, dim = self._known.get(id(tensor), (None, (), None))
        # Other strides: it was transposed in place.
        return dim if known is not None and known() is tensor and tensor.stride() == strides else None


def passes_units(module: nn.Module) -> bool:
    """Return True for modules whose outputs have units, or keep those of their inputs."""
    kind: Any = type(module)
    return _is_layer(kind) or _is_elementwise(kind)


@functools.lru_cache(512)
def _is_layer(module: Any) -> bool:
    is_builtin = any(issubclass(module, kind) and module.forward is kind.forward for kind in _LAYERS)
    return is_builtin or module.__module__ in _LAYERS_OF_OTHERS


@functools.lru_cache(512)
def _is_elementwise(module: Any) -> bool:
    return module.__module__ in _ELEMENTWISE or module is nn.Identity


def _has_units(module: nn.Module, is_first: bool) -> bool:
    """Return False for attention weights, and for normalization over several dimensions."""
    is_weights = isinstance(module, nn.MultiheadAttention) and not is_first
    return not is_weights and len(getattr(module, "normalized_shape", (1,))) == 1
