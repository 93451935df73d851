"""Copies of nested states whose memory is used again."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.model._torch import foreach_copy, part_of_rank


def refill(kept: Any, given: Any, on_host: bool | None = None) -> Any:
    """The same as ``given``, with memory of its own: that of tensors in ``kept`` wherever they fit.

    Dicts, lists and tuples are copied with the tensors in them, anything else deeply. The copies lie in the host's
    memory (pinned where CUDA copies to it) with ``on_host=True``, where the given ones are with False, and with None
    where those in ``kept`` are.
    """
    pairs: list[tuple[Tensor, Tensor]] = []
    refilled = _refill(kept, given, on_host, pairs)
    _copy(pairs)
    return refilled


def clone(given: Any) -> Any:
    """A deep copy, every tensor where it is."""
    return refill(None, given)


def _refill(kept: Any, given: Any, on_host: bool | None, pairs: list[tuple[Tensor, Tensor]]) -> Any:
    if isinstance(given, Tensor):
        target = kept if isinstance(kept, Tensor) and _fits(kept, given, on_host) else _new(given, on_host)
        pairs.append((target, given))
        return target
    if type(given) in (dict, OrderedDict):
        known = kept if isinstance(kept, dict) else {}
        return type(given)((key, _refill(known.get(key), value, on_host, pairs)) for key, value in given.items())
    if type(given) in (list, tuple):
        before = kept if isinstance(kept, (list, tuple)) else ()
        places = [*before, *[None] * (len(given) - len(before))]
        return type(given)(_refill(old, value, on_host, pairs) for old, value in zip(places, given, strict=False))
    return copy.deepcopy(given)


def _new(tensor: Tensor, on_host: bool | None) -> Tensor:
    if not on_host or tensor.is_cpu:
        return torch.empty_like(tensor, requires_grad=False)
    pinned = tensor.device.type == "cuda" and type(tensor) in (Tensor, torch.nn.Parameter)
    return torch.empty_like(tensor, device="cpu", requires_grad=False, pin_memory=pinned)


def _fits(kept: Tensor, given: Tensor, on_host: bool | None) -> bool:
    return (
        (on_host is None or kept.is_cpu == (on_host or given.is_cpu))
        and kept.shape == given.shape
        and kept.dtype == given.dtype
        and kept.layout == given.layout == torch.strided
        and (part_of_rank(kept) is kept) == (part_of_rank(given) is given)
        and all(stride or size < 2 for stride, size in zip(kept.stride(), kept.shape, strict=True))
    )


@torch.no_grad()
def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    groups: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
    for pair in pairs:
        target, source = (part_of_rank(each).detach() for each in pair)
        if target.device != source.device:
            target.copy_(source)
            continue
        targets, sources = groups.setdefault(target.device, ([], []))
        targets.append(target)
        sources.append(source)
    for group in groups.values():
        foreach_copy(*group)
