"""Roles, fan-ins and factors that are read from exported models, and weights that keep their values.

Exponents are compared with those of the same function made of Linear layers, or with arithmetic.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ignite_monitor.scaling import TracingError, parametrize
from ignite_monitor.scaling.operations import log_ratio
from tests._models import Lambda
from tests.scaling._models import multipliers, weight_of

X = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
TOKENS = torch.tensor([[1, 2, 3, 4, 5]])
WIDTHS = (8, 32)


class Between(nn.Module):
    """A layer before, a layer after, and something between them, which is made at a width."""

    def __init__(self, n, between, run=lambda module, x: module(x), out=None):
        super().__init__()
        self.first, self.between, self.last = nn.Linear(6, n), between(n), nn.Linear(out or n, 3)
        self.run = run

    def forward(self, x):
        return self.last(self.run(self.between, self.first(x)))


class Branches(nn.Module):
    """Several models in one, so that one export serves many cases."""

    def __init__(self, models):
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, *args):
        return tuple(model(*args) for model in self.models)


@functools.cache
def layers_of(cases, sample_input):
    """Return the layers of many cases in one parametrization: case -> its layers, and the parametrization."""
    makes = dict(cases)
    parametrization = parametrize(
        lambda n: Branches([make(n) for make in makes.values()]), widths=WIDTHS, sample_input=sample_input
    )
    layers = {case: {} for case in makes}
    for layer in parametrization.layers.values():
        _, index, *name = layer.name.split(".", 2)
        layers[[*makes][int(index)]]["".join(name)] = layer
    return parametrization, layers


def kinds_of(layers):
    return {name: (layer.role, layer.width) for name, layer in layers.items()}


def inputs_of(parametrization, layer):
    """Layers before a layer, without the case's prefix."""
    return [name.split(".", 2)[2] for name in parametrization.graph[layer.name].inputs]


RECURRENT = {
    "lstm": (lambda n: nn.LSTM(n, n, batch_first=True), ["weight_ih_l0", "weight_hh_l0"]),
    "gru": (lambda n: nn.GRU(n, n, num_layers=2), ["weight_ih_l0", "weight_hh_l0", "weight_ih_l1", "weight_hh_l1"]),
    "rnn": (lambda n: nn.RNN(n, n), ["weight_ih_l0", "weight_hh_l0"]),
    "cell": (lambda n: nn.LSTMCell(n, n), ["weight_ih", "weight_hh"]),
}


def run_recurrent(module, x):
    return module(x[0])[0] if isinstance(module, nn.LSTMCell) else module(x)[0]


RECURRENT_CASES = (
    *((name, lambda n, make=make: Between(n, make, run_recurrent)) for name, (make, _) in RECURRENT.items()),
    ("of a fixed size", lambda n: Between(n, lambda n: nn.LSTM(n, 4), run_recurrent, 4)),
)


@pytest.mark.parametrize("case", RECURRENT)
def test_recurrent_layers(case):
    """Each takes what is before it and, as the next layer does, its own output."""
    parametrization, layers = layers_of(RECURRENT_CASES, X)
    names = [f"between.{name}" for name in RECURRENT[case][1]]
    assert list(layers[case]) == ["first", *names, "last"]
    before = [[], ["first"], *([name] for name in names)]
    assert [inputs_of(parametrization, layer) for layer in layers[case].values()] == before
    for name in names:
        layer = layers[case][name]
        assert (layer.role, layer.width, layer.a, layer.b, layer.c) == ("hidden", 32, 0, 0.5, pytest.approx(1))
        assert weight_of(parametrization, layer.name).std().item() == pytest.approx(32**-0.5, rel=0.1)
        assert layer.biases == (layer.weight.replace("weight", "bias"),)
    held = [id(parameter) for group in parametrization.param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(map(id, parametrization.model.parameters()))


def test_readout_of_a_fixed_size_in_a_recurrent_layer():
    layers = layers_of(RECURRENT_CASES, X)[1]["of a fixed size"]
    assert kinds_of(layers) == {"first": ("embedding", 32), "between.weight_ih_l0": ("readout", 32)}


def attention(**dims):
    def run(module, x):
        other = torch.randn(2, 3, 7) if dims else x
        return module(x, other, other)[0]

    return lambda n: Between(n, lambda n: nn.MultiheadAttention(n, n // 4, batch_first=True, **dims), run)


@pytest.mark.parametrize("dims", [False, True])
def test_multihead_attention(dims):
    parametrization, layers = layers_of(ATTENTION_CASES, X)
    layers = layers[dims]
    names = ["q_proj_weight", "k_proj_weight", "v_proj_weight"] if dims else ["in_proj_weight"]
    assert list(layers) == ["first", *(f"between.{name}" for name in names), "between.out_proj", "last"]
    assert kinds_of(layers)["between.out_proj"] == ("hidden", 32)
    assert kinds_of(layers)[f"between.{names[-1]}"] == ("embedding" if dims else "hidden", 32)
    assert "first" in inputs_of(parametrization, layers[f"between.{names[0]}"])


def make_weight(*shape):
    return nn.ParameterDict({"weight": torch.randn(*shape)})


FUNCTIONAL = {
    "linear": (lambda n: make_weight(n, n), lambda m, x: F.linear(x, m.weight), 1),
    "matmul": (lambda n: make_weight(n, 2 * n), lambda m, x: x @ m.weight, 2),
    "transposed": (lambda n: make_weight(2 * n, n), lambda m, x: torch.matmul(x, 1.0 * m.weight.T), 2),
    "from the left": (lambda n: make_weight(n, n), lambda m, x: (m.weight @ x.mT).mT, 1),
    "einsum": (lambda n: make_weight(n, 2 * n), lambda m, x: torch.einsum("btn,nm->btm", x, m.weight), 2),
    "einsum of heads": (
        lambda n: make_weight(n // 4, 4, n),
        lambda m, x: torch.einsum("...hd,hdm->...m", x.unflatten(-1, (-1, 4)), m.weight),
        1,
    ),
    "experts": (lambda n: make_weight(4, n, n), lambda m, x: F.linear(x, m.weight[0]) + F.linear(x, m.weight[3]), 1),
    "batched experts": (lambda n: make_weight(2, n, n), lambda m, x: torch.bmm(x, m.weight), 1),
    "addmm": (lambda n: make_weight(n, n), lambda m, x: torch.addmm(torch.zeros(x.shape[-1]), x[0], m.weight), 1),
    "added": (
        lambda n: nn.ParameterDict({"weight": torch.randn(2, n, n), "bias": torch.randn(2, n)}),
        lambda m, x: torch.baddbmm(m.bias[:, None], x, m.weight),
        1,
    ),
    "conv": (lambda n: make_weight(n, n, 1), lambda m, x: F.conv1d(x.mT, m.weight).mT, 1),
    "transposed conv": (lambda n: make_weight(n, 2 * n, 1), lambda m, x: F.conv_transpose1d(x.mT, m.weight).mT, 2),
}


FUNCTIONAL_CASES = tuple(
    (name, lambda n, make=make, run=run, times=times: Between(n, make, run, n * times))
    for name, (make, run, times) in FUNCTIONAL.items()
)


@pytest.mark.parametrize("case", FUNCTIONAL)
def test_weights_used_functionally(case):
    parametrization, layers = layers_of(FUNCTIONAL_CASES, X)
    assert kinds_of(layers[case]) == {
        "first": ("embedding", 32),
        "between": ("hidden", 32),
        "last": ("readout", 32 * FUNCTIONAL[case][2]),
    }
    layer = layers[case]["between"]
    assert layer.c == pytest.approx(1)
    assert weight_of(parametrization, layer.name).std().item() == pytest.approx(32**-0.5, rel=0.1)


class Bare(nn.Module):
    """A weight of the model itself, whose output is not that of the model."""

    def __init__(self, n, name):
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.randn(n, 6)))
        self.name, self.last = name, nn.Linear(n, 3)

    def forward(self, x):
        return torch.softmax(self.last(torch.relu(x @ self.get_parameter(self.name).T)), -1)


@pytest.mark.parametrize("name", ["weight", "weight_v"])
def test_a_weight_of_the_model_itself(name):
    layers = parametrize(lambda n: Bare(n, name), WIDTHS, sample_input=X).layers
    first, last = layers["" if name == "weight" else name], layers["last"]
    assert (first.a, first.b, first.c, first.module) == (0, 0, 0, None)
    assert (last.a, last.b, last.c, last.module) == (0.5, 0.5, 0.5, "last")


def test_weights_that_do_not_grow_are_no_layers():
    def make(n):
        return nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, n), nn.ReLU(), nn.Linear(n, 7), nn.Linear(7, 3))

    parametrization = parametrize(make, widths=WIDTHS, sample_input=X)
    assert kinds_of(parametrization.layers) == {"2": ("embedding", 32), "4": ("readout", 32)}
    (other,) = [group for group in parametrization.param_groups if group["layer_name"] == "_other"]
    assert [item.shape for item in other["params"]] == [(7, 6), (7,), (3, 7), (3,)]
    assert parametrization.graph["0"].is_fixed
    assert parametrization.solution.r["5"] == 0


# The model's own factors


class Scaled(nn.Embedding):
    def forward(self, x):
        return super().forward(x) * self.weight.shape[1] ** 0.5


OWN = {
    "nothing": (nn.Embedding, lambda m, x, n: m.head(F.layer_norm(m.tokens(x), (n,))), 0, 0),
    "after the embedding": (nn.Embedding, lambda m, x, n: m.head(F.gelu(m.tokens(x) * n**0.5)), 0.5, 0),
    "a tensor": (nn.Embedding, lambda m, x, n: m.head(F.gelu(m.tokens(x) * torch.tensor(n**0.5))), 0.5, 0),
    "a tensor of many elements": (
        nn.Embedding,
        lambda m, x, n: m.head(F.gelu(m.tokens(x) * torch.full((n,), n**0.5))),
        0.5,
        0,
    ),
    "a buffer": (
        nn.Embedding,
        lambda m, x, n: m.head(F.gelu(m.tokens(x) * torch.ones(n).mul(n**0.5).sqrt() * torch.tensor(n**0.25))),
        0.5,
        0,
    ),
    "in a subclass": (Scaled, lambda m, x, n: m.head(F.gelu(m.tokens(x))), 0.5, 0),
    "in two steps": (nn.Embedding, lambda m, x, n: m.head(F.gelu(n**0.25 * (m.tokens(x) * n**0.25).relu())), 0.5, 0),
    "before the readout": (nn.Embedding, lambda m, x, n: m.head(m.tokens(x).tanh() * n**-0.5), 0, -0.5),
    "after the readout": (nn.Embedding, lambda m, x, n: m.head(m.tokens(x).tanh()) / n, 0, -1),
    "after a norm by hand": (
        nn.Embedding,
        lambda m, x, n: m.head(m.tokens(x) / m.tokens(x).square().sum(-1, keepdim=True).sqrt() * n**0.5),
        0,
        0,
    ),
    "both": (nn.Embedding, lambda m, x, n: m.head((m.tokens(x) * n**0.5).tanh() * n**-0.5), 0.5, -0.5),
    "on the weight": (nn.Embedding, lambda m, x, n: F.linear(m.tokens(x).tanh(), m.head.weight * n**-0.5), 0, -0.5),
}


class Factors(nn.Module):
    def __init__(self, n, kind, forward):
        super().__init__()
        self.n, self.tokens, self.head, self.run = n, kind(11, n), nn.Linear(n, 11, bias=False), forward

    def forward(self, x):
        return self.run(self, x, self.n)


OWN_CASES = tuple((name, lambda n, kind=kind, run=run: Factors(n, kind, run)) for name, (kind, run, *_) in OWN.items())


@pytest.mark.parametrize("case", OWN)
def test_own_factors_count_in_a(case):
    """The model's own factors times the added ones are n^-a, with the exponents of a model without factors."""
    parametrization, layers = layers_of(OWN_CASES, TOKENS)
    hooks = multipliers(parametrization.model)
    for name, own in zip(("tokens", "head"), OWN[case][2:], strict=True):
        layer = layers[case][name]
        assert layer.a + layer.b == pytest.approx({"tokens": 0, "head": 1}[name])
        assert layer.c == pytest.approx({"tokens": 0, "head": 1}[name] - layer.a)
        assert 32**own * hooks.get(layer.name, 1.0) == pytest.approx(32**-layer.a)


@pytest.mark.parametrize(
    ("match", "run"),
    [
        ("follows a factor of no layer, 2 times", lambda m, x, n: m.head((m.tokens(x).tanh() * n**0.5).sin())),
        ("several width factors", lambda m, x, n: m.head((y := m.tokens(x)).tanh() + (y * n**0.5).sin())),
    ],
)
def test_factors_of_no_layer_or_of_one_use_among_several_name_the_line(match, run):
    with pytest.raises(TracingError, match=match) as error:
        parametrize(lambda n: Factors(n, nn.Embedding, run), WIDTHS, sample_input=TOKENS)
    assert f"(test_exported.py:{Factors.forward.__code__.co_firstlineno + 1})" in str(error.value)


def test_growth_of_a_constant_that_is_0_at_one_width_is_not_known():
    assert log_ratio(torch.zeros(8), torch.zeros(32)) == 0.0
    assert log_ratio(torch.zeros(8), torch.ones(32)) is None


@pytest.mark.parametrize("shape", [lambda n: torch.linspace(0.2, 1.0, n), lambda n: 1.0 + torch.arange(n).cos()])
def test_constants_of_unknown_growth_are_refused(shape):
    """A profile over channels that shrinks with width; the same profile without a factor is known."""

    def make(power):
        def run(m, x, n):
            return m.head((m.tokens(x) * m.profile).tanh())

        def model(n):
            made = Factors(n, nn.Embedding, run)
            made.register_buffer("profile", shape(n) * n**power)
            return made

        return model

    with pytest.raises(TracingError, match=r"mul .* constants whose growth with width is not known"):
        parametrize(make(-1.0), WIDTHS, sample_input=TOKENS)
    layers = parametrize(make(0.0), WIDTHS, sample_input=TOKENS).layers
    assert {name: (layer.a + layer.b, layer.multiplier) for name, layer in layers.items()} == {
        "tokens": (0.0, pytest.approx(32**0.5)),
        "head": (1.0, pytest.approx(32**-0.5)),
    }


class Heads(nn.Module):
    """Attention of one head, of which scores, queries, or queries in one operation are scaled."""

    def __init__(self, n, way, power):
        super().__init__()
        self.first, self.q, self.k, self.last = nn.Linear(6, n), nn.Linear(n, n), nn.Linear(n, n), nn.Linear(n, 3)
        self.way, self.factor = way, n**power

    def forward(self, x):
        x = self.first(x)
        q, k = self.q(x), self.k(x)
        if self.way == "fused":
            return self.last(F.scaled_dot_product_attention(q * self.factor, k, x, scale=1.0))
        scores = (q * self.factor) @ k.mT if self.way == "queries" else q @ k.mT * self.factor
        return self.last(scores.softmax(-1) @ x)


RIGHT = (("scores", -1), ("queries", -1), ("fused", -1))


@pytest.mark.parametrize("cases", [RIGHT, (("scores", -0.5),), (("queries", 0),), (("fused", -0.5),)])
def test_heads_that_grow_are_reported_wherever_they_are_scaled(cases, caplog):
    parametrization = parametrize(lambda n: Branches([Heads(n, *case) for case in cases]), WIDTHS, sample_input=X)
    assert ("takes attention scores that are" in caplog.text) is (cases != RIGHT)
    for index in range(len(cases)):  # the scale is the scores'
        assert f"models.{index}.q" not in multipliers(parametrization.model)
        assert parametrization.layers[f"models.{index}.q"].a == 0


def test_weights_that_are_joined_are_refused():
    """The share of each parameter in the product is unknown."""

    def joined(n):
        one, other = (nn.Parameter(torch.randn(n, n)) for _ in range(2))
        return Lambda(lambda self, x: F.linear(x, torch.cat([self.one, self.other])), one=one, other=other)

    with pytest.raises(TracingError, match=r"uses between.one and between.other as one weight"):
        parametrize(lambda n: Between(n, joined, out=2 * n), WIDTHS, sample_input=X)


# What keeps its values


class LoRA(nn.Module):
    """LoRA in the manner of PEFT: a frozen layer, and two matrices of rank 2, of which the second is zero."""

    def __init__(self, n):
        super().__init__()
        self.base, self.a, self.b = (nn.Linear(*sizes, bias=False) for sizes in ((n, n), (n, 2), (2, n)))
        self.base.requires_grad_(False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x)) * 4.0


def test_frozen_base_with_lora(caplog):
    """c = 1 for the first matrix and 0 for the second, as in LoRA+ (arXiv:2402.12354): nothing else is drawn."""
    kept = {}

    def make(n):
        model = nn.Sequential(nn.Embedding(11, n), LoRA(n), nn.LayerNorm(n), nn.Linear(n, 11))
        for module in (model[0], model[3]):
            module.requires_grad_(False)
        kept.update(copy.deepcopy(model.state_dict()))
        return model

    parametrization = parametrize(make, widths=WIDTHS, sample_input=TOKENS)
    assert {name: (item.role, item.width, item.a, item.c) for name, item in parametrization.layers.items()} == {
        "1.a": ("hidden", 32, 0, pytest.approx(1)),
        "1.b": ("embedding", 32, 0, pytest.approx(0)),
    }
    for name, value in parametrization.model.state_dict().items():
        assert torch.equal(value, kept[name]) is (name != "1.a.weight")
    assert not multipliers(parametrization.model)
    assert not [record for record in caplog.records if record.name.startswith("ignite")]


# Outputs of a fixed size inside the network


class Shared(nn.Module):
    """Multi-query attention: keys and values of one head of four, queries of n / 4 heads."""

    def __init__(self, n, norm=False):
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(n, n), nn.Linear(n, 4), nn.Linear(n, 4), nn.Linear(n, n)
        self.norm = nn.LayerNorm(4) if norm else nn.Identity()

    def forward(self, x):
        q = self.q(x).unflatten(-1, (-1, 4)).transpose(1, 2)
        k, v = self.norm(self.k(x))[:, None], self.v(x)[:, None]
        return self.o(((q @ k.mT) / 4).softmax(-1).matmul(v).transpose(1, 2).flatten(2))


class Few(nn.Module):
    """A gate of two outputs."""

    def __init__(self, n, norm=False):
        super().__init__()
        self.first, self.few, self.last = nn.Linear(6, n), nn.Linear(n, 2), nn.Linear(n, 3)
        self.norm = nn.LayerNorm(2) if norm else nn.Identity()

    def forward(self, x):
        x = self.first(x).relu()
        return self.last(x.unflatten(-1, (-1, 2)).mul(self.norm(self.few(x))[..., None, :]).flatten(-2))


def frozen_between(n):
    model = nn.Sequential(nn.Linear(6, n), nn.Linear(n, n), nn.Linear(n, 3))
    model[1].requires_grad_(False)
    return model


ATTENTION_CASES = (
    (False, attention()),
    (True, attention(kdim=7, vdim=7)),
    ("shared", lambda n: Between(n, Shared)),
    ("shared, normed", lambda n: Between(n, lambda n: Shared(n, norm=True))),
    ("few", Few),
    ("few, normed", lambda n: Few(n, norm=True)),
    ("last", lambda n: nn.Sequential(nn.Linear(6, n), nn.Linear(n, 3), nn.LayerNorm(3))),
    ("frozen", frozen_between),
)


def test_keys_and_values_that_all_heads_share_are_readouts():
    parametrization, layers = layers_of(ATTENTION_CASES, X)
    for name in ("between.k", "between.v"):
        layer = layers["shared"][name]
        assert (layer.role, layer.a, layer.b, layer.c) == ("readout", 0.5, 0.5, pytest.approx(0.5))
        start = weight_of(parametrization, layer.name).std().item() * layer.multiplier
        assert start == pytest.approx(1 / 32, rel=0.3)


def test_in_front_of_a_norm_only_the_relative_change_counts():
    parametrization, layers = layers_of(ATTENTION_CASES, X)
    key = layers["shared, normed"]["between.k"]
    assert (key.role, key.b, key.c) == ("hidden", 0.5, 1.0)
    assert weight_of(parametrization, key.name).std().item() == pytest.approx(32**-0.5, rel=0.3)
    assert layers["shared, normed"]["between.v"].role == "readout"


@pytest.mark.parametrize("norm", [False, True])
def test_with_sgd_few_outputs_inside_the_network_are_refused(norm):
    """Their gradient is a sum over n, random at first and aligned later."""
    with pytest.raises(ValueError, match=r"its number of inputs does not grow: train with Adam"):
        parametrize(lambda n: Few(n, norm), WIDTHS, sample_input=X, optimizer_type="sgd")
    assert set(layers_of(ATTENTION_CASES, X)[1]["few, normed" if norm else "few"]) == {"first", "few", "last"}


def test_a_last_layer_in_front_of_a_norm_is_a_readout():
    layer = layers_of(ATTENTION_CASES, X)[1]["last"]["1"]
    assert (layer.role, layer.b) == ("readout", 0.5)


def test_frozen_layers_pass_changes_on():
    parametrization, layers = layers_of(ATTENTION_CASES, X)
    assert list(layers["frozen"]) == ["0", "2"]
    assert inputs_of(parametrization, layers["frozen"]["2"]) == ["0"]
