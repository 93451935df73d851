"""The tensors in what a module returns, and in a batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from ignite_monitor.model.names import tags


def tagged_tensors(output: Any) -> list[tuple[str, Tensor]]:
    """As :func:`floating_tensors`, with places as loggers keep them, each different."""
    if type(output) is tuple and all(each is None or type(each) is Tensor for each in output):  # at less expense
        members = enumerate(output)
        return [(str(place), each) for place, each in members if each is not None and each.is_floating_point()]
    found = list(floating_tensors(output))
    if len(found) == 1 and not found[0][0]:
        return found
    places = _tags_of(tuple(place for place, _ in found))
    return [(place, tensor) for place, (_, tensor) in zip(places, found, strict=True)]


@functools.lru_cache(1024)
def _tags_of(places: tuple[str, ...]) -> list[str]:
    return tags(places)


def floating_tensors(output: Any, path: str = "", around: frozenset[int] = frozenset()) -> Iterator[tuple[str, Tensor]]:
    """Every floating-point tensor in a tensor, tuple, list, mapping or dataclass, nested or not, with its place.

    Places are positions, keys and names of fields, of namedtuples too, joined by ``/``; that of a single tensor is
    empty. What contains itself is entered once.
    """
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield path, output
        return
    if id(output) in around:
        return
    if isinstance(output, (tuple, list)):
        # Those of a namedtuple have names.
        members: list[tuple[Any, Any]] = list(zip(getattr(output, "_fields", range(len(output))), output, strict=False))
    elif isinstance(output, Mapping):
        members = list(output.items())
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        members = [(field.name, getattr(output, field.name, None)) for field in dataclasses.fields(output)]
    else:
        return
    for key, member in members:
        if member is not None:
            yield from floating_tensors(member, f"{path}/{key}" if path else str(key), around | {id(output)})


def count_items(batch: Any) -> int | None:
    """The length of the first tensor in a batch that has a dimension; None if there is none."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else None
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    return next((count for count in map(count_items, parts) if count is not None), None)
