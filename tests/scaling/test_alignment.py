"""Alignment: closed forms, and NumPy in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from ignite_monitor.scaling.alignment import over_layers, row_alignment

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


@pytest.mark.parametrize("n", [8, 256, 2048])
def test_random_is_one_half(n):
    """The mean square of outputs, 1 in expectation, has the variance 2 / outputs; its logarithm is halved."""
    outputs, rows = 400, 50
    found = row_alignment(F.linear, n, normal(rows, n), normal(outputs, n))
    assert float(found.mean()) == pytest.approx(0.5, abs=4 / math.sqrt(outputs) / math.log(n))


@pytest.mark.parametrize("n", [2, 8, 2048])
def test_rank_one_in_the_inputs_direction_is_one(n):
    x, u = normal(5, n), normal(7)
    for row in range(5):
        weight = torch.outer(u, x[row])
        found = row_alignment(F.linear, n, x, weight)
        assert float(found[row]) == pytest.approx(1.0, abs=1e-12)
        assert float(found.max()) <= 1 + 1e-12  # Cauchy and Schwarz


def test_scale_does_not_matter():
    x, weight = normal(4, 32), normal(8, 32)
    found = row_alignment(F.linear, 32, x, weight)
    torch.testing.assert_close(row_alignment(F.linear, 32, 1e-30 * x, 1e20 * weight), found, rtol=1e-10, atol=0)


def test_rows_without_a_definition_are_left_out():
    x, weight = normal(5, 16), normal(3, 16)
    x[1] = 0.0
    x[3, 2] = math.inf
    found = row_alignment(F.linear, 16, x, weight)
    assert found.isnan().tolist() == [False, True, False, True, False]
    assert row_alignment(F.linear, 16, x, torch.zeros_like(weight)).isnan().all()
    assert row_alignment(F.linear, 16, torch.zeros_like(x), weight).isnan().all()


def test_over_layers():
    table = torch.tensor([[0.5, math.nan, math.nan], [1.0, 0.7, math.nan], [0.6, math.nan, math.nan]])
    found = over_layers(table)
    torch.testing.assert_close(found[:, 0], torch.tensor([0.7, 0.5, 1.0]))
    torch.testing.assert_close(found[:, 1], torch.tensor([0.7, 0.7, 0.7]))
    assert found[:, 2].isnan().all()
