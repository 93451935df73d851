"""Hooks that see forward passes, and the module that runs."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ignite_monitor.model._torch import in_backward
from ignite_monitor.model.forward import (
    ModuleHook,
    after_forward,
    before_forward,
    running_module,
)
from tests._helpers import assert_same


def hooks(model: nn.Module) -> list[dict]:
    names = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
    return [dict(getattr(module, name)) for module in model.modules() for name in names]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x, *, scale=1.0):
        return self.inner(x) * scale


def test_sees_what_others_get_with_keyword_arguments_and_leaves_as_it_came():
    model = Scaled()
    model.register_forward_hook(lambda module, args, output: output + 1)
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    before = hooks(model)
    seen = []
    x = torch.ones(2, 3)
    with (
        before_forward([model], lambda *given: seen.append(given)),
        after_forward([model, model.inner], lambda *given: seen.append(given)),
    ):
        output = model(x, scale=3.0)
    assert hooks(model) == before
    assert [given[0] for given in seen] == [model, model.inner, model]
    torch.testing.assert_close(seen[0][1][0], x * 2)
    assert seen[0][2] == {"scale": 3.0}
    assert seen[2][2] is output
    model(x)
    assert len(seen) == 3


def test_copies_made_meanwhile_have_hooks_that_do_nothing():
    """Saved models need nothing of this package."""

    class Seen(ModuleHook):
        def __call__(self, *given):
            seen.append(given[0])

    model, seen, x = Scaled(), [], torch.ones(2, 3)
    with before_forward([model], Seen()), after_forward([model, model.inner], Seen()):
        saved = pickle.dumps(model)
        copied = copy.deepcopy(model)
    assert b"ignite" not in saved.replace(__name__.encode(), b"")
    for other in (copied, pickle.loads(saved)):
        assert_same(other(x), model(x))
        pickle.dumps(other)
    assert seen == []


def test_running_module_is_the_innermost():
    model, seen = nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU())), []
    with before_forward(model.modules(), lambda module, *_: seen.append((running_module(), module))):
        model(torch.ones(1))
    assert [running is module for running, module in seen] == [True] * 4
    assert running_module() is None


def test_two_at_once_and_an_error_in_the_forward():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(4, 4))
    before = hooks(model)
    first, second = [], []
    outer = after_forward(model, lambda *given: first.append(given[0]))
    inner = after_forward(model, lambda *given: second.append(given[0]))
    with pytest.raises(RuntimeError, match="shapes"), outer, inner:
        model(torch.ones(2, 3))
    assert first == second == [model[0]]
    assert hooks(model) == before


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_is_distinguished_from_a_pass(use_reentrant):
    layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Tanh())
    seen = []
    x = torch.ones(2, 3, requires_grad=True)
    with after_forward([layers[0]], lambda *_: seen.append(in_backward())):
        checkpoint(layers, x, use_reentrant=use_reentrant).sum().backward()
    assert seen == [False, True]
