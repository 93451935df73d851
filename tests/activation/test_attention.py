"""Attention entropy against a softmax that is written out, in float64."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ignite_monitor.activation import attention
from ignite_monitor.activation.attention import AttentionArguments


def attention_entropy(query, key, mask=None, **kwargs):
    return attention.attention_entropy(AttentionArguments(query, key, key, mask, **kwargs))


def exact(query, key, mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Sums and counts per head, of the whole attention matrix: -sum p log p; and the largest scores."""
    query, key = query.double(), key.double()
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    rows = torch.special.entr(scores.softmax(-1)).sum(-1)
    heads = rows.transpose(0, -2).reshape(rows.shape[-2], -1)
    largest = scores.amax(-1).transpose(0, -2).reshape(rows.shape[-2], -1).masked_fill(heads.isnan(), -math.inf)
    return torch.where(heads.isnan(), 0.0, heads).sum(1), (~heads.isnan()).sum(1).double(), largest.amax(1)


def draw(*shape, seed=0, dtype=torch.float32, spread=2.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype)


def check(query, key, mask=None, rtol=1e-5, **kwargs):
    result = attention_entropy(query, key, mask, **kwargs)
    total, rows, largest = exact(query, key, mask, **kwargs)
    assert result.total.dtype == result.rows.dtype == result.largest.dtype == torch.float64
    torch.testing.assert_close(result.largest, largest, rtol=1e-6, atol=1e-5)
    assert torch.equal(result.rows, rows)
    torch.testing.assert_close(result.total, total, rtol=rtol, atol=1e-5)
    return result


@pytest.fixture(params=[None, 300, 1], ids=["one block", "some blocks", "a row at a time"])
def block(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(attention, "_BLOCK", request.param)


MASKS = {
    "none": lambda L, S: None,
    "boolean": lambda L, S: draw(L, S) > 0,
    "boolean per batch": lambda L, S: draw(3, 1, 1, S) > 0,
    "boolean per head": lambda L, S: draw(3, 4, L, S) > -1,
    "boolean per head alone": lambda L, S: draw(4, 1, S) > -1,
    "additive": lambda L, S: draw(L, S),
    "additive per head": lambda L, S: draw(4, L, S).masked_fill(draw(4, L, S, seed=1) > 1, -math.inf),
    "additive with the lowest number": lambda L, S: torch.where(draw(3, 1, L, S) > 0, 0.0, torch.finfo().min),
}


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("L", "S"), [(9, 9), (5, 12), (12, 5), (1, 7)])
def test_masks(mask, L, S):
    check(draw(3, 4, L, 8), draw(3, 4, S, 8, seed=1), MASKS[mask](L, S))


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize(("L", "S"), [(9, 9), (5, 12), (12, 5), (1, 7), (40, 40)])
@pytest.mark.parametrize("scale", [None, 0.1, 3.0])
def test_causal_attention_starts_at_the_first_key(L, S, scale):
    query, key = draw(2, 3, L, 8), draw(2, 3, S, 8, seed=1)
    result = check(query, key, is_causal=True, scale=scale)
    again = attention_entropy(query, key, torch.ones(L, S, dtype=torch.bool).tril(), scale=scale)
    torch.testing.assert_close(result.total, again.total, rtol=1e-5, atol=1e-5)
    assert torch.equal(result.rows, again.rows)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("mask", [None, draw(2, 6, 7, 9) > 0, draw(7, 9), draw(2, 1, 7, 9)])
def test_grouped_queries(kv_heads, mask):
    query, key = draw(2, 6, 7, 8), draw(2, kv_heads, 9, 8, seed=1)
    check(query, key, mask, enable_gqa=True)


@pytest.mark.usefixtures("block")
def test_any_number_of_batch_dimensions():
    query, key = draw(2, 3, 5, 4, 7, 8), draw(2, 3, 5, 4, 9, 8, seed=1)
    for mask in (None, draw(7, 9) > 0, draw(3, 1, 4, 7, 9), draw(2, 1, 1, 1, 7, 9)):
        rows = [
            exact(q, k, m)
            for q, k, m in zip(
                query.flatten(0, 2),
                key.flatten(0, 2),
                torch.zeros(30, 1) if mask is None else mask.expand(2, 3, 5, 4, 7, 9).flatten(0, 2),
                strict=True,
            )
        ]
        result = attention_entropy(query, key, mask)
        torch.testing.assert_close(result.total, sum(total for total, *_ in rows), rtol=1e-5, atol=0.0)
        assert torch.equal(result.rows, sum(count for _, count, _ in rows))


def test_keys_and_heads_that_broadcast():
    query, key = draw(1, 4, 5, 8), draw(3, 1, 9, 8, seed=1)
    check(query, key)
    check(key, query)
    result = attention_entropy(query, key)
    assert result.rows.tolist() == [15.0] * 4


def test_without_a_head_dimension_there_is_one_head():
    query, key = draw(6, 5, 8), draw(6, 9, 8, seed=1)
    for mask in (None, draw(5, 9), draw(6, 5, 9) > 0):
        result = attention_entropy(query, key, mask)
        total, rows = exact(
            query[:, None], key[:, None], mask[:, None] if mask is not None and mask.ndim > 2 else mask
        )[:2]
        torch.testing.assert_close(result.total, total, rtol=1e-5, atol=0.0)
        assert torch.equal(result.rows, rows)
    single = attention_entropy(query[0], key[0], is_causal=True)
    torch.testing.assert_close(single.total, exact(query[None, :1], key[None, :1], is_causal=True)[0])


def test_three_dimensions_with_grouped_queries_are_heads():
    query, key = draw(6, 5, 8), draw(2, 9, 8, seed=1)
    result = attention_entropy(query, key, enable_gqa=True)
    torch.testing.assert_close(result.total, exact(query[None], key[None], enable_gqa=True)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype):
    query, key = draw(2, 3, 40, 16, dtype=dtype), draw(2, 3, 50, 16, seed=1, dtype=dtype)
    rtol = 1e-12 if dtype == torch.float64 else 1e-5
    check(query, key, rtol=rtol)
    check(query, key, draw(40, 50, dtype=dtype), rtol=rtol)
    check(query, key, is_causal=True, rtol=rtol)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_scores_that_overflow(dtype):
    query, key = draw(1, 2, 30, 16, dtype=dtype, spread=200.0), draw(1, 2, 30, 16, seed=1, dtype=dtype, spread=200.0)
    assert dtype == torch.bfloat16 or (query @ key.mT).isinf().any()
    check(query, key)


def test_extremes():
    even = attention_entropy(torch.zeros(1, 1, 3, 4), draw(1, 1, 1000, 4))
    assert even.total.item() == pytest.approx(3 * math.log(1000), rel=1e-6)
    one = attention_entropy(draw(1, 1, 3, 4, spread=1e4), draw(1, 1, 10, 4, spread=1e4))
    assert one.total.item() == pytest.approx(0.0, abs=1e-12)
    alone = attention_entropy(draw(1, 1, 3, 4), draw(1, 1, 1, 4))
    assert alone.total.item() == 0.0


@pytest.mark.usefixtures("block")
def test_large_common_scores_do_not_cancel():
    check(draw(1, 1, 6, 4), draw(1, 1, 20, 4), torch.full((6, 20), -1e4), rtol=1e-3)
    lowest = attention_entropy(draw(1, 1, 6, 4), draw(1, 1, 20, 4), torch.full((6, 20), torch.finfo().min))
    assert lowest.total.item() == pytest.approx(6 * math.log(20))


@pytest.mark.usefixtures("block")
def test_fully_masked_rows_are_skipped():
    query, key = draw(2, 3, 6, 8), draw(2, 3, 7, 8, seed=1)
    mask = torch.ones(2, 3, 6, 7, dtype=torch.bool)
    mask[0, 1, 2:4], mask[1, 2] = False, False
    for item in (mask, torch.zeros(2, 3, 6, 7).masked_fill(~mask, -math.inf)):
        result = check(query, key, item)
        assert result.rows.tolist() == [12, 10, 6]
    nothing = attention_entropy(query, key, torch.zeros(7, dtype=torch.bool))
    assert nothing.total.tolist() == nothing.rows.tolist() == [0, 0, 0]


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_not_finite_are_skipped(bad):
    query, key = draw(2, 3, 6, 8), draw(2, 3, 7, 8, seed=1)
    spoilt = query.clone()
    spoilt[0, 1, 4, 2] = bad
    rest = torch.ones(2, 3, 6, 1, dtype=torch.bool)
    rest[0, 1, 4] = False
    result = attention_entropy(spoilt, key)
    total, rows = exact(query, key, rest)[:2]
    assert torch.equal(result.rows, rows)
    torch.testing.assert_close(result.total, total, rtol=1e-5, atol=0.0)
    key[1, 0, 5] = math.nan
    assert attention_entropy(query, key).rows.tolist() == [6, 12, 12]
    assert attention_entropy(query, key, is_causal=True).rows.tolist() == [11, 12, 12]
    assert attention_entropy(query, key, torch.arange(7) != 5).rows.tolist() == [12, 12, 12]


@pytest.mark.parametrize("shape", [(0, 3, 4, 8), (2, 3, 0, 8), (2, 3, 4, 0)])
def test_nothing_to_attend(shape):
    query = torch.zeros(shape)
    assert attention_entropy(query, query).rows.tolist() == [0, 0, 0]
    assert attention_entropy(torch.ones(2, 3, 4, 8), torch.ones(2, 3, 0, 8)).rows.tolist() == [0, 0, 0]


def peak(folder, function):
    """The largest number of bytes that were allocated at a time while a function ran, beyond those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        torch.ones(1000)
        function()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = [
        item for item in json.loads((folder / "trace.json").read_text())["traceEvents"] if item["name"] == "[memory]"
    ]
    events.sort(key=lambda item: item["ts"])
    current = highest = 0
    for item in events:
        current += item["args"]["Bytes"]
        highest = max(highest, current)
    return highest


@pytest.mark.parametrize("how", ["plain", "causal", "additive grouped"])
def test_memory(how, tmp_path):
    """For 2,048 tokens and 8 heads the attention matrices have 8 × 2048 × 2048 elements."""
    dtype = torch.float32 if how == "plain" else torch.bfloat16
    whole = 8 * 2048 * 2048 * dtype.itemsize
    query = draw(1, 2048, 8, 64, dtype=dtype).transpose(1, 2)
    key = query[:, :2] if "grouped" in how else query
    mask = torch.zeros(2048, 2048) if "additive" in how else None
    kwargs = {"is_causal": how == "causal", "enable_gqa": "grouped" in how}
    extra = peak(tmp_path, lambda: attention_entropy(query, key, mask, **kwargs))
    assert 2048 * 4 < extra < whole / 8
    if how == "plain":
        assert peak(tmp_path, lambda: (query @ key.mT).softmax(-1)) >= 2 * whole  # what this measures is there
