"""A batch in what can be loaded without trusting whoever has written it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ignite_monitor.model._torch import version
from ignite_monitor.model.modes import is_plain


class CannotBeSavedError(Exception):
    """Why not; its message completes "it is left out: …"."""


class KeptBatch:
    """A batch as it was given to a train step, of which nothing is copied before it is saved."""

    def __init__(self, batch: Any) -> None:
        self._tensors: list[tuple[Tensor, int]] = []
        self._batch = self._keep(batch)

    def save(self, largest: int) -> Any:
        """As :func:`plain`; CannotBeSavedError also if it has more than so many bytes, or is no more what it was."""
        if any(version(tensor) != then for tensor, then in self._tensors):
            raise CannotBeSavedError("the train step changes it in place")
        size = sum(each.numel() * each.element_size() for each, _ in self._tensors if not each.is_sparse)
        if size > largest:
            raise CannotBeSavedError(f"it has {size / 2**20:,.0f} MiB, and {largest / 2**20:,.0f} are the most")
        return plain(self._batch)

    def _keep(self, value: Any) -> Any:
        """The same in containers that the train step does not have."""
        if isinstance(value, Tensor):
            self._tensors.append((value, version(value)))
        elif isinstance(value, Mapping):
            return {key: self._keep(each) for key, each in value.items()}
        elif isinstance(value, (tuple, list)):
            return (list if isinstance(value, list) else tuple)(map(self._keep, value))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {each.name: self._keep(getattr(value, each.name)) for each in dataclasses.fields(value)}
        return value


def plain(value: Any) -> Any:
    """A copy on the CPU in what ``torch.load(weights_only=True)`` knows; else a CannotBeSavedError."""
    if isinstance(value, Tensor):
        if type(value) is Tensor and value.is_sparse:
            return value.detach().cpu()
        if not is_plain(value):
            raise CannotBeSavedError(f"there is a {type(value).__name__} in it, of a kind that is not one array")
        # A part of a tensor would be saved with all of it.
        return value.detach().as_subclass(Tensor).cpu().clone()
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return (list if isinstance(value, list) else tuple)(map(plain, value))
    if type(value).__module__ == "numpy" and hasattr(value, "item") and not getattr(value, "ndim", 1):
        return plain(value.item())
    raise CannotBeSavedError(f"there is a {type(value).__name__} in it, and not only tensors, numbers and texts")
