"""The refined coordinate check against float64 and closed forms."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ignite_monitor.rcc.terms import (
    Change,
    change_norms,
    feature_norms,
    input_norms,
    linear_change,
    mean_norm,
    normalized_change,
    output_change,
    weight_share,
)


@pytest.mark.parametrize("size", [1e-7, 1e-6, 1.0])
def test_small_updates_keep_their_digits(size):
    """In float32 W_t x_t - W_0 x_t is mostly rounding for an update of a millionth."""
    torch.manual_seed(0)
    weight, x = torch.randn(256, 512) / 512**0.5, torch.randn(64, 512)
    moved, drifted = weight + size * torch.randn_like(weight) / 512**0.5, x + size * torch.randn_like(x)
    change = linear_change(F.linear, moved - weight, weight, drifted - x, drifted)
    update = F.linear(drifted.double(), moved.double() - weight.double())
    drift = F.linear(drifted.double() - x.double(), weight.double())
    torch.testing.assert_close(mean_norm(change.weight_update), mean_norm(update), rtol=1e-5, atol=0)
    torch.testing.assert_close(mean_norm(change.input_drift), mean_norm(drift), rtol=1e-5, atol=0)
    whole = F.linear(drifted.double(), moved.double()) - F.linear(x.double(), weight.double())
    torch.testing.assert_close(change.output.double(), whole, rtol=1e-4, atol=1e-5 * size)


def test_parts_of_outputs():
    change = output_change(torch.tensor([5.0, 1.0]), torch.tensor([3.0, 1.0]), torch.tensor([2.0, 0.0]))
    assert change.weight_update.tolist() == [2.0, 0.0]
    assert change.input_drift.tolist() == [1.0, 1.0]
    assert change.output.tolist() == [3.0, 1.0]


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("shape", [(8,), (2, 4)])
@pytest.mark.parametrize("size", [0.0, 1e-6, 1.0, 1e3])
@pytest.mark.parametrize("eps", [1e-5, None])
def test_normalized_inputs(centred, shape, size, eps):
    torch.manual_seed(0)
    reference_x = 3 + torch.randn(5, *shape)
    x = reference_x + size * torch.randn_like(reference_x)
    found, change = normalized_change(x, reference_x, shape, eps, centred=centred)
    eps = torch.finfo(torch.float32).eps if eps is None else eps

    def normalize(values):
        return F.layer_norm(values, shape, eps=eps) if centred else F.rms_norm(values, shape, eps=eps)

    torch.testing.assert_close(found, normalize(x), rtol=1e-5, atol=2e-6)
    wide = normalize(x.double()) - normalize(reference_x.double())
    torch.testing.assert_close(mean_norm(change), mean_norm(wide), rtol=1e-5, atol=0)
    torch.testing.assert_close(change.double(), wide, rtol=1e-4, atol=5e-6 * min(size, 1.0))


def test_rms_norm_of_torch_has_the_same_default_for_eps():
    x = torch.full((1, 4), 1e-5)
    found, _ = normalized_change(x, x, (4,), None, centred=False)
    torch.testing.assert_close(found, nn.RMSNorm(4, elementwise_affine=False)(x))


@pytest.mark.parametrize(("shape", "dim"), [((3,), -1), ((2, 3), -1), ((2, 3), 1), ((2, 3, 4, 5), 1), ((4, 2, 3), 0)])
def test_means_of_norms(shape, dim):
    torch.manual_seed(0)
    values = torch.randn(shape)
    expected = values.double().movedim(dim, -1).reshape(-1, shape[dim])
    norms = [math.sqrt(math.fsum(x * x for x in row)) for row in expected.tolist()]
    assert feature_norms(values, dim).tolist() == pytest.approx(norms, rel=1e-6)
    assert mean_norm(values, dim).dtype == torch.float64
    assert float(mean_norm(values, dim)) == pytest.approx(math.fsum(norms) / len(norms), rel=1e-6)


def test_norms_of_numbers_and_of_nothing():
    assert float(mean_norm(torch.tensor(-2.0))) == 2.0
    assert not len(feature_norms(torch.empty(0, 3)))
    assert mean_norm(torch.empty(0, 3)).isnan()


def test_share_of_the_weights():
    share = weight_share(torch.tensor([1.0, 0.0, 0.0, 3.0, torch.nan]), torch.tensor([3.0, 2.0, 0.0, 0.0, 1.0]))
    assert share[:4].tolist() == [0.25, 0.0, 0.0, 1.0]
    assert share[4].isnan()


@pytest.mark.parametrize("dim", [-1, 1])
def test_norms_of_a_call_with_and_without_the_bias(dim):
    torch.manual_seed(0)
    x, dx, update, drift = torch.randn(4, 3, 5, 2, dtype=torch.float64)
    bias = torch.randn(2 if dim == -1 else 5, 1 if dim == 1 else 2, dtype=torch.float64)[: 5 if dim == 1 else 1]

    def of(values):
        return values.movedim(dim, -1).norm(dim=-1).flatten()

    inputs = input_norms(x, dx, dim)
    expected = [of(update + bias), of(drift), of(x), of(dx), of(update + bias + drift)]
    expected += [of(update), of(drift), of(x), of(dx), of(update + drift)]
    found = inputs | change_norms(Change(update.clone(), drift.clone()), dim, inputs, bias)
    assert sorted(found) == list(range(10))
    for place, each in found.items():
        torch.testing.assert_close(each, expected[place])
    plain = change_norms(Change(update.clone(), drift.clone()), dim)
    assert sorted(plain) == [0, 1, 4]
    torch.testing.assert_close(plain[4], of(update + drift))
