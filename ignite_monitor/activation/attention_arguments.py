"""Queries, keys, values and masks of calls to the functions that compute attention."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)


class AttentionArguments(NamedTuple):
    """Arguments of :func:`torch.nn.functional.scaled_dot_product_attention`, without dropout.

    Attributes:
        query: of shape (batch ..., heads, L, E).
        key: of shape (batch ..., heads, S, E).
        value: of shape (batch ..., heads, S, any).
        mask: boolean, True where a key takes part, or floating-point and added to the scores.
        is_causal: whether query i attends to the keys 0 to i only.
        scale: the factor of the products, None for ``E ** -0.5``.
        enable_gqa: whether each head of key and value serves several heads of the query.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float | None
    enable_gqa: bool


class NotReadableError(Exception):
    """Attention with arguments that are not supported."""


def read_scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionArguments:
    """Arguments of ``scaled_dot_product_attention``, as they are."""
    return AttentionArguments(query, key, value, attn_mask, is_causal, scale, enable_gqa)


def read_multi_head(*args: Any, **kwargs: Any) -> AttentionArguments:
    """Arguments per head that ``multi_head_attention_forward`` computes: its inputs are projected once more.

    Raises:
        NotReadableError: if keys are given or added by bias_k, bias_v, static_k, static_v or add_zero_attn, or there
            is no batch dimension.
    """
    bound = _MULTI_HEAD.bind(*args, **kwargs)
    bound.apply_defaults()
    call = SimpleNamespace(**bound.arguments)
    added = (call.bias_k, call.bias_v, call.static_k, call.static_v)
    if call.add_zero_attn or any(each is not None for each in added) or call.query.ndim == 2:
        raise NotReadableError(
            "attention with bias_k, bias_v, static_k, static_v or add_zero_attn, or without a batch, is not measured"
        )
    weights = (call.q_proj_weight, call.k_proj_weight, call.v_proj_weight)
    if not call.use_separate_proj_weight:
        weights = call.in_proj_weight.chunk(3)
    biases = (None,) * 3 if call.in_proj_bias is None else call.in_proj_bias.chunk(3)
    query, key, value = (
        _split_heads(F.linear(inputs, weight, bias), call.num_heads)
        for inputs, weight, bias in zip((call.query, call.key, call.value), weights, biases, strict=True)
    )
    # With both torch uses the hint is_causal in place of the mask; otherwise the hint only describes the mask.
    is_causal = call.is_causal and call.key_padding_mask is None and not call.need_weights
    return AttentionArguments(query, key, value, None if is_causal else _merged_mask(call), is_causal, None, False)


READERS: dict[Callable[..., Any], Callable[..., AttentionArguments]] = {
    F.scaled_dot_product_attention: read_scaled_dot_product,
    F.multi_head_attention_forward: read_multi_head,
}


def _split_heads(sequence: Tensor, heads: int) -> Tensor:
    """From (sequence, batch, heads * E) to (batch, heads, sequence, E)."""
    length, batch, width = sequence.shape
    return sequence.reshape(length, batch, heads, width // heads).permute(1, 2, 0, 3)


def _merged_mask(call: SimpleNamespace) -> Tensor | None:
    """The two masks, in which True excludes a key, as one in which True includes it, or one to add."""
    masks: list[Tensor] = []
    if call.attn_mask is not None:
        per_head = call.attn_mask.ndim == 3
        masks.append(call.attn_mask.unflatten(0, (-1, call.num_heads)) if per_head else call.attn_mask[None, None])
    if call.key_padding_mask is not None:
        masks.append(call.key_padding_mask[:, None, None])
    if not masks:
        return None
    if all(mask.dtype == torch.bool for mask in masks):
        return ~functools.reduce(torch.logical_or, masks)
    return functools.reduce(torch.add, map(_as_additive, masks))


def _as_additive(mask: Tensor) -> Tensor:
    if mask.is_floating_point():
        return mask
    return torch.where(mask, -torch.inf, torch.zeros((), device=mask.device))
