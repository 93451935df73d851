"""Norms and order statistics of many tensors, against float64 and plain Python."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ignite_monitor.model._torch import DispatchMode
from ignite_monitor.model.norms import combine, norms, order_statistics, reduce_norm, summed_values, total_norm


def exact(tensors, norm_type):
    wide = [torch.view_as_real(t).double() if t.is_complex() and norm_type == 2 else t for t in tensors]
    elements = torch.cat([t.to_dense().abs().double().reshape(-1) for t in wide])
    largest = elements.max()
    if norm_type == math.inf or largest == 0:
        return largest
    return largest * ((elements / largest) ** norm_type).sum() ** (1 / norm_type)


def close(norm, expected, rtol=1e-6):
    assert norm.shape == ()
    assert norm.dtype == torch.float64
    torch.testing.assert_close(norm, expected, rtol=rtol, atol=0.0)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_norm_of_many_shapes(dtype, norm_type):
    generator = torch.Generator().manual_seed(0)
    shapes = [(), (0,), (7,), (3, 5), (2, 3, 4, 5), (70_000,), (300, 400)]
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    values += [torch.zeros(4), values[3].t(), torch.full((9,), 1e-4)]
    if dtype not in (torch.float16, torch.bfloat16):
        values += [torch.full((9,), 1e-25), torch.full((20_000,), 3e30)]
    tensors = [item.to(dtype) for item in values]
    close(total_norm(tensors, norm_type), exact(tensors, norm_type))
    expected = [exact([item], norm_type) if item.numel() else torch.zeros(()) for item in tensors]
    torch.testing.assert_close(norms(tensors, norm_type), torch.stack(expected).double(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.float16, 6e4),
        (torch.float16, 6e-8),
        (torch.bfloat16, 1e30),
        (torch.bfloat16, 1e-30),
        (torch.float32, 1e25),
        (torch.float32, 3e-25),
        (torch.float32, 1e-40),
        (torch.float64, 1e100),
        (torch.float64, 1e300),
        (torch.float64, 1e-200),
        (torch.float64, 5e-324),
    ],
)
def test_values_whose_powers_fit_no_float32(dtype, value, norm_type):
    tensors = [torch.full((100,), value, dtype=dtype), torch.full((90_000,), -value, dtype=dtype)]
    close(total_norm(tensors, norm_type), exact(tensors, norm_type))


@pytest.mark.parametrize(("numel", "rtol"), [(100, 1e-6), (16_384, 2e-5), (16_385, 1e-6), (1_000_000, 1e-6)])
@pytest.mark.parametrize("value", [0.1, 1.3, 6e4])
def test_equal_numbers_whose_roundings_add_up(numel, rtol, value):
    tensor = torch.full((numel,), value)
    close(total_norm([tensor]), exact([tensor], 2.0), rtol)


def test_float32_sums_of_many_terms_keep_their_digits():
    tensor = torch.randn(5_000_000, generator=torch.Generator().manual_seed(0))
    close(total_norm([tensor]), tensor.double().norm(), rtol=1e-7)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_non_finite_elements_are_seen(bad, norm_type):
    tensor = torch.ones(100_000)
    tensor[77_777] = bad
    norm = total_norm([torch.ones(3), tensor], norm_type)
    assert norm.isnan() if math.isnan(bad) else norm.item() == math.inf


def test_tensors_that_lie_in_another_order():
    tensor = torch.randn(8, 16, 30, 40, generator=torch.Generator().manual_seed(0))
    for element in (tensor.to(memory_format=torch.channels_last), tensor.transpose(0, 3), tensor[:, ::2], tensor[:1]):
        close(total_norm([element.expand(2, *element.shape)]), exact([element, element], 2.0))


def test_nothing_and_zeros():
    assert total_norm([]).item() == 0.0
    assert total_norm([torch.zeros(0)], math.inf).item() == 0.0
    assert total_norm([torch.zeros(10), torch.zeros(100_000)]).item() == 0.0


def test_no_graph_is_built_and_nothing_changes():
    tensor = torch.randn(10, requires_grad=True)
    before = tensor.detach().clone()
    assert not total_norm([tensor * 2]).requires_grad
    assert torch.equal(tensor, before)


@pytest.mark.parametrize("factor", [1.0, 1e300, 1e-300])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_combining_norms_of_parts(norm_type, factor):
    whole = torch.randn(30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parts = [torch.linalg.vector_norm(part, norm_type) * factor for part in whole.split([5, 20, 5])]
    expected = torch.linalg.vector_norm(whole, norm_type) * factor
    torch.testing.assert_close(combine(torch.stack(parts), norm_type), expected, rtol=1e-12, atol=0.0)


def test_the_norm_of_each_of_mixed_ones():
    sparse = torch.sparse_coo_tensor([[0, 0, 2]], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], (4, 2), check_invariants=True)
    tensors = [torch.ones(3).half(), sparse, torch.zeros(0), torch.ones(20_001, dtype=torch.float64), torch.ones(2)]
    expected = [math.sqrt(3), math.sqrt(16 + 36 + 25 + 36), 0.0, math.sqrt(20_001), math.sqrt(2)]
    torch.testing.assert_close(norms(tensors), torch.tensor(expected).double(), rtol=1e-6, atol=0.0)
    assert norms([torch.tensor([1.0, math.nan]), torch.tensor([math.inf])]).tolist()[1] == math.inf


class Uncoalesced(DispatchMode):
    """Fails where a sparse tensor is coalesced: on an accelerator the host would wait for the number of values."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "coalesce" not in function.name().replace("is_coalesced", "")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("size", [0, 1, 60])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_sparse_tensors_have_the_norms_of_dense_ones_and_are_not_coalesced(dims, size):
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(0, 4, (dims, size), generator=generator)
    values = torch.randn(size, 5, generator=generator)
    sparse = torch.sparse_coo_tensor(indices, values, (4,) * dims + (5,), check_invariants=True)
    dense = sparse.to_dense().double()
    for norm_type in (1.0, 2.0, math.inf):
        with Uncoalesced():
            measured = norms([sparse, torch.ones(1)], norm_type)[0], total_norm([sparse], norm_type)
        expected = float(torch.linalg.vector_norm(dense, norm_type))
        assert [*map(float, measured)] == pytest.approx([expected, expected], rel=1e-6)
    assert summed_values(sparse).shape == (size, 5)


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


@pytest.mark.parametrize("value", [math.inf, math.nan, 0.0])
def test_special_norms_over_ranks(monkeypatch, value):
    norm = reduce_norm(torch.tensor([value, 2.0], dtype=torch.float64), 2.0, lambda values, _: 4 * values)
    assert norm.tolist() == pytest.approx([value, 4.0], nan_ok=True)
