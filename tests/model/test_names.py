"""Names without wrappers, tags that loggers keep, and selections of names."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ignite_monitor.model.names import Selection, named_modules, named_parameters, tags, unwrapped


class Mine(nn.Module):
    """A user's own attribute called ``module``, and a parameter beside it."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(1))


def compiled(module):
    return torch.compile(module, backend="eager")


NAMES = ["scale", "module.weight", "module.bias"]
WRAPPINGS = {
    "none": lambda model: model,
    "DataParallel": nn.DataParallel,
    "compile": compiled,
    "checkpoint": checkpoint_wrapper,
    "all": lambda model: compiled(nn.DataParallel(checkpoint_wrapper(model))),
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_parameters_have_the_users_own_names(wrapping):
    model = Mine()
    result = {name: parameter for name, parameter, _ in named_parameters(WRAPPINGS[wrapping](model))}
    assert list(result) == NAMES
    assert [id(result[name]) for name in NAMES] == [id(parameter) for parameter in model.parameters()]
    assert unwrapped(WRAPPINGS[wrapping](model)) is model


def test_wrapped_in_the_middle():
    model = nn.Sequential(compiled(Mine()), checkpoint_wrapper(Mine()), nn.DataParallel(Mine()))
    names = [name for name, _, _ in named_parameters(model)]
    assert names == [f"{place}.{name}" for place in range(3) for name in NAMES]


def test_modules_and_owners():
    model = Mine()
    wrapped = nn.DataParallel(model)
    assert list(named_modules(wrapped)) == [("", wrapped), ("", model), ("module", model.module)]
    assert [owner for _, _, owner in named_parameters(wrapped)] == [model, model.module, model.module]


def test_tied_parameters_have_their_first_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    assert [name for name, _, _ in named_parameters(model)] == ["0.weight", "0.bias", "1.bias"]


def test_tags():
    assert tags(["a.b/c-d_e", "a b", "a_b", "a:b", "a_b_2", "ü"]) == [
        "a.b/c-d_e",
        "a_b",
        "a_b_2",
        "a_b_3",
        "a_b_2_2",
        "_",
    ]


LAYERS = ["", "layers.0.attn", "layers.1.attn", "layers.1.mlp", "head"]


@pytest.mark.parametrize(
    ("include", "exclude", "picked"),
    [
        (None, None, LAYERS),
        ("attn", None, LAYERS[1:3]),
        (r"^layers\.1", r"mlp$", LAYERS[2:3]),
        (None, "layers", ["", "head"]),
        (re.compile("HEAD", re.IGNORECASE), None, ["head"]),
        ("", None, LAYERS),
    ],
)
def test_picks(include, exclude, picked):
    selection = Selection(include, exclude)
    assert [name for name in LAYERS if name in selection] == picked


@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_bad_patterns_are_named(argument):
    with pytest.raises(TypeError, match=f"Argument {argument} should be a regular expression, but given 3"):
        Selection(**{argument: 3})
    with pytest.raises(ValueError, match=rf"Argument {argument} should be a regular expression, but given '\(':"):
        Selection(**{argument: "("})
