"""Models shared by tests."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ignite_monitor import record


def make_model(seed: int = 0, features: int = 6, hidden: int = 8, outputs: int = 3, dropout: float = 0.2) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.Linear(features, hidden), nn.BatchNorm1d(hidden), nn.Tanh(), nn.Dropout(dropout)
    return nn.Sequential(*layers, nn.Linear(hidden, outputs))


def make_mlp(
    seed: int = 0, bias: bool = True, sizes: tuple[int, ...] = (4, 8, 2), activation: Callable[[], nn.Module] = nn.Tanh
) -> nn.Sequential:
    """A model whose output depends on nothing but weights and input."""
    torch.manual_seed(seed)
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair, bias=bias), activation())]
    return nn.Sequential(*layers[:-1])


class Lambda(nn.Module):
    """A function of the module and its inputs, with parameters, buffers, modules and other attributes."""

    def __init__(self, function: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            if isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member)
            elif isinstance(member, nn.Parameter):
                self.register_parameter(name, member)
            else:
                setattr(self, name, member)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Net(nn.Module):
    """A dense net, whose sizes two ranks can't share evenly; one of them holds nothing of ``scale``.

    Args:
        sizes: features of input, hidden layer and output.
        norm: makes the normalization of the hidden layer.
        dropout: of the hidden layer.
        words: size of a vocabulary; the input is the mean of the words' embeddings.
        attention: whether the words attend to each other.
        unused: whether there is a layer that is not called.
    """

    def __init__(
        self,
        sizes: tuple[int, int, int] = (6, 5, 3),
        norm: Callable[[int], nn.Module] = nn.Identity,
        dropout: float = 0.0,
        *,
        words: int = 0,
        attention: bool = False,
        unused: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, sizes[0]) if words else None
        self.first, self.second = nn.Linear(*sizes[:2]), nn.Linear(*sizes[1:])
        self.norm, self.dropout = norm(sizes[1]), nn.Dropout(dropout)
        self.scale = nn.Parameter(torch.ones(1))
        self.attention = nn.MultiheadAttention(sizes[0], 2, batch_first=True) if attention else None
        self.unused = nn.Linear(2, 2) if unused else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        x = x if self.attention is None else self.attention(x, x, x)[0]
        x = x if self.embedding is None else x.mean(1)
        return self.second(self.dropout(torch.tanh(self.norm(self.first(x))))) * self.scale


class TwoHeads(nn.Module):
    """A body and two heads, which may be called alone, or without a gradient of the body."""

    def __init__(self, body: nn.Module, a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.body, self.a, self.b = body, a, b

    def forward(self, x: Tensor, heads: str = "ab", body: bool = True) -> dict[str, Tensor]:
        hidden = torch.tanh(self.body(x))
        hidden = hidden if body else hidden.detach()
        return {head: getattr(self, head)(hidden) for head in heads}


class Checkpointed(nn.Module):
    """A module whose activations are computed again in the backward pass; the input requires a gradient."""

    def __init__(self, inner: nn.Module, **arguments: Any) -> None:
        super().__init__()
        self.inner, self.arguments = inner, arguments

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x.clone().requires_grad_(), **self.arguments)


def masked_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention in single operations, with a mask that is not finite."""
    hidden = torch.full((query.shape[-2],) * 2, -math.inf).triu(1)
    return (query @ key.mT / math.sqrt(query.shape[-1]) + hidden).softmax(-1) @ value


class Attention(nn.Module):
    """Self-attention, by a function of queries, keys and values, or by torch's."""

    def __init__(
        self, width: int, heads: int = 2, function: Callable[..., Tensor] | None = None, **arguments: Any
    ) -> None:
        super().__init__()
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.function, self.arguments = heads, function, arguments

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        function = self.function or F.scaled_dot_product_attention
        return self.project(function(query, key, value, **self.arguments).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, records: bool, fused: bool) -> None:
        super().__init__()
        attention = {"is_causal": True} if fused else {"function": masked_attention}
        self.norm_1, self.attention = nn.LayerNorm(width), Attention(width, heads, **attention)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(dropout)
        )
        self.records = records

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        if self.records:
            record("norm", x.norm(), module=self.mlp)
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """A language model, with 5 + 12 * blocks parameters.

    Args:
        tied: whether embedding and head have one weight.
        records: whether blocks record a value.
        fused: whether attention is one operation.
        reentrant: how the blocks are checkpointed; None for not at all.
    """

    def __init__(
        self,
        vocabulary: int = 11,
        width: int = 8,
        length: int = 6,
        *,
        blocks: int = 1,
        heads: int = 2,
        dropout: float = 0.1,
        tied: bool = False,
        records: bool = False,
        fused: bool = False,
        reentrant: bool | None = None,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, records, fused) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.reentrant = reentrant

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 6, 3, 2, padding=1, bias=False), nn.BatchNorm2d(6)
        self.shortcut = nn.Conv2d(4, 6, 1, 2)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        y += self.shortcut(x)
        return self.relu(y)


class Places(nn.Module):
    """Attention among the places of an image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        places = x.flatten(2).mT
        return self.attention(places, places, places, need_weights=False)[0].mT.unflatten(2, x.shape[2:])


class ResNet(nn.Sequential):
    """Convolutions, with attention between them and the head if wanted."""

    def __init__(self, classes: int = 5, attention: bool = False) -> None:
        stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        layers = {"stem": stem, "residual": Residual()} | ({"places": Places(6)} if attention else {})
        layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "dropout": nn.Dropout(0.2)}
        super().__init__(OrderedDict(layers, head=nn.Linear(6, classes)))


class FrozenEncoder(nn.Module):
    """An encoder in evaluation mode, whose fast path differs at padded positions, and a head that is trained.

    Args:
        padding: True at padded positions of the batch.
        trainable: whether the encoder's parameters require a gradient, though none reaches them.
    """

    def __init__(self, width: int, padding: Tensor, trainable: bool = False, nested: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
        self.encoder = encoder.requires_grad_(trainable).eval()
        self.head, self.padding = nn.Linear(width, 1), padding

    def train(self, mode: bool = True) -> FrozenEncoder:
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.encoder(x, src_key_padding_mask=self.padding)
        return self.head(hidden.mean(1))
