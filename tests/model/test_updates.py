"""Order statistics and values of sparse tensors, against plain Python."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ignite_monitor.model.norms import summed_values
from ignite_monitor.model.updates import order_statistics


@given(st.lists(st.floats(0, 1e9) | st.just(math.nan), max_size=70))
def test_order_statistics(values):
    known = sorted(value for value in values if not math.isnan(value))
    median, p95, least, largest = order_statistics(torch.tensor(values, dtype=torch.float64)).tolist()
    if not known:
        assert all(map(math.isnan, (median, p95, least, largest)))
        return
    assert median == pytest.approx(statistics.median(known))
    rank = next(i for i in range(1, len(known) + 1) if 100 * i >= 95 * len(known))
    assert (p95, least, largest) == (known[rank - 1], known[0], known[-1])


def test_order_statistics_with_infinity():
    assert order_statistics(torch.tensor([math.inf, 1.0, math.nan, 3.0])).tolist() == [3.0, math.inf, 1.0, math.inf]


def test_order_statistics_of_rows():
    rows = torch.tensor([[1.0, math.nan, 3.0], [5.0, 6.0, 7.0]])
    assert torch.equal(order_statistics(rows), torch.stack([order_statistics(row) for row in rows]))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_summed_values_have_the_norm_of_the_tensor(dims):
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(0, 4, (dims, 60), generator=generator)
    sparse = torch.sparse_coo_tensor(
        indices, torch.randn(60, 5, generator=generator), (4,) * dims + (5,), check_invariants=True
    )
    norm = sparse.to_dense().double().norm()
    assert float(summed_values(sparse).double().norm()) == pytest.approx(float(norm), rel=1e-6)
    assert torch.equal(summed_values(sparse.coalesce()), sparse.coalesce().values())


def test_summed_values_of_nothing():
    sparse = torch.sparse_coo_tensor(
        torch.zeros(1, 0, dtype=torch.long), torch.zeros(0, 5), (4, 5), check_invariants=True
    )
    assert summed_values(sparse).shape == (0, 5)
