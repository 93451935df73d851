"""The dimension of the units in a module's output: channels or features."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ignite_monitor.model.linear_maps import CONVOLUTIONS, TRANSPOSED, feature_dim

_FEATURES = (nn.Linear, nn.Bilinear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.MultiheadAttention)
_RECURRENT = (nn.RNN, nn.LSTM, nn.GRU)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_LAYERS: Any = (*_FEATURES, *_RECURRENT, *CONVOLUTIONS, *TRANSPOSED, *_BATCH_NORMS, *_INSTANCE_NORMS, nn.GroupNorm)
_LAYERS_OF_OTHERS = {"transformers.pytorch_utils"}  # Conv1D
_ELEMENTWISE = {"torch.nn.modules.activation", "torch.nn.modules.dropout", "transformers.activations"}


class UnitDimensions:
    """Finds the dimension of the units in outputs, in the order of calls; None where it is not known.

    Layers of torch define that of their first output. Modules that compute element by element, or return a tensor that
    was known before, keep it. Tensors are recognized as objects, since shapes do not tell channels from positions.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        self._dims = {id(module): feature_dim(module) for module in modules if _defines_units(module)}
        self._elementwise = {id(module) for module in modules if _is_elementwise(module)}
        self.clear()

    def __contains__(self, module: nn.Module) -> bool:
        """Return True for modules whose outputs have units, or keep those of their inputs."""
        return id(module) in self._dims or id(module) in self._elementwise

    def clear(self) -> None:
        """Forget all tensors."""
        # id -> tensor, strides, dimension
        self._known: dict[int, tuple[weakref.ref[Tensor], tuple[int, ...], int]] = {}

    def of(self, module: nn.Module, args: tuple[Any, ...], tensor: Tensor, is_first: bool) -> int | None:
        """Return the dimension for a tensor of a call's output, the first one or another."""
        dim = self._dims.get(id(module))
        if dim is not None:
            dim = dim % tensor.ndim if is_first and tensor.ndim else None
        else:
            source = args[0] if args and isinstance(args[0], Tensor) and id(module) in self._elementwise else tensor
            dim = self._dim_of(source) if source is tensor or source.shape == tensor.shape else None
        if dim is not None:
            self._known[id(tensor)] = weakref.ref(tensor), tensor.stride(), dim
        return dim

    def _dim_of(self, tensor: Tensor) -> int | None:
        known, strides, dim = self._known.get(id(tensor), (None, (), None))
        # Other strides: it was transposed in place.
        return dim if known is not None and known() is tensor and tensor.stride() == strides else None


def _defines_units(module: nn.Module) -> bool:
    """Return True for layers of torch, except normalization over several dimensions."""
    is_builtin = any(isinstance(module, kind) and type(module).forward is kind.forward for kind in _LAYERS)
    is_layer = is_builtin or type(module).__module__ in _LAYERS_OF_OTHERS
    return is_layer and len(getattr(module, "normalized_shape", (1,))) == 1


def _is_elementwise(module: nn.Module) -> bool:
    return type(module).__module__ in _ELEMENTWISE or type(module) is nn.Identity
