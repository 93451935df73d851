"""Small models of two kinds, and ways to plant what is not finite in one of their modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        hidden = torch.full((x.shape[1], x.shape[1]), -math.inf).triu(1)
        weights = (query @ key.mT / math.sqrt(query.shape[-1]) + hidden).softmax(-1)
        return self.project((weights @ value).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int = 11, width: int = 8, length: int = 6, tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList([Block(width, 2)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.tokens(ids) + self.positions(torch.arange(ids.shape[1])))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.shortcut = nn.Conv2d(4, 6, 1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        y += self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Sequential):
    def __init__(self) -> None:
        stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        pool = nn.AdaptiveAvgPool2d(1)
        super().__init__(stem, Residual(), pool, nn.Flatten(), nn.Dropout(0.2), nn.Linear(6, 5))


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
