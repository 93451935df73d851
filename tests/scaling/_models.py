"""Models for tests of parametrizations."""

from __future__ import annotations

import torch
from torch import nn

from ignite_monitor.scaling.parametrization import Multiplier


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


TOKENS = torch.tensor([[1, 2, 3, 4, 5]])
