"""The tensors in a module's output and in a batch, and the loss in a train step's output."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.model.modes import has_local_data
from ignite_monitor.model.names import tags

Place = tuple[Any, ...]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tagged_tensors(output: Any, tag: str) -> list[tuple[str, Tensor]]:
    """The :func:`floating_tensors`, with different names: a module's tag, and the place as loggers keep it."""
    tensors = list(floating_tensors(output))
    places = tags(place for place, _ in tensors)
    return [(f"{tag}/{place}" if place else tag, tensor) for place, (_, tensor) in zip(places, tensors, strict=True)]


def floating_tensors(value: Any) -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors among those of :func:`tensors_in`."""
    return ((path, tensor) for path, tensor in tensors_in(value) if tensor.is_floating_point())


def tensors_in(value: Any) -> Iterator[tuple[str, Tensor]]:
    """The :func:`tensors_at` their places, which are joined by ``/``."""
    return (("/".join(map(str, place)), tensor) for place, tensor in tensors_at(value))


def tensors_at(value: Any, place: Place = (), around: frozenset[int] = frozenset()) -> Iterator[tuple[Place, Tensor]]:
    """The tensors in a tensor, tuple, list, mapping or dataclass, with their places: keys, outermost first."""
    members: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Tensor):
        yield place, value
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
            yield from tensors_at(member, (*place, key), around | {id(value)})


def bits_of(tensor: Tensor) -> Tensor:
    """The bits of a strided tensor's elements, as signed integers."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg().view(_INTEGERS[tensor.itemsize])


def count_items(batch: Any) -> int | None:
    """The length of the first tensor in a batch that has a dimension; None if there is none."""
    return next((len(tensor) for _, tensor in tensors_in(batch) if tensor.ndim), None)


def number_in(value: Any) -> Tensor | float | None:
    """Return a number as a float, a floating-point tensor of one element as a 0-dim copy; None for other values."""
    if isinstance(value, Tensor):
        is_number = has_local_data(value) and value.numel() == 1 and value.is_floating_point()
        return value.detach().clone().reshape(()) if is_number else None
    with contextlib.suppress(OverflowError):
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else None
    return None


def loss_in(output: Any) -> Tensor | float | None:
    """Return the output of a train step, or its item ``"loss"``, if that is one floating-point number."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return None if isinstance(loss, Integral) else number_in(loss)
