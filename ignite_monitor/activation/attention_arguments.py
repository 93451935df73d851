"""What attention is computed from, read from the arguments of the functions that compute it."""

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
    """What :func:`torch.nn.functional.scaled_dot_product_attention` is given, or would be, dropout apart.

    Attributes:
        query: of shape (batch ..., heads, L, E).
        key: of shape (batch ..., heads, S, E).
        value: of shape (batch ..., heads, S, any).
        mask: boolean, True where a key takes part, or floating-point and added to the scores.
        is_causal: whether a query sees the keys up to its own position alone.
        scale: what products are multiplied by, None for ``E ** -0.5``.
        enable_gqa: whether each head of key and value serves several heads of the query.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float | None
    enable_gqa: bool


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
    """Those of ``scaled_dot_product_attention``, as they are."""
    return AttentionArguments(query, key, value, attn_mask, is_causal, scale, enable_gqa)


def read_multi_head(*args: Any, **kwargs: Any) -> AttentionArguments:
    """Those that ``multi_head_attention_forward`` computes on its way, per head."""
    bound = _MULTI_HEAD.bind(*args, **kwargs)
    bound.apply_defaults()
    call = SimpleNamespace(**bound.arguments)
    if call.query.ndim == 2:
        call.query, call.key, call.value = (each.unsqueeze(1) for each in (call.query, call.key, call.value))
        call.key_padding_mask = None if call.key_padding_mask is None else call.key_padding_mask.unsqueeze(0)
    weights = (call.q_proj_weight, call.k_proj_weight, call.v_proj_weight)
    if not call.use_separate_proj_weight:
        weights = call.in_proj_weight.chunk(3)
    biases = (None,) * 3 if call.in_proj_bias is None else call.in_proj_bias.chunk(3)
    query = _split_heads(F.linear(call.query, weights[0], biases[0]), call.num_heads)
    key, value = (
        _project(call, inputs, weight, bias, row, static)
        for inputs, weight, bias, row, static in (
            (call.key, weights[1], biases[1], call.bias_k, call.static_k),
            (call.value, weights[2], biases[2], call.bias_v, call.static_v),
        )
    )
    # Here alone torch goes by the hint; elsewhere the mask is applied, which the hint only describes.
    is_causal = call.is_causal and call.key_padding_mask is None and not call.need_weights
    mask = None if is_causal else _merge_masks(call, key.shape[-2])
    return AttentionArguments(query, key, value, mask, is_causal, None, False)


READERS: dict[Callable[..., Any], Callable[..., AttentionArguments]] = {
    F.scaled_dot_product_attention: read_scaled_dot_product,
    F.multi_head_attention_forward: read_multi_head,
}


def _project(
    call: SimpleNamespace,
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    row: Tensor | None,
    static: Tensor | None,
) -> Tensor:
    """Key or value per head, with what is appended to the sequence."""
    if static is not None:
        heads: Tensor = static.unflatten(0, (-1, call.num_heads))
    else:
        sequence = F.linear(inputs, weight, bias)
        if row is not None:
            sequence = torch.cat([sequence, row.expand(1, *sequence.shape[1:])])
        heads = _split_heads(sequence, call.num_heads)
    if call.add_zero_attn:
        heads = F.pad(heads, (0, 0, 0, 1))
    return heads


def _split_heads(sequence: Tensor, heads: int) -> Tensor:
    """From (sequence, batch, heads * E) to (batch, heads, sequence, E)."""
    length, batch, width = sequence.shape
    return sequence.reshape(length, batch, heads, width // heads).permute(1, 2, 0, 3)


def _merge_masks(call: SimpleNamespace, keys: int) -> Tensor | None:
    """The two masks, in which True is left out, as one in which True takes part, or one to add."""
    masks: list[Tensor] = []
    if call.attn_mask is not None:
        per_head = call.attn_mask.ndim == 3
        masks.append(call.attn_mask.unflatten(0, (-1, call.num_heads)) if per_head else call.attn_mask[None, None])
    if call.key_padding_mask is not None:
        masks.append(call.key_padding_mask[:, None, None])
    masks = [F.pad(mask, (0, keys - mask.shape[-1])) for mask in masks]  # what was appended to the keys takes part
    if not masks:
        return None
    if all(mask.dtype == torch.bool for mask in masks):
        return ~functools.reduce(torch.logical_or, masks)
    return functools.reduce(torch.add, map(_as_additive, masks))


def _as_additive(mask: Tensor) -> Tensor:
    if mask.is_floating_point():
        return mask
    return torch.where(mask, -torch.inf, torch.zeros((), device=mask.device))
