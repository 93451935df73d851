"""Where tensors come from, while a model is traced."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

# Whether a tensor is one in a function transform of torch.func.
is_transformed = torch._C._functorch.is_functorch_wrapped_tensor


class Label(NamedTuple):
    """Where a tensor comes from.

    Attributes:
        node: the node whose output it follows.
        weight: the parameter outside of all layers that it is, or is a part of.
        outside: the parameter outside of all layers that its inputs were multiplied by.
        lost: why it can't be said.
        layer: the layer whose output it is, but for its shape and for numbers that it was multiplied by.
        growth: the logarithm of how much more the larger model has multiplied it by than the smaller one.
        line: where it was multiplied by what grows.
        scores: of a product of two activations, where it was made, and over how many elements the models sum.
    """

    node: str | None = None
    weight: str | None = None
    outside: str | None = None
    lost: str | None = None
    layer: str | None = None
    growth: float = 0.0
    line: str | None = None
    scores: tuple[str, int, int] | None = None


CONSTANT = Label()


class MadeTensors(TorchDispatchMode):
    """Keeps whatever any operation makes, those too that a function mode is not shown."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors: dict[int, Tensor] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        return storage_of(tensor) in self._tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self._tensors.setdefault(storage_of(tensor), tensor)
        return result


def storage_of(tensor: Tensor) -> int:
    """What all views of a tensor have in common; 0 where there is no such thing."""
    return 0 if tensor.layout != torch.strided or is_transformed(tensor) else int(tensor.untyped_storage()._cdata)


def tensors_in(tree: Any, depth: int = 0) -> list[Tensor]:
    """All tensors in a tree.

    Args:
        depth: how many levels deep to look into the attributes of objects, too.
    """
    found = []
    for leaf in _pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif depth > 0 and hasattr(leaf, "__dict__") and not isinstance(leaf, (nn.Module, type)):
            found += tensors_in(vars(leaf), depth - 1)
    return found
