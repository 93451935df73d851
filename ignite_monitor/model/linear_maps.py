"""Modules that are linear in input and weight, and the dimension of features."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ignite_monitor.model._torch import computes_as, parameters_in, with_weights

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LINEAR = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_OVER_CHANNELS = (*_BATCH_NORMS, nn.GroupNorm, nn.PReLU)


def is_builtin_layer(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Return True if a module computes as one of the kinds, with a weight that is a parameter and not computed."""
    if parameters_in(module).get("weight") is None:
        return False
    return any(isinstance(module, kind) and computes_as(module, kind) for kind in kinds)


def is_linear(module: nn.Module) -> bool:
    """Return True for Linear, convolutions, transposed convolutions, and Conv1D of transformers, computed as theirs."""
    return is_builtin_layer(module, *([type(module)] if is_conv1d(module) else _LINEAR))


def linear_output(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor, weight: Tensor) -> Tensor:
    """The output of a linear module for the arguments of a call, with another input and weight, without bias."""
    if is_conv1d(module):
        return x @ weight
    options = {name: value for name, value in kwargs.items() if name != "input"}
    other = with_weights(module, {"weight": weight, "bias": None}, {})
    return other.forward(x, *args[1:], **options)  # type: ignore[no-any-return]


def feature_dim(module: nn.Module) -> int:
    """The dimension that holds the features in a module's inputs and outputs."""
    if isinstance(module, (*CONVOLUTIONS, *TRANSPOSED)):
        return -len(module.kernel_size) - 1
    for dims, kind in enumerate(_INSTANCE_NORMS, start=1):
        if isinstance(module, kind):  # which takes inputs without a batch too
            return -dims - 1
    return 1 if isinstance(module, _OVER_CHANNELS) else -1


def is_conv1d(module: nn.Module) -> bool:
    """Return True for Conv1D of transformers, a linear layer whose weight is of shape (in, out)."""
    return f"{type(module).__module__}.{type(module).__qualname__}" == "transformers.pytorch_utils.Conv1D"
