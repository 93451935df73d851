"""Random number generators that modules hold are where they would be without us."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ignite_monitor.scaling import coordinate_check, parametrize

X, Y = torch.ones(5, 6), torch.zeros(5, dtype=torch.long)


class OwnDropout(nn.Module):
    """Also in evaluation mode."""

    def __init__(self, held):
        super().__init__()
        self.held = held

    def forward(self, x):
        held = next(iter(self.held.values())) if isinstance(self.held, dict) else self.held
        held = held[0] if isinstance(held, list) else held
        if isinstance(held, torch.Generator):
            mask = torch.rand(x.shape, generator=held)
        elif isinstance(held, random.Random):
            mask = torch.tensor([held.random() for _ in range(x.shape[-1])])
        else:
            mask = torch.tensor(held.random(x.shape[-1]), dtype=torch.float32)
        return x * (mask > 0.1)


def torch_generator():
    return torch.Generator().manual_seed(5)


HELD = {
    "attribute": torch_generator,
    "list": lambda: [torch_generator()],
    "dict": lambda: {"one": [torch_generator()]},
    "python": lambda: random.Random(5),
    "numpy": lambda: np.random.default_rng(5),
}


def draws(held):
    dropout = OwnDropout(held)
    return dropout(torch.arange(1.0, 101.0)).tolist()


def make(held):
    """A function of the width, whose models all hold one generator."""
    return lambda width: nn.Sequential(
        nn.Linear(6, width), OwnDropout(held), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 3)
    )


@pytest.mark.parametrize("how", HELD)
def test_parametrize_moves_none(how):
    held = HELD[how]()
    parametrize(make(held), (8, 16), sample_input=X)
    assert draws(held) == draws(HELD[how]())


@pytest.mark.parametrize("how", HELD)
def test_coordinate_check_moves_none(how):
    held = HELD[how]()

    def make_model(width):
        model = make(held)(width)
        return model, torch.optim.SGD(model.parameters(), 0.1)

    def train_step(model, optimizer, batch):
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    coordinate_check(make_model, lambda width: (X, Y), [4, 8], train_step=train_step, steps=2, seeds=2)
    assert draws(held) == draws(HELD[how]())
