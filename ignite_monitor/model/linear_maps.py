"""Modules that are linear in input and weight, and the dimension of features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ignite_monitor.model._torch import batch_norm, conv_forward, convolution, parameters_in

LinearMap = Callable[[Tensor, Tensor], Tensor]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_OVER_CHANNELS = (batch_norm, nn.GroupNorm, nn.PReLU)  # the first is that of BatchNorm and InstanceNorm


def is_plain(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Return True if a module computes the same as one of the kinds, with a weight that is its own parameter.

    A forward of its own excludes a module, and so does a computed weight: a parametrization, weight or spectral norm.
    """
    if "forward" in vars(module) or parameters_in(module).get("weight") is None:
        return False
    own = type(module)
    inherited = (kind for kind in kinds if isinstance(module, kind))
    return any(own.forward is kind.forward and conv_forward(own) is conv_forward(kind) for kind in inherited)


def linear_map(module: nn.Module) -> Callable[[tuple[Any, ...], dict[str, Any]], LinearMap] | None:
    """A function of a call's arguments that returns the output as a function of input and weight, without bias.

    None if it is not one of Linear, convolutions, transposed convolutions, and Conv1D of transformers.
    """
    if is_plain(module, nn.Linear):
        return lambda args, kwargs: F.linear
    if is_plain(module, *CONVOLUTIONS):
        convolve = convolution(module)
        return lambda args, kwargs: lambda x, weight: convolve(x, weight, None)
    if is_plain(module, *TRANSPOSED):
        return lambda args, kwargs: _transposed(module, *args, **kwargs)
    if is_conv1d(module) and is_plain(module, type(module)):
        return lambda args, kwargs: torch.matmul
    return None


def feature_dim(module: nn.Module) -> int:
    """The dimension that holds the features in a module's inputs and outputs."""
    if isinstance(module, (*CONVOLUTIONS, *TRANSPOSED)):
        return -len(module.kernel_size) - 1
    return 1 if isinstance(module, _OVER_CHANNELS) else -1


def is_conv1d(module: nn.Module) -> bool:
    """Return True for Conv1D of transformers, a linear layer whose weight is of shape (in, out)."""
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__}" == "transformers.pytorch_utils.Conv1D"


def _transposed(module: Any, input: Tensor, output_size: list[int] | None = None) -> LinearMap:
    dims = len(module.kernel_size)
    padding = module.output_padding
    if output_size is not None:  # how much larger it is than what the others give
        settings = zip(module.stride, module.padding, module.kernel_size, module.dilation, strict=True)
        least = [
            (size - 1) * stride - 2 * pad + dilation * (kernel - 1) + 1
            for size, (stride, pad, kernel, dilation) in zip(input.shape[-dims:], settings, strict=True)
        ]
        padding = [size - other for size, other in zip(output_size[-dims:], least, strict=True)]
    function: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
    return lambda x, weight: function(
        x, weight, None, module.stride, module.padding, padding, module.groups, module.dilation
    )
