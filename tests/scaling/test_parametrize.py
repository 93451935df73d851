"""Parametrizations: initial weights, multipliers, groups, weight decay, Muon, and refused models."""

from __future__ import annotations

import copy
import functools
import logging
import math
import pickle
import random

import pytest
import torch
from torch import nn

from ignite_monitor.scaling import TracingError, parametrize
from tests._models import Lambda
from tests.scaling import _models
from tests.scaling._models import multipliers, weight_of

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
WIDTHS = (16, 64)


def made(make=_models.mlp, widths=WIDTHS, sample_input=X, **options):
    torch.manual_seed(0)
    return parametrize(make, widths, sample_input=sample_input, **options)


@functools.cache
def default():
    return made()


def by_name(groups, bias=False):
    return {group["layer_name"]: group for group in groups if group["bias"] is bias}


def messages(caplog):
    return [record.message for record in caplog.records if record.name.startswith("ignite_monitor")]


def test_mlp_has_what_mup_says():
    """Width 64: outputs times n^-a, weights of n^-b, Adam's learning rates of n^-c; b = 1/2 everywhere."""
    parametrization = made(lr_prefactor=0.1, std_prefactor=2.0, weight_decay=0.2)
    model = parametrization.model
    groups, biases = by_name(parametrization.param_groups), by_name(parametrization.param_groups, bias=True)
    expected = {"0": (-0.5, 0.5, -0.5 + 1), "3": (0.0, 1.0, 0.0), "6": (0.5, 0.5, -0.5)}
    for name, (a, c, bias_c) in expected.items():
        module, group = model[int(name)], groups[name]
        assert (group["width"], group["c"], group["lr"]) == (64, pytest.approx(c), pytest.approx(0.1 * 64**-c))
        assert [id(item) for item in group["params"]] == [id(module.weight)]
        assert biases[name]["lr"] == pytest.approx(0.1 * 64**-bias_c)
        assert [id(item) for item in biases[name]["params"]] == [id(module.bias)]
        assert module.weight.std().item() == pytest.approx(2 / 8, rel=4 / math.sqrt(2 * module.weight.numel()))
        assert not module.bias.any()
        x = torch.randn(2, module.in_features)
        assert torch.equal(module(x), nn.functional.linear(x, module.weight, module.bias) * 64**-a)
    assert sorted(multipliers(model)) == ["0", "6"]  # none where a is 0
    other = groups["_other"]
    assert (other["lr"], other["c"], other["width"]) == (0.1, 0.0, 1)
    assert [id(item) for item in other["params"]] == [id(item) for item in model[4].parameters()]
    assert torch.equal(model[4].weight, torch.ones(64))
    for group in parametrization.param_groups:  # AdamW leaves the same share of every weight, at any width
        assert group["lr"] * group["weight_decay"] == pytest.approx(0.1 * 0.2)


def test_groups_hold_the_parameters_that_the_model_has_now():
    """Sharding, and materializing a model of the meta device, replace them."""
    parametrization = copy.deepcopy(default())
    for module in parametrization.model.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = nn.Parameter(parameter.detach().clone())
    held = {id(item) for group in parametrization.param_groups for item in group["params"]}
    assert held == {id(item) for item in parametrization.model.parameters()}


def test_multipliers_are_copied_pickled_compiled_and_not_saved():
    model = copy.deepcopy(default()).model.eval()
    expected = model(X)
    assert torch.equal(copy.deepcopy(model)(X), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(X), expected)
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(X), expected)
    assert set(model.state_dict()) == set(_models.mlp(16).state_dict())


def test_seed_of_torch_decides_wherever_the_weights_are():
    def weights(seed, device="cpu"):
        torch.manual_seed(seed)
        with torch.device(device):
            return parametrize(_models.mlp, WIDTHS, sample_input=X.to(device)).model[3].weight

    first = default().model[3].weight
    assert torch.equal(weights(0), first)
    assert not torch.equal(weights(1), first)
    assert weights(0, "meta").device.type == "meta"


def test_the_model_is_only_initialized():
    """Export leaves training flags, buffers, attributes and RNG states of modules as they are."""

    def count(self, x):
        self.calls += 1
        return self.norm(x) + self.generator.random()

    def make(n):
        counting = Lambda(count, calls=0, norm=nn.BatchNorm1d(n), generator=random.Random(5))
        return nn.Sequential(nn.Linear(6, n), counting, nn.Linear(n, 3))

    model = made(make).model
    assert model[1].calls == 0
    assert model[1].norm.training
    assert model[1].norm.num_batches_tracked == 0
    assert model[1].generator.getstate() == random.Random(5).getstate()


# Overrides


def nested(n):
    fc = {name: nn.Sequential() for name in "ab"}
    for module in fc.values():
        module.fc = nn.Linear(n, n)
    return nn.Sequential(nn.Linear(6, n), fc["a"], fc["b"], nn.Linear(n, 3))


def test_given_exponents_by_name_then_last_part_then_type():
    result = made(nested, c_overrides={"hidden": 1.1, "fc": 1.2, "1.fc": 1.3}).solution.c
    assert (result["1.fc"], result["2.fc"]) == (1.3, 1.2)
    assert result["0"] == result["3"] == pytest.approx(0.5)


class Tied(nn.Module):
    def __init__(self, n, functional=False):
        super().__init__()
        self.tokens, self.hidden = nn.Embedding(11, n), nn.Linear(n, n)
        self.head = None if functional else nn.Linear(n, 11, bias=False)
        if self.head is not None:
            self.head.weight = self.tokens.weight

    def forward(self, x):
        x = self.hidden(self.tokens(x))
        return nn.functional.linear(x, self.tokens.weight) if self.head is None else self.head(x)


def test_tied_weights_have_one_group():
    parametrization = made(Tied, sample_input=_models.TOKENS)
    groups = by_name(parametrization.param_groups)
    assert list(groups) == ["tokens", "hidden"]
    assert parametrization.layers["head"].c == parametrization.layers["tokens"].c == pytest.approx(0.5)
    for overrides in ({"preset": "standard"}, {"make": lambda n: Tied(n, functional=True)}):
        with pytest.raises(ValueError, match="share a weight, but not width and initial values"):
            made(**{"make": Tied, "sample_input": _models.TOKENS} | overrides)
    with pytest.raises(ValueError, match="different c"):
        made(Tied, sample_input=_models.TOKENS, c_overrides={"tokens": 0.5, "head": 0.75})


# Muon


@pytest.mark.parametrize(("adjust", "c"), [("original", 0.0), ("match_rms_adamw", 0.5)])
def test_muon_changes_outputs_of_hidden_layers_by_as_much_at_any_width(adjust, c):
    """The change of a hidden layer's output for the input that made its gradients, after three steps."""
    changes = []
    for n in (64, 256):
        parametrization = made(widths=(16, n), optimizer_type="muon", adjust_lr_fn=adjust, lr_prefactor=0.1)
        muon, rest = parametrization.muon_groups, parametrization.param_groups
        assert [(group["layer_name"], group["lr"]) for group in muon] == [("3", pytest.approx(0.1 * n**-c))]
        held = [id(parameter) for group in (*muon, *rest) for parameter in group["params"]]
        assert sorted(held) == sorted(map(id, parametrization.model.parameters()))
        weight, z = weight_of(parametrization, "3"), torch.randn(n)
        before = weight.detach().clone()
        optimizer = torch.optim.Muon(muon, adjust_lr_fn=adjust, weight_decay=0.0)
        for _ in range(3):
            weight.grad = torch.outer(torch.randn(n), z)
            optimizer.step()
        changes.append(float(((weight - before) @ z).detach().norm() / z.norm()))
    assert math.log(changes[1] / changes[0]) / math.log(4) == pytest.approx(0.0, abs=0.1)


# Weights that are kept


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.copy_(torch.full_like(weight, 7.0)),
        lambda weight: weight.fill_(7.0),
        lambda weight: weight.zero_().add_(1.0),
        lambda weight: weight.__setitem__(slice(None), 7.0),
        nn.init.eye_,
    ],
)
def test_pretrained_weights_are_named(write, caplog):
    def pretrained(n):
        model = _models.mlp(n)
        with torch.no_grad():
            write(model[3].weight)
        return model

    with caplog.at_level(logging.WARNING):
        parametrization = made(pretrained)
    assert messages(caplog) == [
        "parametrize: 3 weights are re-initialized, and the values of 1 of them were not random, such as pretrained "
        "ones (first 3.weight). initialize=False keeps them."
    ]
    assert abs(float(weight_of(parametrization, "3").detach().mean())) < 1


def test_weights_that_were_drawn_are_not_named(caplog):
    def make(n):
        model = nn.Sequential(nn.Embedding(11, n), nn.Linear(n, n), nn.Linear(n, 3))
        with torch.no_grad():
            nn.init.orthogonal_(model[1].weight)
            model[0].weight.copy_(torch.randn(11, n) * 0.02)
            model[0].weight[0].fill_(0)
        return model

    with caplog.at_level(logging.WARNING):
        made(make, sample_input=_models.TOKENS)
    assert "re-initialized" not in caplog.text


def test_initialize_false_keeps_the_function(caplog):
    torch.manual_seed(0)
    model = _models.mlp(64).eval()
    expected = model(X)
    with caplog.at_level(logging.WARNING):
        parametrization = parametrize(
            lambda n: model if n == 64 else _models.mlp(n), WIDTHS, sample_input=X, lr_prefactor=0.1, initialize=False
        )
    assert parametrization.model is model
    assert torch.equal(model(X), expected)
    c = parametrization.solution.c
    assert (c["0"], c["3"], c["6"]) == pytest.approx((0.0, 1.0, 1.0))  # of (0, a + b, a + c)
    assert not messages(caplog)


# Refused operations


class Awkward(nn.Module):
    """A model between whose layers is an operation that can't be read."""

    def __init__(self, n, way):
        super().__init__()
        self.way, self.emb, self.mid, self.head = way, nn.Linear(6, n), nn.Linear(n, n), nn.Linear(n, 3)
        self.mix = nn.Bilinear(n, 6, n) if way == "bilinear" else None

    def forward(self, x):
        y = self.emb(x).relu()
        if self.way == "branch" and y.sum() > 0:
            y = -y
        elif self.way == "fft":
            y = torch.fft.fft(y).real
        elif self.way == "bilinear":
            y = self.mix(y, x)
        return self.head(self.mid(y))


@pytest.mark.parametrize(
    ("way", "match"),
    [
        ("branch", r"can't read .*: test_parametrize.py:\d+ in forward: "),
        ("fft", r"can't read .*: .*fft.* \(test_param.*.py:\d+\) is not a known "),
        ("bilinear", r"can't read .*: bilinear \(test_.*\) uses mix.weight for an unknown "),
    ],
)
def test_refusals_name_the_place(way, match):
    with pytest.raises(TracingError, match=match):
        made(lambda n: Awkward(n, way))


def test_old_torch_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.6.0+cpu")
    with pytest.raises(TracingError, match=r"torch 2\.6\.0\+cpu is not supported, but 2\.7 or newer"):
        made()


# Refused models and arguments


def odd_weight(n):
    model = _models.mlp(n)
    model.mixing = nn.Parameter(torch.randn(n, n))
    return model


@pytest.mark.parametrize(
    ("make", "widths", "error", "match"),
    [
        (_models.mlp(8), (8, 16), TypeError, "make_model should be a function of the width"),
        (_models.mlp, (48, 64), ValueError, "a width and another, at least twice as large"),
        (_models.mlp, 8, TypeError, "a small and a large width"),
        (_models.mlp, (8.0, 16.0), TypeError, "widths should be an integer"),
        (lambda n: n, (8, 16), TypeError, "make_model should be of type a function that returns"),
        (lambda n: nn.Linear(6, 3), (8, 16), ValueError, "whose weights grow with width, but none does"),
        (
            lambda n: nn.Sequential(*(nn.Linear(n, n) for _ in range(n // 8))),
            (8, 16),
            ValueError,
            r"differ in sizes alone, but in \['1\.bias', '1\.weight'\]",
        ),
        (lambda n: nn.Sequential(nn.Linear(6, n, bias=n > 8)), (8, 16), ValueError, r"but in \['0\.bias'\]"),
        (odd_weight, (8, 16), TracingError, "does not use mixing:"),
        (
            lambda n: nn.Sequential(nn.Linear(6, n), nn.utils.parametrizations.weight_norm(nn.Linear(n, 3))),
            (8, 16),
            ValueError,
            "should not use torch.nn.utils.parametrize, as 1 does",
        ),
    ],
)
def test_models_it_can_not_compare(make, widths, error, match):
    with pytest.raises(error, match=match):
        parametrize(make, widths=widths, sample_input=X)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"optimizer_type": "lion"}, ValueError, "optimizer_type should be"),
        ({"optimizer_type": "muon", "adjust_lr_fn": "none"}, ValueError, "adjust_lr_fn should be"),
        ({"lr_prefactor": 0.0}, ValueError, "lr_prefactor should be"),
        ({"std_prefactor": -1.0}, ValueError, "std_prefactor should be greater than 0"),
        ({"weight_decay": -1.0}, ValueError, "weight_decay should be at least 0"),
        ({"initialize": 1}, TypeError, "initialize should be of type bool"),
        ({"preset": "half"}, ValueError, "preset should be"),
        ({"c_overrides": {"4": 0.5}}, ValueError, "name layers that grow with width, but given {'4'}"),
        ({"c_overrides": ["3"]}, TypeError, "c_overrides should be of type Mapping or None"),
        ({"c_overrides": {"3": None}}, TypeError, "c_overrides"),
    ],
)
def test_wrong_arguments(arguments, error, match):
    with pytest.raises(error, match=match):
        made(**arguments)
