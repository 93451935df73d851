"""References: what is taken for one, and that running it changes nothing."""

from __future__ import annotations

import copy
import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ignite_monitor.reference.reference import NotComparableError, Reference
from tests._helpers import assert_same, same


class Awkward(nn.Module):
    """Draws from everything there is, changes its inputs and replaces a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)
        self.frozen = nn.Dropout(0.5).eval()
        self.generator = torch.Generator().manual_seed(3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", None)

    def forward(self, x, cache=None):
        x.mul_(2)
        if cache is not None:
            cache["seen"].append(x)
        self.calls = self.calls + 1
        self.last = x
        x = self.frozen(self.dropout(self.norm(self.linear(x))))
        x = x * random.random() + float(np.random.rand())
        return x + torch.rand(4, generator=self.generator)


def snapshot(module):
    return [
        copy.deepcopy(dict(module.state_dict())),
        [part.training for part in module.modules()],
        [(parameter._version, parameter.requires_grad) for parameter in module.parameters()],
        [(name, id(buffer)) for name, buffer in module.named_buffers()],
    ]


def draws():
    return torch.rand(2), random.random(), float(np.random.rand())


def seed():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


@pytest.mark.parametrize("given", ["init", "module"])
def test_runs_as_the_model_is_about_to_and_changes_nothing(given):
    seed()
    model = Awkward()
    shared = {id(model.generator): model.generator}
    reference = Reference(model, "init" if given == "init" else copy.deepcopy(model, shared).eval())
    before, of_reference = snapshot(model), snapshot(reference.module)
    model.generator.set_state(torch.Generator().manual_seed(5).get_state())  # has drawn meanwhile
    x = torch.randn(8, 4)
    cache = {"seen": []}
    seed()
    expected = draws()
    seed()
    actual = reference.run((x,), {"cache": cache})
    assert_same(draws(), expected)
    assert cache == {"seen": []}
    assert same(snapshot(model), before)
    assert same(snapshot(reference.module), of_reference)
    untouched = x.clone()
    seed()
    references = model(x, cache=cache)
    assert_same(actual, references)
    assert_same(x, untouched * 2)  # by the model alone


@pytest.mark.parametrize("given", ["init", "module"])
def test_a_reference_with_another_generator_is_not_run(given):
    model = Awkward()
    reference = Reference(model, "init" if given == "init" else copy.deepcopy(model))
    if given == "init":
        model.generator = torch.Generator().manual_seed(1)
    with pytest.raises(NotComparableError, match="has a random number generator that is not the model's"):
        reference.run((torch.randn(8, 4),), {})


def test_numbers_that_are_scheduled_are_those_of_the_model():
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.LeakyReLU(0.1)), torch.randn(3, 4)
    reference = Reference(model, "init")
    for p, slope in ((0.5, 0.3), (0.0, 0.2)):
        model[1].p, model[2].negative_slope = p, slope
        reference.match_model()
        before = torch.get_rng_state()
        actual = reference.run((x,), {})
        torch.set_rng_state(before)
        torch.testing.assert_close(actual, model(x), rtol=0, atol=0)


def test_autocast_hands_no_weight_without_gradient_on():
    """A twin that trains as well, and inputs that want gradients: casts are cached by tensor."""
    model = nn.Linear(4, 4)
    counterpart = nn.Linear(4, 4)
    reference = Reference(model, counterpart)
    x = torch.randn(2, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        reference.run((x,), {})
        assert torch.is_autocast_cache_enabled()
        (model(x).float() + counterpart(x).float()).sum().backward()
    assert x.grad is not None
    assert counterpart.weight.grad is not None
    assert counterpart.weight.requires_grad


def test_copy_shares_nothing():
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    model[1].weight = model[0].weight
    reference = Reference(nn.DataParallel(model), "init")
    assert reference.module is not model
    assert type(reference.module) is nn.Sequential
    assert reference.module[0].weight is reference.module[1].weight
    model[0].weight.requires_grad_(False)
    reference.match_model()
    assert not reference.module[1].weight.requires_grad
    with torch.no_grad():
        model[0].weight.zero_()
    assert reference.module[0].weight.any()


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_hooks_of_the_user_are_not_called_for_the_copy():
    seen = []

    class Keeper:
        def __init__(self):
            self.lock = (item for item in ())  # nothing that can be copied

        def hook(self, module, args, output):
            seen.append(output)

    model = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(2, 2)), nn.Linear(2, 2))
    model(torch.ones(1, 2))  # the weight is the result of a computation now
    model[1].register_forward_hook(Keeper().hook)
    model[1].register_forward_pre_hook(lambda module, args: seen.append(args))
    model.register_forward_hook(lambda module, args, kwargs, output: seen.append(output), with_kwargs=True)
    reference = Reference(model, "init")
    output = reference.run((torch.ones(1, 2),), {})
    assert seen == []
    assert_same(output, model(torch.ones(1, 2)))
    assert len(seen) == 3


# What is refused


def mlp(*sizes):
    return nn.Sequential(*(nn.Linear(i, j) for i, j in itertools.pairwise(sizes)))


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (mlp(3, 4, 6), r"entry '1.weight' is \(6, 4\) in it, not \(5, 4\)"),
        (mlp(3, 4), "module '1' is missing in it, not Linear"),
        (mlp(3, 4, 5, 6), "module '2' is Linear in it, not missing"),
        (nn.Sequential(nn.Linear(3, 4), nn.Tanh()), "module '1' is Tanh in it, not Linear"),
        (
            nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5, bias=False)),
            r"entry '1.bias' is missing in it, not \(5,\)",
        ),
    ],
)
def test_another_structure_is_refused_by_its_first_difference(other, difference):
    with pytest.raises(ValueError, match=f"reference should be of the model's structure, but {difference}"):
        Reference(mlp(3, 4, 5), other)


@pytest.mark.parametrize(
    ("reference", "error", "message"),
    [
        (3, TypeError, "should be 'init' or a module"),
        (Path("weights.pt"), TypeError, "should be 'init' or a module"),
        ("weights.pt", ValueError, "should be 'init' or a module"),
        ("same", ValueError, "another module"),
    ],
)
def test_other_things_are_refused(reference, error, message):
    model = mlp(2, 2)
    with pytest.raises(error, match=message):
        Reference(model, nn.DataParallel(model) if reference == "same" else reference)


def test_what_cannot_be_copied_is_refused():
    model = mlp(2, 2)
    model.lock = (number for number in ())
    with pytest.raises(ValueError, match="Argument reference should be a module, since the model has no copy"):
        Reference(model, "init")


def test_init_is_kept_with_a_run(tmp_path):
    torch.manual_seed(0)
    first, second = Reference(mlp(2, 2), "init"), Reference(mlp(2, 2), "init")
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert_same(first.module[0].weight, second.module[0].weight)
    with pytest.raises(ValueError, match="state_dict holds no reference"):
        second.load_state_dict(None)
    with pytest.raises(ValueError, match=r"of the model's structure, but entry '0.weight'"):
        second.load_state_dict(mlp(3, 2).state_dict())
    given = Reference(mlp(2, 2), mlp(2, 2))
    given.load_state_dict(given.state_dict())
    with pytest.raises(ValueError, match="reference='init'"):
        given.load_state_dict(first.state_dict())
