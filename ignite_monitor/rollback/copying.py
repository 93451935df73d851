"""Copies of nested states."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.model._torch import foreach_copy, part_of_rank


def clone(value: Any, on_host: bool = False) -> Any:
    """Copy dicts, lists and tuples with the tensors in them; anything else is copied deeply.

    With ``on_host`` the copies are in the memory of the host, pinned where CUDA copies to it.
    """
    return copy_into(None, value, on_host)


def copy_into(current: Any, value: Any, on_host: bool = False) -> Any:
    """Copy as :func:`clone` does, into the tensors of ``current`` where shape and dtype are the same."""
    pairs: list[tuple[Tensor, Tensor]] = []
    result = _copy(current, value, on_host, pairs)
    _assign(pairs)
    return result


def _copy(current: Any, value: Any, on_host: bool, pairs: list[tuple[Tensor, Tensor]]) -> Any:
    if isinstance(value, Tensor):
        target = current if isinstance(current, Tensor) and _fits(current, value) else _new(value, on_host)
        pairs.append((target, value))
        return target
    if type(value) in (dict, OrderedDict):
        known = current if isinstance(current, dict) else {}
        return type(value)((key, _copy(known.get(key), item, on_host, pairs)) for key, item in value.items())
    if type(value) in (list, tuple):
        olds = current if isinstance(current, (list, tuple)) and len(current) == len(value) else [None] * len(value)
        return type(value)(_copy(old, item, on_host, pairs) for old, item in zip(olds, value, strict=True))
    return copy.deepcopy(value)


def _new(tensor: Tensor, on_host: bool) -> Tensor:
    if not on_host or tensor.is_cpu:
        return torch.empty_like(tensor, requires_grad=False)
    pinned = tensor.device.type == "cuda" and type(tensor) in (Tensor, torch.nn.Parameter)
    return torch.empty_like(tensor, device="cpu", requires_grad=False, pin_memory=pinned)


def _fits(current: Tensor, value: Tensor) -> bool:
    return (
        (current.shape, current.dtype, current.layout) == (value.shape, value.dtype, value.layout)
        and current.layout == torch.strided
        and (part_of_rank(current) is current) == (part_of_rank(value) is value)
        and all(stride or size < 2 for stride, size in zip(current.stride(), current.shape, strict=True))
    )


@torch.no_grad()
def _assign(pairs: list[tuple[Tensor, Tensor]]) -> None:
    groups: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
    for pair in pairs:
        target, source = (part_of_rank(tensor).detach() for tensor in pair)
        if target.device != source.device:
            target.copy_(source)
            continue
        targets, sources = groups.setdefault(target.device, ([], []))
        targets.append(target)
        sources.append(source)
    for group in groups.values():
        foreach_copy(*group)
