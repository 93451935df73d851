"""How widely attention spreads, and from how large scores: by rows, without the attention matrix."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from ignite_monitor.model.devices import wide_dtype

# Scores computed at a time. On the CPU what fits its cache is twice as fast as what does not. Elsewhere fewer and
# larger blocks are faster, as long as they are a small part of all scores.
_BLOCK = 2**17
_LARGEST_BLOCK = 2**24
_PARTS = 64

# Takes the place of -inf, which times 0 would be NaN. A probability of exp(-87), 1.6e-38, adds nothing to the others;
# smaller ones would no longer be normal numbers in float32, of which exp() is several times slower.
_LOWEST = -87.0


class HeadEntropy(NamedTuple):
    """Attention entropy per head, as sums, so that those of several calls add up to the mean over all of their rows.

    Attributes:
        total: the sum of the rows' entropies in nats, of shape (heads,).
        rows: how many rows that is, of shape (heads,) and the same dtype; 0 where a head had none.
        largest: the largest score in these rows, what is added to products by a mask included; -inf where a head had
            none.
    """

    total: Tensor
    rows: Tensor
    largest: Tensor


def attention_entropy(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> HeadEntropy:
    r"""The entropy of each query's attention, summed over queries and batch, and the largest score, per head.

    With the scores :math:`s_j = c\, q \cdot k_j + m_j` of a query and :math:`p = \mathrm{softmax}(s)`:

    .. math::
        H = -\sum_j p_j \log p_j = \log \sum_j e^{s_j} - \sum_j p_j s_j,

    from 0, all attention on one key, to :math:`\log S`, spread evenly over S keys. The arguments mean what they do in
    :func:`torch.nn.functional.scaled_dot_product_attention`; dropout plays no part.

    Scores are computed in float32 (float64 where an input is), some rows at a time. A row that is masked as a whole,
    or of which a score is NaN or infinite, is left out. Nothing waits for a device, and no random number is drawn.

    Args:
        query: of shape (batch ..., heads, L, E). With three dimensions, (batch, L, E), or two there is one head; with
            ``enable_gqa`` three are (heads, L, E).
        key: of shape (batch ..., heads, S, E); batch and heads broadcast with those of ``query``.
        mask: boolean, True where a key takes part, or floating-point and added to the scores; broadcast to
            (batch ..., heads, L, S).
        is_causal: whether query i sees the keys 0 to i alone, however many of either there are.
        scale: c, None for :math:`1 / \sqrt{E}`.
        enable_gqa: whether each head of ``key`` serves as many heads of ``query`` in a row as there are to one.

    Returns:
        Sums and counts of rows, and scores, in float64 (float32 on devices without it).
    """
    with torch.no_grad():
        query, key, mask = _with_heads(query, key, mask, enable_gqa)
        if scale is None:
            scale = 1 / math.sqrt(max(query.shape[-1], 1))
        return HeadEntropy(*_sum_batches(query, key, mask, is_causal, scale).flatten(1))


def _with_heads(
    query: Tensor, key: Tensor, mask: Tensor | None, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Views of shape (batch ..., key heads, queries' heads to each, L or S or both, E), mask with 1 to broadcast."""
    ndim = max(query.ndim, key.ndim)
    query, key = (each[(None,) * (ndim - each.ndim)] for each in (query, key))
    if mask is not None:
        mask = mask[(None,) * (ndim - mask.ndim)]
    if ndim < 4:
        dim = 0 if enable_gqa else -3
        for _ in range(4 - ndim):
            query, key = query.unsqueeze(dim), key.unsqueeze(dim)
            mask = mask if mask is None else mask.unsqueeze(dim)
    shared = query.shape[-3] // key.shape[-3] if enable_gqa else 1
    query, key = query.unflatten(-3, (-1, shared)), key.unsqueeze(-3)
    batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
    if mask is not None:
        mask = mask.unsqueeze(-3) if mask.shape[-3] == 1 else mask.unflatten(-3, (-1, shared))
        mask = mask.expand(*batch, query.shape[-2], key.shape[-2])
    return query.expand(*batch, *query.shape[-2:]), key.expand(*batch, *key.shape[-2:]), mask


def _sum_batches(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """Sums and counts of rows and the largest score, stacked, of shape (3, key heads, queries' heads to each)."""
    *batch, key_heads, shared, _, _ = query.shape
    sums = torch.zeros(3, key_heads, shared, dtype=wide_dtype(query.device), device=query.device)
    sums[2] = -math.inf
    if len(batch) > 1:
        for index in range(batch[0]):
            more = _sum_batches(query[index], key[index], None if mask is None else mask[index], is_causal, scale)
            sums = torch.stack([*(sums[:2] + more[:2]), torch.maximum(sums[2], more[2])])
        return sums
    if query.numel() == 0 or key.numel() == 0:
        return sums
    for part in _parts(batch[0], key_heads, shared, query.shape[-2] * key.shape[-2], query.device):
        rows, scores = _by_row(query[part], key[part], None if mask is None else mask[part], is_causal, scale)
        known = rows.isfinite()
        rows = torch.where(known, rows, 0.0)
        largest = torch.where(known, scores, -math.inf).amax((0, -1)).to(sums.dtype)
        sums[2][part[1:]] = torch.maximum(sums[2][part[1:]], largest)
        sums[0][part[1:]] += rows.sum((0, -1), dtype=sums.dtype)
        sums[1][part[1:]] += known.sum((0, -1), dtype=sums.dtype)
    return sums


def _parts(
    batch: int, key_heads: int, shared: int, scores: int, device: torch.device
) -> Iterator[tuple[slice, slice, slice]]:
    """Slices of as many heads as there is room for, at least one, in blocks of (batch, key heads, shared)."""
    room = max(_block_size(batch * key_heads * shared * scores, device) // scores, 1)
    steps = []
    for size in (shared, key_heads, batch):
        steps.append(min(size, room))
        room = max(room // size, 1)
    for first in product(range(0, batch, steps[2]), range(0, key_heads, steps[1]), range(0, shared, steps[0])):
        sizes = zip(first, reversed(steps), strict=True)
        start, middle, end = (slice(at, at + step) for at, step in sizes)
        yield start, middle, end


def _block_size(scores: int, device: torch.device) -> int:
    return _BLOCK if device.type == "cpu" else min(max(scores // _PARTS, _BLOCK), _LARGEST_BLOCK)


def _by_row(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The entropy of each row, not finite where it has none, and its largest score, of shape (batch, …, shared, L)."""
    *heads, L, E = query.shape
    S = key.shape[-2]
    dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), torch.float32)
    query = query.to(dtype).reshape(-1, L, E)
    key = key.to(dtype).reshape(-1, S, E).mT
    entropies, largest = query.new_empty(2, len(query), L)
    step = min(max(_block_size(len(query) * L * S, query.device) // (len(query) * S), 1), L)
    room = query.new_empty(2, len(query) * step * S)
    future = torch.ones(step, step, dtype=torch.bool, device=query.device).triu(1) if is_causal else None
    for start in range(0, L, step):
        stop = min(start + step, L)
        seen = min(stop, S) if is_causal else S
        shape = (len(query), stop - start, seen)
        scores, powers = (each[: math.prod(shape)].view(shape) for each in room)
        torch.baddbmm(scores, query[:, start:stop], key[..., :seen], beta=0, alpha=scale, out=scores)
        if mask is not None:
            _apply_mask(scores.view(*heads, *shape[1:]), mask[..., start:stop, :seen])
        if future is not None and start < seen:
            scores[..., start:].masked_fill_(future[: stop - start, : seen - start], -math.inf)
        largest[:, start:stop] = top = scores.amax(-1)
        entropies[:, start:stop] = _entropy(scores, top, powers)
    return entropies.view(*heads, L), largest.view(*heads, L)


def _apply_mask(scores: Tensor, mask: Tensor) -> None:
    if mask.dtype == torch.bool:
        scores.masked_fill_(~mask, -math.inf)
    else:
        scores += mask


def _entropy(scores: Tensor, largest: Tensor, powers: Tensor) -> Tensor:
    """The entropy of softmax(scores) over the last dimension; uses scores and powers up.

    Shifting the scores of a row changes neither p nor H. With the largest at 0 nothing overflows, and
    log-sum-exp and mean score are near enough to each other not to cancel.
    """
    scores -= largest.unsqueeze(-1)
    scores.clamp_(min=_LOWEST)
    torch.exp(scores, out=powers)
    total = powers.sum(-1)
    return total.log() - powers.mul_(scores).sum(-1) / total
