"""Coordinate checks: slopes against what scaling theory says, and every quantity against a computation by hand."""

from __future__ import annotations

import copy
import functools
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ignite_monitor.scaling import CoordinateCheck, Record, coordinate_check, parametrize
from ignite_monitor.scaling.coordinate_result import log_log_slope
from tests.scaling._models import weight_of

WIDTHS = [32, 64, 256]
GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(64, 32, generator=GENERATOR), torch.randint(8, (64,), generator=GENERATOR)


def mlp(n):
    return nn.Sequential(nn.Linear(32, n), nn.ReLU(), nn.Linear(n, n), nn.ReLU(), nn.Linear(n, n), nn.ReLU(), nn.Linear(n, 8))  # fmt: skip  # noqa: E501


@functools.cache
def parametrized(width, preset):
    return parametrize(mlp, (16, width), sample_input=X[:1], lr_prefactor=0.01, preset=preset)


def reinitialized(width, preset):
    """A parametrization with new initial weights; one export per width is enough."""
    parametrization = copy.deepcopy(parametrized(width, preset))
    for layer in parametrization.layers.values():
        nn.init.normal_(weight_of(parametrization, layer.name), std=layer.std)
    return parametrization


def standard(width):
    """Weights of variance 1 / fan-in, no multipliers, and one learning rate for all layers and widths."""
    model = reinitialized(width, "standard").model
    return model, torch.optim.Adam(model.parameters(), lr=1e-4)


def slopes_of(result, quantity, step):
    return {slope.layer: slope for slope in result.slopes if (slope.quantity, slope.step) == (quantity, step)}


def steep_layers(result, step):
    return {slope.layer for slope in result.slopes if slope.is_steep and slope.step == step}


class Bottlenecks(nn.Module):
    """Layers with 12 outputs, whatever the width: one before a norm, and one without."""

    def __init__(self, n):
        super().__init__()
        self.first = nn.Linear(32, n, bias=False)
        self.down, self.norm, self.up = nn.Linear(n, 12, bias=False), nn.LayerNorm(12), nn.Linear(12, n, bias=False)
        self.few, self.spread = nn.Linear(n, 12, bias=False), nn.Linear(12, n, bias=False)
        self.head, self.last = nn.Linear(n, 8, bias=False), nn.Linear(n, 8, bias=False)

    def forward(self, x):
        x = self.first(x)
        return self.head(self.up(self.norm(self.down(x))).relu()) + self.last(self.spread(self.few(x)).relu())


class Optimizers:
    def __init__(self, *optimizers):
        self.optimizers = optimizers

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()


MUON = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="no Muon")


@pytest.mark.parametrize(
    ("make", "optimizer_type"),
    [
        (mlp, "adam"),
        (mlp, "sgd"),
        pytest.param(mlp, "muon", marks=MUON),
        (Bottlenecks, "adam"),
        pytest.param(Bottlenecks, "muon", marks=MUON),
    ],
)
def test_first_updates_have_the_expected_slopes(make, optimizer_type):
    def make_run(width):
        own = parametrize(make, (16, width), sample_input=X[:1], lr_prefactor=0.01, optimizer_type=optimizer_type)
        if optimizer_type == "muon":
            muon = torch.optim.Muon(own.muon_groups, weight_decay=0.0)
            return own, Optimizers(muon, torch.optim.AdamW(own.param_groups))
        return own, {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[optimizer_type](own.param_groups)

    result = coordinate_check(make_run, lambda width: (X, Y), [64, 128, 256, 512], steps=1, seeds=2)
    after = {(slope.layer, slope.quantity): slope for slope in result.slopes if slope.step == 1 and slope.expected}
    assert len(after) == {mlp: 4 * 4 - 1, Bottlenecks: 7 * 4 - 1}[make]
    for (layer, quantity), slope in after.items():
        low, high = slope.expected
        if quantity == "weight_update" and layer not in ("spread", "last"):  # the batch has few independent inputs
            low = high
        # Behind the norm of few elements drift is bounded, but not yet flat at these widths.
        if layer != "up" or quantity in ("activation", "weight_update"):
            assert low - 0.15 < slope.slope < high + 0.15, slope
    if make is Bottlenecks:
        assert after["down", "input_drift"].slope == pytest.approx(0.5, abs=0.15)
        assert after["down", "input_drift"].is_steep
        # What starts at n^-1/2 is the input of the layers behind it, until it has learnt.
        starts = {
            slope.layer: slope.slope for slope in result.slopes if (slope.quantity, slope.step) == ("activation", 0)
        }
        small = {"few": -0.5, "spread": -0.5, "last": -1.0}
        assert starts == pytest.approx({"first": 0, "down": 0, "norm": 0, "up": 0, "head": -0.5} | small, abs=0.15)
        assert after["spread", "weight_update"].slope == pytest.approx(-0.5, abs=0.15)


@pytest.mark.parametrize("count", [4, 128])
def test_weights_change_outputs_as_independent_inputs_of_a_batch_say(count):
    """Adam adds the sign of a sum over the batch to each weight, which is aligned with each input by (2 / pi K)^1/2.

    Along its own input n elements add up, along the noise of the others n^1/2: (2 n^2 / (pi K) + n)^1/2 together.
    """
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(count, 512, generator=generator), torch.randint(64, (count,), generator=generator)

    def model(n):
        layers = [nn.Linear(512, n, bias=False), nn.Tanh(), nn.Linear(n, n, bias=False), nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(n, 64, bias=False))

    def make_run(width):
        own = parametrize(model, (16, width), sample_input=x[:1], lr_prefactor=0.01)
        return own, torch.optim.Adam(own.param_groups)

    widths = [32, 64, 128, 256]
    result = coordinate_check(make_run, lambda width: (x, y), widths, steps=1, seeds=1)
    predicted = np.polyfit(np.log(widths), [0.5 * math.log(2 * n**2 / (math.pi * count) + n) for n in widths], 1)[0] - 1
    for layer, tolerance in {"2": 0.05, "4": 0.15}.items():
        slope = slopes_of(result, "weight_update", 1)[layer]
        assert slope.slope == pytest.approx(predicted, abs=tolerance)
        assert slope.expected == pytest.approx((-0.5, 0.0))
    assert steep_layers(result, 1) == set()


def test_standard_parametrization_has_the_predicted_slopes():
    """Adam moves each weight by the learning rate, whatever the width, so sums over n of updates grow as n.

    The first layer has no such sum. What reaches the second doesn't grow; of what reaches the later ones, weights of
    variance 1 / n make as much again. The readout's weights have made the changes that reach it, so they are aligned
    with them, more or less: from n to the power of 1 (not at all) to 3/2 (fully).
    """
    # Below a width of 64 the slopes are about 0.1 flatter.
    result = coordinate_check(standard, lambda width: (X, Y), [64, 128, 256, 512], steps=1, seeds=2)
    update, drift = slopes_of(result, "weight_update", 1), slopes_of(result, "input_drift", 1)
    for layer, expected in {"0": 0.0, "2": 1.0, "4": 1.0, "6": 1.0}.items():
        assert update[layer].slope == pytest.approx(expected, abs=0.1), layer
    assert drift.keys() == {"2", "4", "6"}  # data do not drift
    assert drift["2"].slope == pytest.approx(0.0, abs=0.1)
    assert drift["4"].slope == pytest.approx(1.0, abs=0.1)
    assert 0.9 < drift["6"].slope < 1.6
    for slope in slopes_of(result, "activation", 0).values():
        assert slope.slope == pytest.approx(0.0, abs=0.1 + 2 * slope.standard_error)
    # Weight update and input drift apart: of the second layer one is too large, and the other is not.
    assert update["2"].is_steep
    assert not drift["2"].is_steep
    assert steep_layers(result, 1) == {"2", "4", "6"}


def test_every_quantity_by_hand():
    """Multipliers included, in float64, after two steps of plain SGD."""
    start, now, batch = {}, {}, (X.double(), Y)

    def two_layers(n):
        return nn.Sequential(nn.Linear(32, n), nn.Tanh(), nn.Linear(n, 8))

    def make_model(width):
        parametrization = parametrize(two_layers, (2, width), sample_input=X[:1])
        model = parametrization.model.double()
        start[width] = copy.deepcopy(model.state_dict())
        return parametrization, torch.optim.SGD(model.parameters(), lr=0.01)

    def train_step(model, optimizer, batch):
        now[model[0].out_features] = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    result = coordinate_check(make_model, lambda width: batch, [4, 8], train_step=train_step, steps=2, seeds=1)
    for width in (4, 8):

        def layers(state, x=None, n=width):
            first = (X.double() @ state["0.weight"].T + state["0.bias"]) * n**0.5
            second = (first.tanh() if x is None else x) @ state["2.weight"].T + state["2.bias"]
            return first, second * n**-0.5

        (first, second), (first_then, second_then) = layers(now[width]), layers(start[width])
        crossed = layers(start[width], first.tanh())[1]
        expected = {
            ("0", "output_change"): first - first_then,
            ("0", "weight_update"): first - first_then,
            ("0", "input_drift"): torch.zeros(1, 1),
            ("2", "output_change"): second - second_then,
            ("2", "weight_update"): second - crossed,
            ("2", "input_drift"): crossed - second_then,
        }
        expected = {key: values.square().mean(1).sqrt().mean() for key, values in expected.items()}
        expected |= {(name, "activation"): x.square().mean().sqrt() for name, x in (("0", first), ("2", second))}
        got = {(r.layer, r.quantity): r.value for r in result.records if (r.width, r.step) == (width, 2)}
        assert got == pytest.approx({key: float(value) for key, value in expected.items()}, rel=1e-6, abs=1e-12)


def test_runs_are_deterministic_and_preserve_rng_state():
    def make_model(width):
        model = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 3))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def make_batch(width):
        return torch.randn(8, 6) * random.random() + np.random.rand(), torch.randint(3, (8,))

    def check():
        return coordinate_check(make_model, make_batch, [4, 8], steps=2, seeds=2).records

    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    first = check()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    torch.rand(3), random.random(), np.random.rand()
    assert check() == first
    assert {(r.width, r.seed, r.step) for r in first} == {(w, s, t) for w in (4, 8) for s in (0, 1) for t in (0, 1, 2)}
    assert len({r.value for r in first if (r.layer, r.step, r.quantity) == ("0", 0, "activation")}) == 4


def test_slopes_against_numpy():
    rng = np.random.default_rng(0)
    records = [
        Record(width, seed, 1, layer, "activation", float(scale * width**c * np.exp(0.1 * rng.standard_normal())))
        for layer, scale, c in (("a", 2.0, 0.7), ("b", 0.1, 0.0), ("c", 1.0, -0.5))
        for width in (64, 128, 512)
        for seed in range(4)
    ]
    result = CoordinateCheck(records, {("a", "activation"): (0.5, 0.5), ("c", "activation"): (-0.3, 0.2)})
    for slope in result.slopes:
        own = [record for record in records if record.layer == slope.layer]
        x, y = np.log([record.width for record in own]), np.log([record.value for record in own])
        (fitted, _), covariance = np.polyfit(x, y, 1, cov=True)
        assert slope.slope == pytest.approx(fitted, rel=1e-9)
        assert slope.standard_error == pytest.approx(math.sqrt(covariance[0, 0]), rel=1e-9)
    assert [slope.layer for slope in result.slopes if slope.is_steep] == ["a", "c"]
    header, *rows = result.table().splitlines()
    assert header.split() == ["layer", "activation", "output_change", "weight_update", "input_drift"]
    first = result.slopes[0]
    cells = [f"{first.slope:+.2f}", "±", f"{first.standard_error:.2f}", "(+0.50)", "*", "-", "-", "-"]
    assert rows[0].split() == ["a", *cells]
    assert ["*" in row for row in rows] == [True, False, True]


def test_slopes_of_little():
    assert log_log_slope([(1.0, 2.0), (1.0, 3.0)]) is None
    assert log_log_slope([(0.0, 1.0), (2.0, 5.0)]) == (2.0, math.inf)
    records = [Record(width, 0, 1, "x", "activation", value) for width, value in ((2, 1.0), (4, math.nan), (8, 0.0))]
    result = CoordinateCheck(records)
    assert result.slopes == []
    assert result.table().splitlines()[1:] == [
        "x      -           -              -              -",
        "x: not finite at width 4",
    ]
    for seeds in (1, 2):  # two points have no error
        values = [(width, seed, width * (1 + 0.01 * seed)) for width in (2, 4) for seed in range(seeds)]
        result = CoordinateCheck([Record(width, seed, 1, "x", "activation", value) for width, seed, value in values])
        assert steep_layers(result, 1) == ({"x"} if seeds > 1 else set())
        assert ("± inf" in result.table()) is (seeds == 1)


def test_the_change_of_an_embedding_is_that_by_its_weights():
    def make_model(width):
        model = nn.Sequential(nn.Embedding(5, width), nn.Linear(width, 3))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    batch = torch.tensor([[1, 2]]), torch.tensor([[0, 1]])
    result = coordinate_check(make_model, lambda width: batch, [4, 8], steps=1, seeds=1)
    values = {r.quantity: r.value for r in result.records if (r.layer, r.width, r.step) == ("0", 4, 1)}
    assert values["output_change"] == values["weight_update"] > 0
    assert "input_drift" not in values


def test_plot(tmp_path):
    records = [
        Record(width, seed, step, layer, "activation", width**0.5 * (seed + 1))
        for width in (2, 4)
        for seed in (0, 1)
        for step in (0, 1)
        for layer in ("", "blocks.0.x$_y")
    ]
    path = tmp_path / "check.svg"
    CoordinateCheck(records).plot(path)
    assert path.read_bytes().startswith(b"<?xml")
    assert path.stat().st_size > 5000


def test_bad_input():
    def make_model(width):
        model = nn.Linear(3, width)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def batch(width):
        return torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)

    wrong = [({"widths": value}, error, "widths") for value, error in (("ab", TypeError), ([4], ValueError))]
    wrong += [({"widths": value}, ValueError, "widths") for value in ([4, 4, 8], [4, 0])]
    wrong += [({name: 0}, ValueError, name) for name in ("steps", "seeds")]
    wrong += [
        ({"make_model": make_model(3)}, TypeError, "make_model should be a function of width"),
        ({"make_model": lambda width: make_model(width)[0]}, TypeError, "a tuple of a model and an optimizer"),
        ({"make_batch": lambda: batch(1)}, TypeError, r"make_batch should be a function of width, but given"),
        ({"train_step": lambda model, batch: None}, TypeError, "train_step should be a function of model and optimi"),
        ({"train_step": lambda model, optimizer, batch: None}, ValueError, "train_step should run the model"),
    ]
    for arguments, error, match in wrong:
        with pytest.raises(error, match=match):
            coordinate_check(**{"make_model": make_model, "make_batch": batch, "widths": [4, 8]} | arguments)
