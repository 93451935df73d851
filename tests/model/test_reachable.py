"""What a function may come across when it is called."""

from __future__ import annotations

import functools
import types
import weakref

import pytest
import torch
from torch import nn

from ignite_monitor.model.eager import reaches

MODEL = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
OTHER = nn.Linear(2, 2)
HERE = types.ModuleType("somewhere")
HERE.model = MODEL


class Slots:
    __slots__ = ("model",)

    def __init__(self):
        self.model = MODEL

    def step(self, x):
        return self.model(x)


def with_global(x):
    return MODEL(x)


def through_a_function(x):
    return with_global(x)


def in_a_lambda(x):
    return [with_global(each) for each in x]


def through_a_module(x):
    return HERE.model(x)


def with_default(x, model=MODEL):
    return model(x)


def with_keyword(x, *, model=MODEL):
    return model(x)


def closing_over(model):
    def function(x):
        return model(x)

    return function


def free(x):
    return torch.nn.functional.softmax(x.sin(), -1)


def with_another(x):
    return OTHER(x)


@pytest.mark.parametrize(
    "start",
    [
        MODEL,
        MODEL[0],
        nn.Sequential(MODEL),
        MODEL.forward,
        Slots(),
        Slots().step,
        with_global,
        through_a_function,
        in_a_lambda,
        through_a_module,
        with_default,
        with_keyword,
        closing_over(MODEL),
        closing_over([{"a": (1, MODEL)}]),
        functools.partial(free, MODEL),
        functools.wraps(free)(closing_over(with_global)),
        types.SimpleNamespace(inner=types.SimpleNamespace(model=MODEL[1])),
    ],
)
def test_what_reaches_the_modules(start):
    assert reaches([start], {id(module) for module in MODEL.modules()})


@pytest.mark.parametrize(
    "start",
    [
        free,
        with_another,
        OTHER,
        closing_over(OTHER),
        [1, "a", None, torch.ones(2)],
        torch.optim.SGD(OTHER.parameters()),
    ],
)
def test_what_does_not(start):
    assert not reaches([start], {id(module) for module in MODEL.modules()})


def test_what_takes_too_long_to_say_may_reach_them():
    assert reaches([[[] for _ in range(30_000)]], set())


def test_nothing_is_kept():
    model = nn.Linear(2, 2)
    reference = weakref.ref(model)
    assert reaches([closing_over(model)], {id(model)})
    del model
    assert reference() is None
