"""Which compiled functions run eagerly: those that refer to a monitored model."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

from ignite_monitor.model.eager import refers_to

MODEL = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
OTHER = nn.Linear(2, 2)


class Trainer:
    def __init__(self, model):
        self.model = model

    def step(self, x):
        return self.model(x)


TRAINER = Trainer(MODEL)


def with_global(x):
    return MODEL(x)


def in_a_comprehension(x):
    return [MODEL(row) for row in x]


def through_an_object(x):
    return TRAINER.step(x)


def through_a_function(x):
    return with_global(x)


def with_default(x, model=MODEL):
    return model(x)


def with_keyword(x, *, model=MODEL):
    return model(x)


def closing_over(model):
    def function(x):
        return model(x)

    return function


def with_an_empty_cell():
    def function(x):
        return later(x)

    if function is None:
        later = None
    return function


def free(x):
    return torch.nn.functional.softmax(x.sin(), -1)


def with_another(x):
    return OTHER(x)


def refers(value):
    return refers_to(value, {id(module) for module in MODEL.modules()})


@pytest.mark.parametrize(
    "value",
    [
        *(MODEL, MODEL[0], nn.Sequential(MODEL), MODEL.forward, TRAINER, TRAINER.step),
        *(with_global, in_a_comprehension, through_an_object, through_a_function, with_default, with_keyword),
        *(closing_over(MODEL), types.SimpleNamespace(inner=types.SimpleNamespace(model=MODEL[1]))),
    ],
)
def test_values_that_refer_to_the_model(value):
    assert refers(value)


@pytest.mark.parametrize(
    "value",
    [
        *(free, with_another, OTHER, Trainer(OTHER).step, closing_over(OTHER), with_an_empty_cell()),
        *(1, "a", None, torch.ones(2), torch.optim.SGD(OTHER.parameters()), torch.optim.SGD(MODEL.parameters()).step),
    ],
)
def test_values_that_do_not(value):
    assert not refers(value)
