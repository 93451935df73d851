"""Measured alignment against a computation of its own in float64, and what is not measured."""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ignite_monitor.scaling import AlignmentHandler, parametrize
from ignite_monitor.scaling.alignment import row_alignment
from tests._helpers import make_batches, make_step, run_monitored
from tests._models import Lambda
from tests.scaling._models import mlp

TERMS = ("z0_dW", "dZ_w0", "dZ_dW")


def train(model, handler, batches, lr=0.05):
    """Return the metrics of each iteration."""
    return run_monitored(make_step(model, torch.optim.Adam(model.parameters(), lr=lr)), batches, handler)


def alignment(z, weight):
    """One number per row, in NumPy's float64."""
    z, weight = z.detach().double().numpy(), weight.detach().double().numpy()
    sizes = np.sqrt((z**2).mean(1)) * np.sqrt((weight**2).mean())
    return np.log(np.sqrt(((z @ weight.T) ** 2).mean(1)) / sizes) / np.log(weight.shape[1])


def test_every_number_in_float64():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 3))
    start = copy.deepcopy(model)
    handler = AlignmentHandler(model, sample_size=5, reference=start)
    batches = make_batches(4, size=17)
    states = []

    def before(module, args):
        if module.training:
            states.append(copy.deepcopy(module.state_dict()))

    hook = model.register_forward_pre_hook(before)
    seen = train(model, handler, batches)
    hook.remove()
    assert seen[0] == {}
    for published, state, (x, _) in list(zip(seen, states, batches, strict=True))[1:]:
        now = copy.deepcopy(start).double()
        now.load_state_dict(state)
        rows = random.Random(0).sample(range(17), 5)
        z, z0 = x[rows].double(), x[rows].double()
        expected = {}
        for layer in range(0, 5, 2):
            w0, w = start[layer].weight.double(), now[layer].weight
            expected[f"alignment/z0_dW/{layer}"] = alignment(z0, w - w0).mean()
            if layer:
                expected[f"alignment/dZ_w0/{layer}"] = alignment(z - z0, w0).mean()
                expected[f"alignment/dZ_dW/{layer}"] = alignment(z - z0, w - w0).mean()
            z, z0 = now[layer](z).tanh(), copy.deepcopy(start[layer]).double()(z0).tanh()
        for term in TERMS:
            values = [value for name, value in expected.items() if f"/{term}/" in name]
            expected |= {f"alignment/{term}_mean": sum(values) / len(values)}
            expected |= {f"alignment/{term}_min": min(values), f"alignment/{term}_max": max(values)}
        assert published.keys() == expected.keys()
        for name, value in expected.items():
            assert published[name] == pytest.approx(value, rel=1e-4), name


@pytest.mark.parametrize(("batch", "length"), [(32, 24), (64, 12)])
def test_rows_of_all_positions_of_a_sequence_are_measured(batch, length):
    """Batches of a multiple of the default sample size, whose first position is always the same token."""
    n = 48

    def forward(self, tokens):
        return self.head(self.mix(self.token(tokens) + self.place.weight[: tokens.shape[1]]).tanh())

    def published(**arguments):
        torch.manual_seed(3)
        parts = {"token": nn.Embedding(30, n), "place": nn.Embedding(length, n), "mix": nn.Linear(n, n)}
        model = Lambda(forward, **parts, head=nn.Linear(n, 30))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def step(engine, tokens):
            optimizer.zero_grad()
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
            optimizer.step()

        tokens = [torch.randint(30, (batch, length)).index_fill(1, torch.tensor([0]), 0) for _ in range(12)]
        return run_monitored(step, tokens, AlignmentHandler(model, **arguments))[-1]

    sampled, everything = published(), published(sample_size=10**6)
    names = [name for name in everything if name.count("/") == 2]
    assert len(names) == 6
    assert {name: sampled[name] for name in names} == pytest.approx(
        {name: everything[name] for name in names}, abs=0.02
    )


def test_convolutions_and_tables():
    """A row is a sample, n the kernel's size times the channels; a table adds nothing up."""
    torch.manual_seed(0)

    def forward(self, x):
        x = self.table((x[:, :6].abs() * 3).long().clamp(max=6)).transpose(1, 2)
        return self.head(self.up(self.conv(x).tanh()).mean(-1))

    up, head = nn.ConvTranspose1d(5, 4, 4, stride=2), nn.Linear(4, 3)
    model = Lambda(forward, table=nn.Embedding(7, 4), conv=nn.Conv1d(4, 5, 3, stride=2), up=up, head=head)
    start = copy.deepcopy(model)
    handler = AlignmentHandler(model, sample_size=1000, reference=start)
    inputs = {}
    batches = make_batches(2, size=9)
    model.conv.register_forward_pre_hook(lambda module, args: inputs.__setitem__("now", args[0].detach().double()))
    weights = []
    model.register_forward_pre_hook(lambda module, args: weights.append(module.conv.weight.detach().double().clone()))
    published = train(model, handler, batches)[-1]
    layers = {name.split("/")[2] for name in published if name.count("/") == 2}
    assert layers == {"conv", "up", "head"}
    z = inputs["now"]
    with torch.no_grad():
        z0 = start.table((batches[1][0].abs() * 3).long().clamp(max=6)).transpose(1, 2).double()
    w0 = start.conv.weight.detach().double()

    def expected(x, weight):
        products = F.conv1d(x, weight, stride=2).square().mean((1, 2)).sqrt()
        sizes = x.square().mean((1, 2)).sqrt() * weight.square().mean().sqrt()
        return float((products / sizes).log().mean() / math.log(12))

    change = weights[-1] - w0
    for term, pair in zip(TERMS, ((z0, change), (z - z0, w0), (z - z0, change)), strict=True):
        assert published[f"alignment/{term}/conv"] == pytest.approx(expected(*pair), rel=1e-4), term


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_no_training_is_no_alignment_for_any_batch(dropout, caplog):
    """Steps of size 0, other batches, and dropout: nothing has changed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 3))
    assert train(model, AlignmentHandler(model), make_batches(4), lr=0.0) == [{}] * 4
    assert not caplog.records


def test_parametrization_names_layers_and_leaves_embeddings_out():
    torch.manual_seed(0)
    parametrization = parametrize(mlp, (8, 16), sample_input=torch.zeros(2, 6))
    seen = train(parametrization.model, AlignmentHandler(parametrization), make_batches(2))[-1]
    layers = {name.split("/")[2] for name in seen if name.count("/") == 2}
    assert layers == {"3", "6"}
    assert set(TERMS) == {name.split("/")[1] for name in seen if name.count("/") == 2}


def test_bad_input():
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    with pytest.raises(TypeError, match="model_or_parametrization"):
        AlignmentHandler("x")
    for name, value, error in (("sample_size", 1.5, TypeError), ("sample_size", 0, ValueError)):
        with pytest.raises(error, match=name):
            AlignmentHandler(model, **{name: value})
    for nothing in (nn.Embedding(3, 4), nn.LayerNorm(3), nn.Linear(1, 3)):
        with pytest.raises(ValueError, match="Linear layers or convolutions"):
            AlignmentHandler(nothing)
    with pytest.raises(ValueError, match="include and exclude"):
        AlignmentHandler(model, include="x")
    embedding = parametrize(lambda n: nn.Sequential(nn.Linear(3, n)), (2, 4), sample_input=torch.zeros(1, 3))
    with pytest.raises(ValueError, match="none"):
        AlignmentHandler(embedding)


@pytest.mark.parametrize("n", [2, 8, 2048])
def test_rank_one_in_the_inputs_direction_is_one(n):
    torch.manual_seed(0)
    x = torch.randn(5, n, dtype=torch.float64)
    for row in range(5):
        weight = torch.outer(torch.randn(7).double(), x[row])
        result = row_alignment(F.linear, n, x, weight)
        assert float(result[row]) == pytest.approx(1.0, abs=1e-12)
        assert float(result.max()) <= 1 + 1e-12  # Cauchy and Schwarz


def test_undefined_rows_are_nan():
    x, weight = torch.randn(5, 16), torch.randn(3, 16)
    x[1] = 0.0
    x[3, 2] = math.inf
    result = row_alignment(F.linear, 16, x, weight)
    assert result.isnan().tolist() == [False, True, False, True, False]
    assert row_alignment(F.linear, 16, x, torch.zeros_like(weight)).isnan().all()
    assert row_alignment(F.linear, 16, torch.zeros_like(x), weight).isnan().all()
