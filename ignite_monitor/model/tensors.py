"""The tensors in a module's output, and in a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ignite_monitor.model.names import tags


def tagged_tensors(output: Any) -> list[tuple[str, Tensor]]:
    """The :func:`floating_tensors`, with places as loggers keep them, each different."""
    tensors = list(floating_tensors(output))
    if len(tensors) == 1 and not tensors[0][0]:
        return tensors
    places = tags(place for place, _ in tensors)
    return [(place, tensor) for place, (_, tensor) in zip(places, tensors, strict=True)]


def floating_tensors(value: Any) -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors among those of :func:`tensors_in`."""
    return ((path, tensor) for path, tensor in tensors_in(value) if tensor.is_floating_point())


def tensors_in(value: Any, path: str = "", around: frozenset[int] = frozenset()) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a tensor, tuple, list, mapping or dataclass, nested or not, with their places.

    Places are positions, keys and names of fields, joined by ``/``; that of a single tensor is empty.
    """
    members: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Tensor):
        yield path, value
    elif id(value) in around:
        return
    elif isinstance(value, (tuple, list)):
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
    return next((len(tensor) for _, tensor in tensors_in(batch) if tensor.ndim), None)
