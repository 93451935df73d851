"""The tensors in what a module returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def floating_tensors(output: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every floating-point tensor in a tensor, tuple, list, mapping or dataclass, nested or not, with its place.

    Places are positions, keys and names of fields, joined by ``/``; that of a single tensor is empty.

    Args:
        output: what a module has returned.
        path: where it lies itself.
    """
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield path, output
        return
    if isinstance(output, Mapping):
        members: list[tuple[Any, Any]] = list(output.items())
    elif isinstance(output, (tuple, list)):
        members = list(enumerate(output))
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        members = [(field.name, getattr(output, field.name, None)) for field in dataclasses.fields(output)]
    else:
        return
    for key, member in members:
        yield from floating_tensors(member, f"{path}/{key}" if path else str(key))
