"""RNG state of generators that modules hold is unchanged."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from ignite_monitor.scaling import coordinate_check, parametrize

X, Y = torch.ones(5, 6), torch.zeros(5, dtype=torch.long)


class OwnDropout(nn.Module):
    """Draws from a generator of its own, also in evaluation mode."""

    def __init__(self, held):
        super().__init__()
        self.held = {"one": [held]}

    def draw(self, count):
        held = self.held["one"][0]
        if isinstance(held, torch.Generator):
            return torch.rand(count, generator=held)
        return torch.tensor([held.random() for _ in range(count)])

    def forward(self, x):
        return x * (self.draw(x.shape[-1]) > 0.1)


HELD = {
    "torch": lambda: torch.Generator().manual_seed(5),
    "python": lambda: random.Random(5),
    "numpy": lambda: np.random.default_rng(5),
}


@pytest.mark.parametrize("how", HELD)
def test_neither_moves_a_generator(how):
    held = HELD[how]()

    def make(width):
        return nn.Sequential(nn.Linear(6, width), OwnDropout(held), nn.Tanh(), nn.Linear(width, 3))

    def make_model(width):
        model = make(width)
        return model, torch.optim.SGD(model.parameters(), 0.1)

    parametrize(make, (8, 16), sample_input=X)
    coordinate_check(make_model, lambda width: (X, Y), [4, 8], steps=2, seeds=2)
    assert torch.equal(OwnDropout(held).draw(100), OwnDropout(HELD[how]()).draw(100))
