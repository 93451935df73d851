"""References: what is taken for one, and that running it changes nothing."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn

from ignite_monitor.reference.isolation import is_reference_run
from ignite_monitor.reference.reference import Reference
from ignite_monitor.reference.rng import preserved_rng_state


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


def picture(module):
    return [
        copy.deepcopy(dict(module.state_dict())),
        [each.training for each in module.modules()],
        [each._version for each in module.parameters()],
        [each.requires_grad for each in module.parameters()],
        [(name, id(each)) for name, each in module.named_buffers()],
    ]


def same(one, other):
    states = zip(one[0].values(), other[0].values(), strict=True)
    return all(torch.equal(a, b) for a, b in states) and one[1:] == other[1:]


def draws():
    return torch.rand(2), random.random(), np.random.rand()


def seed():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


@pytest.mark.parametrize("given", ["init", "module"])
def test_runs_as_the_model_is_about_to_and_changes_nothing(given):
    seed()
    model = Awkward()
    reference = Reference(model, "init" if given == "init" else copy.deepcopy(model).eval())
    before, of_reference = picture(model), picture(reference.module)
    model.generator.set_state(torch.Generator().manual_seed(5).get_state())  # has drawn meanwhile
    x = torch.randn(8, 4)
    cache = {"seen": []}
    seed()
    expected = draws()
    seed()
    ours = reference.run("", (x,), {"cache": cache})
    now = draws()
    assert torch.equal(now[0], expected[0])
    assert now[1:] == expected[1:]
    assert cache == {"seen": []}
    assert same(picture(model), before)
    assert same(picture(reference.module), of_reference)
    untouched = x.clone()
    seed()
    theirs = model(x, cache=cache)
    assert torch.equal(ours, theirs)
    assert torch.equal(x, untouched * 2)  # by the model alone


def test_draws_again_after_an_error():
    seed()
    expected = draws()
    seed()
    with contextlib.suppress(ZeroDivisionError), preserved_rng_state([torch.device("cpu")]):
        draws()
        raise ZeroDivisionError
    now = draws()
    assert torch.equal(now[0], expected[0])
    assert now[1:] == expected[1:]


def test_autocast_hands_no_weight_without_gradient_on():
    """A twin that trains as well, and inputs that want gradients: casts are cached by tensor."""
    model = nn.Linear(4, 4)
    twin = nn.Linear(4, 4)
    reference = Reference(model, twin)
    x = torch.randn(2, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        reference.run("", (x,), {})
        assert torch.is_autocast_cache_enabled()
        (model(x).float() + twin(x).float()).sum().backward()
    assert x.grad is not None
    assert twin.weight.grad is not None
    assert twin.weight.requires_grad


def test_runs_as_autocast_runs_the_model():
    model = nn.Linear(4, 4)
    reference = Reference(model, "init")
    x = torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        ours = reference.run("", (x,), {})
        assert ours.dtype == torch.bfloat16
        assert torch.equal(ours, model(x))


def test_says_when_it_runs():
    seen = []

    class Asks(nn.Linear):
        def forward(self, x):
            seen.append(is_reference_run())
            return super().forward(x)

    model = Asks(2, 2)
    reference = Reference(model, "init")
    reference.run("", (torch.ones(1, 2),), {})
    model(torch.ones(1, 2))
    with pytest.raises(RuntimeError):
        reference.run("", (torch.ones(1, 3),), {})
    assert not is_reference_run()
    assert seen == [True, False, True]


def test_copy_shares_nothing():
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    model[1].weight = model[0].weight
    reference = Reference(nn.DataParallel(model), "init")
    assert reference.module is not model
    assert type(reference.module) is nn.Sequential
    assert reference.module[0].weight is reference.module[1].weight
    model[0].weight.requires_grad_(False)
    reference.follow()
    assert not reference.module[1].weight.requires_grad
    with torch.no_grad():
        model[0].weight.zero_()
    assert reference.module[0].weight.any()


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_hooks_of_the_user_are_not_called_for_the_copy(caplog):
    seen = []

    class Keeper:
        def __init__(self):
            self.lock = (each for each in ())  # nothing that can be copied

        def hook(self, module, args, output):
            seen.append(output)

    model = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(2, 2)), nn.Linear(2, 2))
    model(torch.ones(1, 2))  # the weight is the result of a computation now
    model[1].register_forward_hook(Keeper().hook)
    model[1].register_forward_pre_hook(lambda module, args: seen.append(args))
    model.register_forward_hook(lambda module, args, kwargs, output: seen.append(output), with_kwargs=True)
    reference = Reference(model, "init")
    assert "the root module, 1" in caplog.text
    output = reference.run("", (torch.ones(1, 2),), {})
    assert seen == []
    assert torch.equal(output, model(torch.ones(1, 2)))
    assert len(seen) == 3


# What is refused


def mlp(*sizes):
    return nn.Sequential(*(nn.Linear(i, j) for i, j in itertools.pairwise(sizes)))


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (mlp(3, 4, 6), r"parameter '1.weight' is \(6, 4\) in it, not \(5, 4\)"),
        (mlp(3, 4), r"module '1' \(Linear\) is not in it"),
        (mlp(3, 4, 5, 6), r"module '2' \(Linear\) is in it alone"),
        (nn.Sequential(nn.Linear(3, 4), nn.Tanh()), "module '1' is Tanh in it, not Linear"),
        (
            nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5, bias=False)),
            r"parameter '1.bias' \(\(5,\)\) is not in it",
        ),
    ],
)
def test_another_structure_is_refused_by_its_first_difference(other, difference, tmp_path):
    with pytest.raises(ValueError, match=f"reference should be of the model's structure, but {difference}"):
        Reference(mlp(3, 4, 5), other)
    if "module" not in difference:
        torch.save(other.state_dict(), tmp_path / "weights.pt")
        with pytest.raises(ValueError, match=r"but entry '1\.(weight|bias)'"):
            Reference(mlp(3, 4, 5), tmp_path / "weights.pt")


def test_other_things_are_refused(tmp_path):
    model = mlp(2, 2)
    with pytest.raises(TypeError, match="reference should be"):
        Reference(model, 3)
    with pytest.raises(ValueError, match="another module"):
        Reference(model, nn.DataParallel(model))
    with pytest.raises(ValueError, match="can't be loaded"):
        Reference(model, str(tmp_path / "missing.pt"))
    for content, message in ((model, "can't be loaded"), ([1], "holds none"), ({"model": {}}, "'0.weight'")):
        torch.save(content, tmp_path / "content.pt")
        with pytest.raises(ValueError, match=message):
            Reference(model, tmp_path / "content.pt")
    model.lock = (each for each in ())
    with pytest.raises(ValueError, match="Argument reference should be a module, since model"):
        Reference(model, "init")


# Weights from elsewhere


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module."])
def test_state_dict_of_a_file(prefix, tmp_path):
    torch.manual_seed(0)
    model, other = mlp(2, 3, 2), mlp(2, 3, 2)
    torch.save({prefix + name: value for name, value in other.state_dict().items()}, tmp_path / "weights.pt")
    reference = Reference(model, tmp_path / "weights.pt")
    x = torch.randn(3, 2)
    assert torch.equal(reference.run("", (x,), {}), other(x))
    assert reference.state_dict() is None


def test_init_is_kept_with_a_run(tmp_path):
    torch.manual_seed(0)
    first, second = Reference(mlp(2, 2), "init"), Reference(mlp(2, 2), "init")
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(first.module[0].weight, second.module[0].weight)
    with pytest.raises(ValueError, match="state_dict holds no reference"):
        second.load_state_dict(None)
    with pytest.raises(ValueError, match=r"of the model's structure, but entry '0.weight'"):
        second.load_state_dict(mlp(3, 2).state_dict())
    given = Reference(mlp(2, 2), mlp(2, 2))
    given.load_state_dict(given.state_dict())
    with pytest.raises(ValueError, match="reference='init'"):
        given.load_state_dict(first.state_dict())
