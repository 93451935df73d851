"""Modules that keep functions: the copy's are its own, and the training model is left alone by what remains shared."""

from __future__ import annotations

import copy
import functools
import random
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ignite_monitor.reference.copies import separate_copy
from ignite_monitor.reference.reference import Reference
from tests.reference.test_passes import watch


class Keeper(nn.Module):
    """Two layers and a normalization, used by whatever a subclass keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.last = nn.Linear(4, 2)
        self.keep()

    def keep(self):
        raise NotImplementedError

    def through(self, x):
        return self.kept(x)

    def forward(self, x):
        return self.last(torch.tanh(self.through(x)))


class Lambda(Keeper):
    def keep(self):
        m = self.inner
        self.kept = lambda x: m[2](m[1](m[0](x)))


class Itself(Keeper):
    def keep(self):
        self.kept = lambda x: self.inner(x)


class Default(Keeper):
    def keep(self):
        def kept(x, first=self.inner[0], *, rest=(self.inner[1], self.inner[2])):
            for each in (first, *rest):
                x = each(x)
            return x

        self.kept = kept


class Partial(Keeper):
    def keep(self):
        inner = self.inner
        self.kept = functools.partial(lambda module, x: module(inner[0](x)), inner[1:])


class Bound(Keeper):
    def keep(self):
        self.kept = self.inner.forward


class Listed(Keeper):
    def keep(self):
        first, norm, drop = self.inner
        self.steps = [lambda x: first(x), (lambda x: norm(x),), {"drop": lambda x: drop(x)}]

    def through(self, x):
        return self.steps[2]["drop"](self.steps[1][0](self.steps[0](x)))


class Holder:
    def __init__(self, module):
        self.module = module
        self.call = lambda x: module(x)


class Behind(Keeper):
    def keep(self):
        self.holder = Holder(self.inner)

    def through(self, x):
        return 0.5 * (self.holder.module[0](x) + self.holder.call(x))


class Patched(Keeper):
    def keep(self):
        original = self.inner.forward
        self.inner.forward = lambda x: 2 * original(x)

    def through(self, x):
        return self.inner(x)


class Recursive(Keeper):
    def keep(self):
        inner = self.inner

        def kept(x, depth=1):
            return kept(x + 1, depth - 1) if depth else inner(x)

        self.kept = kept


class Counted(Keeper):
    """Two functions share a variable, which one of them changes."""

    def keep(self):
        calls, inner = 0, self.inner

        def kept(x):
            nonlocal calls
            calls += 1
            return inner(x) * calls

        self.kept, self.calls = kept, lambda: calls


class Unregistered(Keeper):
    """A module that no named_modules() knows."""

    def keep(self):
        hidden = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        inner = self.inner
        self.kept = lambda x: inner(hidden(x))
        self.hidden = [hidden]


class Method(Keeper):
    def helper(self, x):
        return self.inner(x)

    def keep(self):
        helper = self.helper
        self.kept = lambda x: helper(x)


REBUILT = [
    Lambda, Itself, Default, Partial, Bound, Listed, Behind, Patched, Recursive, Counted, Unregistered, Method,
]  # fmt: skip


def state_of(model):
    hidden = [each for module in getattr(model, "hidden", []) for each in module.state_dict().values()]
    return [*model.state_dict().values(), *hidden]


@pytest.mark.parametrize("kind", REBUILT)
def test_a_copy_calls_its_own_modules(kind):
    torch.manual_seed(0)
    model, x = kind(), torch.randn(8, 4)
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(0)
    model = kind()  # as it was
    reference = Reference(model, "init")
    before = [each.clone() for each in state_of(model)]
    torch.manual_seed(1)
    ours = reference.run("", (x,), {})
    assert torch.equal(ours, expected)
    assert all(map(torch.equal, state_of(model), before))
    if kind is Counted:
        assert model.calls() == 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.manual_seed(1)
    later = reference.run("", (x,), {})
    assert torch.equal(later, expected) or kind is Counted  # which counts on
    assert kind is Counted or not torch.equal(model(x), expected)


@pytest.mark.parametrize("kind", REBUILT)
def test_passes_of_modules_that_keep_functions(kind):
    """Beside a twin that nobody watches: the same training, and no difference before it has moved."""
    torch.manual_seed(0)
    model = kind()
    torch.manual_seed(0)
    twin = kind()
    passes, recorder, warnings = watch(model)
    calls = []
    model.inner[0].register_forward_hook(lambda *_: calls.append(None))
    x = torch.randn(8, 4)
    for which, each in (("watched", model), ("alone", twin)):
        torch.manual_seed(1)
        with passes.watched() if which == "watched" else torch.enable_grad():
            each(x).sum().backward()
    assert warnings == []
    assert len(calls) == 2 if kind is Behind else 1
    assert all(map(torch.equal, state_of(model), state_of(twin)))
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert {each for found in recorder.differences().values() for each in found} == {0.0}
    assert "inner.0" in recorder.differences()


# What remains shared


LENT = {}


class Global(Keeper):
    def keep(self):
        LENT["module"] = self.inner
        self.kept = lambda x: LENT["module"](x)


class Locked(Keeper):
    def keep(self):
        inner, locks = self.inner, [threading.Lock()]

        def kept(x):
            with locks[0]:
                return inner(x)

        self.kept = kept


class Opaque:
    def __init__(self, module):
        self.module = module

    def __deepcopy__(self, memo):
        return self


class Shared(Keeper):
    def keep(self):
        self.box = Opaque(self.inner)

    def through(self, x):
        return self.box.module(x)


class Caught(Keeper):
    """Its own code lives with any error."""

    def keep(self):
        self.box = Opaque(self.inner)

    def through(self, x):
        try:
            return self.box.module(x)
        except Exception:  # noqa: BLE001 - as some code does
            return x


class Weights(Keeper):
    """A weight is used, and no module called."""

    def keep(self):
        self.box = Opaque(self.inner)

    def through(self, x):
        return F.linear(x, self.box.module[0].weight)


@pytest.mark.parametrize("kind", [Global, Shared, Caught, Weights])
@pytest.mark.parametrize("given", ["init", "module"])
def test_what_calls_the_training_model_is_stopped_before_it_changes_anything(kind, given):
    torch.manual_seed(0)
    twin = kind()
    torch.manual_seed(0)
    model = kind()
    passes, recorder, warnings = watch(model, copy.deepcopy(model) if given == "module" else "init")
    seen = []
    for module in model.inner:
        module.register_forward_pre_hook(lambda *_: seen.append("before"))
        module.register_forward_hook(lambda *_: seen.append("after"))
    x = torch.randn(8, 4)
    outputs = []
    for each in (model, twin):
        if kind is Global:
            LENT["module"] = each.inner
        torch.manual_seed(1)
        with passes.watched() if each is model else torch.enable_grad():
            for _ in range(3):
                each(x).sum().backward()
            outputs.append(torch.rand(3))
    assert torch.equal(*outputs)
    assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert (ours.grad is None and theirs.grad is None) or torch.equal(ours.grad, theirs.grad)
    assert len(seen) == (0 if kind is Weights else 18)  # three modules, three passes
    assert recorder.passes == []
    assert passes.incomplete == {"", "inner", "inner.0", "inner.1", "inner.2", "last"}
    assert len(warnings) == 1
    what = "uses inner.0.weight" if kind is Weights else "calls inner"
    assert warnings[0].startswith(f"the reference {what} of the model that trains")
    where = {Global: "Global.keep.<locals>.<lambda> (test_functions.py:", Weights: ""}
    assert where.get(kind, f"{kind.__name__}.through (test_functions.py:") in warnings[0]
    assert kind is not Global or "the attribute kept of a Global" in warnings[0]
    assert "give a module of its own as the argument reference" in warnings[0]


def test_what_holds_the_function_is_named():
    """A closure with a lock can't be copied."""
    model = Locked()
    passes, recorder, warnings = watch(model)
    with passes.watched():
        model(torch.randn(8, 4))
    assert recorder.passes == []
    assert len(warnings) == 1
    assert "calls inner of the model that trains" in warnings[0]
    assert "the attribute kept of a Locked" in warnings[0]


def test_the_next_pass_counts_where_the_function_is_not_called():
    class Sometimes(Shared):
        def through(self, x):
            return super().through(x) if (x > 0).all() else x

    model = Sometimes()
    passes, recorder, _ = watch(model)
    for sign in (1, -1):
        with passes.watched():
            model(sign * torch.ones(8, 4))
    assert [set(each) for each in recorder.passes] == [{"", "last"}]
    assert passes.incomplete == set()


def test_nothing_of_the_fence_stays():
    model = Shared()
    hooks = [len(each._forward_pre_hooks) for each in model.modules()]
    passes, _, _ = watch(model)
    with passes.watched():
        model(torch.randn(8, 4))
    assert [len(each._forward_pre_hooks) for each in model.modules()] == hooks


def test_functions_that_need_no_copy_are_shared():
    def plain(x, scale=2.0):
        return scale * x

    model = nn.Linear(2, 2)
    model.plain, model.pool, model.activation = plain, F.max_pool2d, F.relu
    copied = separate_copy(model).model
    assert copied.pool is F.max_pool2d
    assert copied.activation is F.relu
    assert copied.plain is plain


def test_a_function_is_rebuilt_once_and_keeps_its_name():
    model = Lambda()
    model.again, model.rng = model.kept, random.Random(0)
    copied = separate_copy(model).model
    assert copied.again is copied.kept
    assert copied.kept is not model.kept
    assert copied.kept.__qualname__ == model.kept.__qualname__
