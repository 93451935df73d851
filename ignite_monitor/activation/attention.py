"""Attention entropy and logit maxima, computed without the whole attention matrix."""

from __future__ import annotations

import math
from functools import reduce
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from ignite_monitor.model.devices import wide_dtype

# Scores computed at a time: what fits the cache of a CPU, and keeps an accelerator busy.
_BLOCK = 2**17
_BLOCK_ON_ACCELERATOR = 2**24


class AttentionArguments(NamedTuple):
    """Arguments of :func:`torch.nn.functional.scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor | None  # not used
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


class HeadEntropy(NamedTuple):
    """Attention entropy per head, as sums that add up over calls: tensors of shape (heads,) and one dtype."""

    total: Tensor  # sum of the rows' entropies in nats
    rows: Tensor  # number of rows
    largest: Tensor  # largest score in these rows, with the mask added; -inf for a head without rows


def attention_entropy(call: AttentionArguments) -> HeadEntropy:
    r"""Compute each query's attention entropy, summed over queries and batch, and the largest score, per head.

    With the scores :math:`s_j = c\, q \cdot k_j + m_j` of a query and :math:`p = \mathrm{softmax}(s)`, the entropy is
    :math:`-\sum_j p_j \log p_j`. Scores are computed in float32 (float64 where an input is), some rows at a time. Rows
    that are masked as a whole, and rows with a score that is NaN or inf, are excluded. Dropout is ignored.

    Args:
        call: with queries of shape (batch ..., heads, L, E) and keys of shape (batch ..., heads, S, E). With three
            dimensions, (batch, L, E), or two there is one head; with ``enable_gqa`` three are (heads, L, E).
    """
    query, key, mask = call.query, call.key, call.attn_mask
    with torch.no_grad():
        dims = max(query.ndim, key.ndim)
        query, key = (_with_heads(tensor, dims, call.enable_gqa) for tensor in (query, key))
        if call.enable_gqa:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
        if mask is not None:
            mask = _with_heads(mask, dims, call.enable_gqa).expand(*batch, query.shape[-2], key.shape[-2])
            mask = mask.flatten(0, -4)
        query, key = (tensor.expand(*batch, *tensor.shape[-2:]).flatten(0, -4) for tensor in (query, key))
        scale = 1 / math.sqrt(max(query.shape[-1], 1)) if call.scale is None else call.scale
        return _sums(query, key, mask, call.is_causal, scale)


def _with_heads(tensor: Tensor, dims: int, enable_gqa: bool) -> Tensor:
    """A view with a dimension of heads, and as many dimensions as the other tensors."""
    tensor = tensor[(None,) * (dims - tensor.ndim)]
    for _ in range(4 - dims):
        tensor = tensor.unsqueeze(0 if enable_gqa else -3)
    return tensor


def _sums(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> HeadEntropy:
    batch, heads, length, _ = query.shape
    if query.numel() == 0 or key.numel() == 0:
        zeros = torch.zeros(heads, dtype=wide_dtype(query.device), device=query.device)
        return HeadEntropy(zeros, zeros, zeros - math.inf)
    capacity = max((_BLOCK if query.device.type == "cpu" else _BLOCK_ON_ACCELERATOR) // (heads * key.shape[-2]), 1)
    samples, step = max(capacity // length, 1), min(capacity, length)
    parts = []
    for first, start in product(range(0, batch, samples), range(0, length, step)):
        block = slice(first, first + samples), slice(None), slice(start, start + step)
        block_mask = None if mask is None else mask[block]
        parts.append(_block(query[block], key[block[0]], block_mask, start if is_causal else None, scale))
    total, rows, largest = zip(*parts, strict=True)
    return HeadEntropy(reduce(torch.add, total), reduce(torch.add, rows), reduce(torch.maximum, largest))


def _block(query: Tensor, key: Tensor, mask: Tensor | None, first: int | None, scale: float) -> HeadEntropy:
    """Sums of some rows; with causal attention the first of them is given."""
    dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), torch.float32)
    scores = (query.to(dtype) * scale) @ key.to(dtype).mT
    if mask is not None:
        scores = scores.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if first is not None:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(first + 1)
        scores = scores.masked_fill_(future, -math.inf)
    largest = scores.amax(-1)
    entropies = torch.special.entr(scores.softmax(-1)).sum(-1)
    known = entropies.isfinite()
    wide = wide_dtype(scores.device)
    return HeadEntropy(
        torch.where(known, entropies, 0.0).sum((0, -1), dtype=wide),
        known.sum((0, -1), dtype=wide),
        torch.where(known, largest, -math.inf).amax((0, -1)).to(wide),
    )
