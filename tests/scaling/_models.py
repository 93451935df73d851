"""Models for tests of parametrizations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ignite_monitor.scaling.parametrization import Multiplier

HEADS = 4


def multipliers(model):
    """Factors of the forward hooks of a model's modules, by name."""
    return {
        name: hook.value
        for name, module in model.named_modules()
        for hook in module._forward_hooks.values()
        if isinstance(hook, Multiplier)
    }


def weight_of(parametrization, layer):
    return parametrization.model.get_parameter(parametrization.layers[layer].weight)


def mlp(n):
    return nn.Sequential(
        nn.Linear(6, n),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(n, n),
        nn.LayerNorm(n),
        nn.GELU(),
        nn.Linear(n, 3),
    )


class RMSNorm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(n))

    def forward(self, x):
        return self.gain * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def rotate(x):
    angles = torch.arange(x.shape[-2])[:, None] / torch.arange(1, x.shape[-1] // 2 + 1)
    cos, sin = torch.cat([angles.cos()] * 2, dim=-1), torch.cat([angles.sin()] * 2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, n, fused=True):
        super().__init__()
        self.qkv = nn.Linear(n, 3 * n, bias=False)
        self.out = nn.Linear(n, n)
        self.fused = fused

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k = rotate(q), rotate(k)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1]
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            mixed = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.gate = nn.Linear(n, 2 * n)
        self.up = nn.Linear(n, 2 * n)
        self.down = nn.Linear(2 * n, n)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, n, fused):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(n), nn.LayerNorm(n)
        self.attention, self.mlp = Attention(n, fused), SwiGLU(n)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, n, fused=True):
        super().__init__()
        self.tokens = nn.Embedding(11, n)
        self.positions = nn.Parameter(0.02 * torch.randn(8, n))
        self.blocks = nn.ModuleList(Block(n, fused) for _ in range(2))
        self.norm = RMSNorm(n)
        self.head = nn.Linear(n, 11)

    def forward(self, tokens, targets=None):
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x).float())
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def llama(n, *, tied=False, attention="sdpa"):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=13,
            hidden_size=n,
            intermediate_size=2 * n,
            num_hidden_layers=2,
            num_attention_heads=n // 8,
            num_key_value_heads=n // 16,
            head_dim=8,
            tie_word_embeddings=tied,
            attn_implementation=attention,
        )
    )


TOKENS = torch.tensor([[1, 2, 3, 4, 5]])
