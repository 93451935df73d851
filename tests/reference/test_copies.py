"""Copies of models: what has none, and that neither making nor running one reaches the training model."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ignite_monitor.reference.reference import Reference, separate_copy
from tests._helpers import assert_same, same
from tests.reference._recorder import watch


class Keeper(nn.Module):
    """Two layers and a normalization, used by what ``keep`` makes of them."""

    def __init__(self, keep=None):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.last = nn.Linear(4, 2)
        self.kept = [self.inner] if keep is None else keep(self)

    def forward(self, x):
        kept = self.kept
        while not callable(kept):
            kept = kept.call if hasattr(kept, "call") else next(iter(kept))
        return self.last(torch.tanh(kept(x)))


class Holder:
    def __init__(self, call):
        self.call = call


def captured(model):
    inner = model.inner
    return lambda x: inner(x)


REFUSED = {
    "a closure": captured,
    "a default": lambda model: lambda x, inner=model.inner: inner(x),
    "a partial's function": lambda model: functools.partial(captured(model)),
    "the forward of a layer": lambda model: (lambda method: lambda x: method(x))(model.inner[0].forward),
    "an object": lambda model: Holder(captured(model)),
}
COPIED = {
    "a module": lambda model: model.inner,
    "a bound method": lambda model: model.inner.forward,
    "a partial": lambda model: functools.partial(model.inner),
    "an object": lambda model: Holder(model.inner),
    "a function": lambda model: F.relu,
}


@pytest.mark.parametrize("keep", REFUSED.values(), ids=REFUSED)
def test_functions_over_own_modules_are_not_compared_with_a_copy(keep):
    model = Keeper(keep)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    passes, recorder, warnings = watch(model)
    with passes.watched(), torch.no_grad():
        model(torch.randn(8, 4))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items() if "." not in name)
    assert {*before} == {*model.state_dict()}
    assert (recorder.pairs, len(warnings)) == ({}, 1)
    plain = Keeper()
    plain.kept = keep(plain)
    assert measure_difference(model, plain) > 0


def measure_difference(model, other):
    """Return the difference of the last layers' outputs from those of the given reference."""
    passes, recorder, warnings = watch(model, other)
    with passes.watched():
        model(torch.randn(8, 4))
    assert warnings == []
    return recorder.differences()["last"][0]


@pytest.mark.parametrize("keep", COPIED.values(), ids=COPIED)
def test_other_attributes_are_copied(keep):
    torch.manual_seed(0)
    model = Keeper(keep)
    reference = Reference(model, "init")
    x, state = torch.randn(8, 4), torch.get_rng_state()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    output = reference.run((x,), {})
    assert same(before, model.state_dict())
    assert_same(torch.get_rng_state(), state)
    assert_same(output, model(x))


# Deep copies that a model makes itself


class Itself(Keeper):
    def __deepcopy__(self, memo):
        return self


class Weights(Keeper):
    def __deepcopy__(self, memo):
        new = type(self)()
        new.last = copy.copy(self.last)
        return new


@pytest.mark.parametrize("kind", [Itself, Weights])
@pytest.mark.parametrize("part", [False, True])
def test_a_deep_copy_that_shares_modules_or_weights_is_refused(kind, part):
    model = nn.Sequential(kind(), nn.Linear(2, 2)) if part else kind()
    with pytest.raises(ValueError, match="its __deepcopy__ returns the same modules, the same parameters"):
        Reference(model, "init")


def test_a_copy_has_no_hooks_of_users():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    handles = [
        model[0].register_forward_hook(print),
        model[0].register_forward_pre_hook(print, with_kwargs=True),
        model[1].register_full_backward_hook(print),
        model[1].register_full_backward_pre_hook(print),
    ]
    separate = separate_copy(model, [])
    separate(torch.ones(1, 2)).sum().backward()
    assert sum(len(vars(model[i])[key]) for i in (0, 1) for key in vars(model[i]) if key.endswith("_hooks")) == len(
        handles
    )


# Code that reaches the training model by other ways

LENT = {}


class Global(Keeper):
    def __init__(self):
        super().__init__()
        self.kept = lambda x: LENT["module"](x)


class Opaque(Holder):
    def __deepcopy__(self, memo):
        return self


class Shared(Keeper):
    def __init__(self):
        super().__init__(lambda model: Opaque(model.inner))


class Caught(Shared):
    def forward(self, x):
        try:
            return super().forward(x)
        except Exception:  # noqa: BLE001 - as some code does
            return self.last(x)


@pytest.mark.parametrize("kind", [Global, Shared, Caught])
@pytest.mark.parametrize("given", ["init", "module"])
def test_a_reference_is_stopped_before_it_calls_the_training_model(kind, given):
    outcomes = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = kind()
        LENT["module"] = model.inner
        passes, recorder, warnings = watch(model, copy.deepcopy(model) if given == "module" else "init")
        calls, counted = [], {*model.inner}
        hook = register_module_forward_pre_hook(
            lambda module, _, calls=calls, counted=counted: calls.append(None) if module in counted else None
        )
        torch.manual_seed(1)
        with passes.watched() if watched else torch.enable_grad():
            for _ in range(3):
                model(torch.ones(8, 4)).sum().backward()
        hook.remove()
        gradients = [None if item.grad is None else item.grad for item in model.parameters()]
        outcomes.append([len(calls), torch.rand(3), dict(model.state_dict()), gradients])
    assert same(*outcomes)
    assert outcomes[0][0] == 9
    assert recorder.pairs == {}
    assert passes.incomplete == {"", "inner", "inner.0", "inner.1", "inner.2", "last"}
    assert warnings == ["a copy calls inner of the model that trains, so nothing is compared"]


def test_the_next_pass_is_compared_where_the_training_model_is_not_called():
    class Sometimes(Shared):
        def forward(self, x):
            return super().forward(x) if (x > 0).all() else self.last(x)

    model = Sometimes()
    passes, recorder, _ = watch(model)
    for sign in (1, -1):
        with passes.watched():
            model(sign * torch.ones(8, 4))
    assert recorder.complete.keys() == {"", "last"}
    assert passes.incomplete == set()
    assert not any(module._forward_pre_hooks for module in model.modules())
