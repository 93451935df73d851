"""Copies of nested states whose memory is used again."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.model._torch import foreach_copy, local_part, part_of_rank


def refill(kept: Any, given: Any, new: Callable[[Tensor], Tensor]) -> Any:
    """The same as ``given``, with memory of its own: that of tensors in ``kept`` wherever they fit.

    Args:
        kept: what may be written over, nested like ``given`` as far as it goes; None for nothing.
        given: dicts, lists and tuples of tensors and of anything else, which is copied deeply.
        new: an empty tensor for one that nothing fits.
    """
    pairs: list[tuple[Tensor, Tensor]] = []
    refilled = _refill(kept, given, new, pairs)
    _copy(pairs)
    return refilled


def clone(given: Any) -> Any:
    """A deep copy, every tensor where it is."""
    return refill(None, given, torch.empty_like)


def _refill(kept: Any, given: Any, new: Callable[[Tensor], Tensor], pairs: list[tuple[Tensor, Tensor]]) -> Any:
    if isinstance(given, Tensor):
        target = kept if isinstance(kept, Tensor) and _fits(kept, given) else new(given)
        pairs.append((target, given))
        return target
    if type(given) in (dict, OrderedDict):
        known = kept if isinstance(kept, dict) else {}
        return type(given)((key, _refill(known.get(key), value, new, pairs)) for key, value in given.items())
    if type(given) in (list, tuple):
        before = kept if isinstance(kept, (list, tuple)) else ()
        places = [*before, *[None] * (len(given) - len(before))]
        return type(given)(_refill(old, value, new, pairs) for old, value in zip(places, given, strict=False))
    return copy.deepcopy(given)


def _fits(kept: Tensor, given: Tensor) -> bool:
    return (
        kept.shape == given.shape
        and kept.dtype == given.dtype
        and kept.layout == given.layout == torch.strided
        and (local_part(kept) is None) == (local_part(given) is None)
        and all(stride or size < 2 for stride, size in zip(kept.stride(), kept.shape, strict=True))
    )


@torch.no_grad()
def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in pairs:
        target, source = part_of_rank(target), part_of_rank(source)
        targets, sources = groups.setdefault((target.device, source.device), ([], []))
        targets.append(target)
        sources.append(source.detach())
    for targets, sources in groups.values():
        foreach_copy([each.detach() for each in targets], sources)
