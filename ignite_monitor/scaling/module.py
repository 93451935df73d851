"""Modules whose outputs are multiplied by a power of the width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.checks import check_count, check_real
from ignite_monitor.model._torch import known_forward_hooks, need, pytree
from ignite_monitor.scaling.graph import LAYER_TYPES


class Multiplier:
    """A forward hook that multiplies what a module returns; it also says what is known of the layer.

    It is copied and pickled with the module, and ``torch.compile`` goes through it.

    Args:
        layer_type: "embedding", "hidden", "readout" or "attention".
        a: the exponent of the multiplier, None for the default.
        b: the exponent of the initial standard deviation, None for the default.
        c: the exponent of the learning rate, None to solve for it.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if there is no such layer type, or a number is out of its range.
    """

    def __init__(
        self,
        width: int,
        layer_type: str,
        a: float | None = None,
        b: float | None = None,
        c: float | None = None,
    ) -> None:
        if not isinstance(layer_type, str) or layer_type not in LAYER_TYPES:
            raise ValueError(f"Argument layer_type should be one of {LAYER_TYPES}, but given {layer_type!r}")
        need("A multiplier", pytree)
        self.width = check_count("width_dim", width, least=1)
        self.layer_type = layer_type
        self.a = None if a is None else check_real("a", a)
        self.b = None if b is None else check_real("b", b)
        self.c = None if c is None else check_real("c", c)
        self.value = 1.0
        self.start = 0.0  # the exponent of the layer's output before the first update
        self.rate = 0.0  # a + c with Adam, for a layer that sums over n

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """The output, with every floating-point tensor in it multiplied."""
        if self.value == 1.0:
            return output
        if isinstance(output, Tensor):
            return self._times(output)
        return pytree.tree_map_only(Tensor, self._times, output)

    def _times(self, tensor: Tensor) -> Tensor:
        return tensor * self.value if tensor.is_floating_point() else tensor


def multiplier_of(module: nn.Module) -> Multiplier | None:
    """The multiplier that a module has, if it has one."""
    return next((hook for hook in known_forward_hooks(module).values() if isinstance(hook, Multiplier)), None)


class ParametrizedModule(nn.Module):
    r"""A layer whose output is multiplied by :math:`n^{-a}`, n its width, once a :class:`Parametrization` is made.

    Until then it does what the module does. It may be any module, whose parameters of two or more dimensions are taken
    as its weights, or a function without parameters that takes the products of two activations.

    Args:
        module: the module, or a function for ``layer_type="attention"``.
        width_dim: n: the fan-in of a hidden layer or a readout, how many features an embedding gives, the head's
            dimension in attention.
        layer_type: "embedding" (from inputs whose size does not grow), "hidden", "readout" (to outputs whose size does
            not grow), or "attention" for :math:`q k^\top` without weights, not divided by anything yet.
        a: the exponent of the multiplier; None for that of the layer type.
        b: the exponent of the initial standard deviation; None for that of the layer type.
        c: the exponent of the learning rate; None to solve for it.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument has a value it can't have, or what has to have weights has none.

    Examples:
        .. code-block:: python

            model = nn.Sequential(
                ParametrizedModule(nn.Linear(64, n), width_dim=n, layer_type="embedding"),
                nn.ReLU(),
                ParametrizedModule(nn.Linear(n, n), width_dim=n, layer_type="hidden"),
                nn.ReLU(),
                ParametrizedModule(nn.Linear(n, 10), width_dim=n, layer_type="readout"),
            )
            optimizer = torch.optim.Adam(Parametrization(model).param_groups)
    """

    def __init__(
        self,
        module: nn.Module | Callable[..., Any],
        *,
        width_dim: int,
        layer_type: str,
        a: float | None = None,
        b: float | None = None,
        c: float | None = None,
    ) -> None:
        super().__init__()
        if not callable(module):
            raise TypeError(
                f"Argument module should be of type torch.nn.Module or a function, but given {type(module)}"
            )
        self.register_forward_hook(Multiplier(width_dim, layer_type, a, b, c))
        weights = isinstance(module, nn.Module) and any(parameter.ndim > 1 for parameter in module.parameters())
        if weights is (layer_type == "attention"):
            raise ValueError(
                f"Argument module should have {'no weights' if weights else 'weights, parameters of two dimensions'} "
                f"as a layer of type {layer_type!r}, but given {module}"
            )
        if layer_type == "attention" and (b, c) != (None, None):
            raise ValueError(f"Arguments b and c should be None for a layer without weights, but given {b} and {c}")
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns.

        Args:
            args: its arguments.
            kwargs: its keyword arguments.
        """
        return self.module(*args, **kwargs)


def draw_weights(weight: Tensor, std: float, seed: int, padding_idx: int | None = None) -> Tensor:
    """Normally distributed initial weights like a parameter; the same for the same seed, on any device.

    Args:
        weight: the parameter, of which shape, dtype and device are taken.
        padding_idx: a row that is 0.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = torch.empty(weight.shape, dtype=torch.float32, device="cpu").normal_(0.0, std, generator=generator)
    if padding_idx is not None:
        drawn[padding_idx] = 0.0
    return drawn.to(device=weight.device, dtype=weight.dtype)
