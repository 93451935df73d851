"""The tensors in what a module returns, and in a batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ignite_monitor.model.names import tags


def tagged_tensors(output: Any) -> list[tuple[str, Tensor]]:
    """As :func:`floating_tensors`, with places as loggers keep them, each different."""
    if isinstance(output, Tensor):  # these two at less expense
        return [("", output)] if output.is_floating_point() else []
    if type(output) is tuple and all(each is None or type(each) is Tensor for each in output):
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


def floating_tensors(value: Any) -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors among those of :func:`tensors_in`."""
    return ((path, each) for path, each in tensors_in(value) if each.is_floating_point())


def tensors_in(value: Any, path: str = "", around: frozenset[int] = frozenset()) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a tensor, tuple, list, mapping or dataclass, nested or not, with its place.

    Places are positions, keys and names of fields, of namedtuples too, joined by ``/``; that of a single tensor is
    empty. What contains itself is entered once.
    """
    members: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Tensor):
        yield path, value
    elif id(value) in around:
        return
    elif isinstance(value, (tuple, list)):
        # Those of a namedtuple have names.
        members = zip(getattr(value, "_fields", range(len(value))), value, strict=False)
    elif isinstance(value, Mapping):
        members = value.items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        members = [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    for key, member in members:
        if member is not None:
            yield from tensors_in(member, f"{path}/{key}" if path else str(key), around | {id(value)})


def count_items(batch: Any) -> int | None:
    """The length of the first tensor in a batch that has a dimension; None if there is none."""
    return next((len(each) for _, each in tensors_in(batch) if each.ndim), None)
