"""The refined coordinate check against float64 and closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from ignite_monitor.rcc.terms import Change, mean_norms, norm_sums, output_change, over_layers, table_of


def test_parts_of_outputs():
    change = output_change(torch.tensor([5.0, 1.0]), torch.tensor([3.0, 1.0]), torch.tensor([2.0, 0.0]))
    assert change.weight_update.tolist() == [2.0, 0.0]
    assert change.input_drift.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("shape", "dim"), [((), -1), ((3,), 1), ((2, 3), -1), ((2, 3), 1), ((2, 3, 4, 5), 1)])
def test_norms_over_features(shape, dim):
    torch.manual_seed(0)
    values = torch.randn(shape)
    wide = values.double().reshape(1) if not shape else values.double().movedim(min(dim, len(shape) - 1), -1)
    norms = [math.sqrt(math.fsum(x * x for x in row)) for row in wide.reshape(-1, wide.shape[-1]).tolist()]
    sums, counts = norm_sums(Change(values, values), [], dim)
    assert sums.tolist() == [pytest.approx(math.fsum(norms), rel=1e-6), 0, 0, 0, 0]
    assert counts == [len(norms), 0, 0, 0, 0]


def test_means_of_several_calls():
    """Layer 0 is called twice, layer 1 once without an input, layer 2 never."""
    x = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    calls = [
        norm_sums(Change(2 * x, -x), [x, x / 2], -1),
        norm_sums(Change(x[:1].clone(), x[:1]), [x[:1], x[:1]], -1),
        norm_sums(Change(x, x), [], -1),
    ]
    means = mean_norms(*table_of(list(zip([0, 0, 1], calls, strict=True)), 3, x.device))
    expected = torch.tensor([[17 / 3, 11 / 3, 11 / 3, 8 / 3, 16 / 3, 17 / 28], [3, *[torch.nan] * 5], [torch.nan] * 6])
    torch.testing.assert_close(means, expected.double(), equal_nan=True)
    statistics = {name: float(value) for name, value in over_layers(means).items()}
    assert statistics == pytest.approx(
        {
            "weight_update_max": 17 / 3,
            "weight_update_median": 13 / 3,
            "input_drift_max": 11 / 3,
            "input_drift_median": 11 / 3,
        }
    )


def test_share_of_the_weights():
    sums = torch.zeros(5, 5, dtype=torch.float64)
    sums[:, 0] = torch.tensor([1.0, 0.0, 0.0, 3.0, torch.inf])
    sums[:, 1] = torch.tensor([3.0, 2.0, 0.0, 0.0, 1.0])
    means = mean_norms(sums, torch.ones_like(sums))
    assert means[:4, 5].tolist() == [0.25, 0.0, 0.0, 1.0]
    assert means[4, [0, 5]].isnan().all()
