"""Batches for two kinds of models, and ways to plant what is not finite in one of their modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests._models import GPT, ResNet


def gpt_batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(11, (3, 7), generator=generator) for _ in range(count)]
    return [(item[:, :-1], item[:, 1:]) for item in ids]


def resnet_batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 1, 6, 6, generator=generator), torch.randint(5, (4,), generator=generator))
        for _ in range(count)
    ]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], list[tuple[Tensor, Tensor]]]]] = {
    "gpt": (GPT, gpt_batches),
    "resnet": (ResNet, resnet_batches),
}


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    output = model(batch[0])
    return F.cross_entropy(output.flatten(0, -2), batch[1].flatten())


# Planting


class _ZeroTimesInf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 0 * math.inf


def nan_in_output(output: Tensor) -> Tensor:
    mask = torch.zeros_like(output, dtype=torch.bool)
    mask.view(-1)[-1] = True
    return output.masked_fill(mask, math.nan)


def sqrt_at_zero(output: Tensor) -> Tensor:
    return output + (output * 0).abs().sqrt()


def zero_times_inf(output: Tensor) -> Tensor:
    return _ZeroTimesInf.apply(output)


def inf_in_backward(output: Tensor) -> Tensor:
    return output + (output * 0).abs().pow(0.25) * 0.5


def gradient_hook(output: Tensor) -> Tensor:
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient * math.nan)
    return output


IN_BACKWARD = {item.__name__: item for item in (sqrt_at_zero, zero_times_inf, inf_in_backward, gradient_hook)}


def plant(module: nn.Module, change: Callable[[Any], Any]) -> Callable[[], None]:
    """Change a module's output in its own code, which a copy has too; the result undoes it."""
    kind = type(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(kind.forward(self, *args, **kwargs))

    module.__class__ = type(kind.__name__, (kind,), {"forward": forward})

    def undo() -> None:
        module.__class__ = kind

    return undo
