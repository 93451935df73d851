"""Batches in types that ``torch.load(weights_only=True)`` reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ignite_monitor.model._torch import version
from ignite_monitor.model.modes import is_plain


class CannotBeSavedError(Exception):
    """A batch or a part of it can't be saved; the message gives the reason."""


class KeptBatch:
    """References to the tensors of a batch, in containers of their own; copied only when saved."""

    def __init__(self, batch: Any) -> None:
        self._versions: list[tuple[Tensor, int]] = []
        self._batch = self._keep(batch)

    def save(self, largest: int) -> Any:
        """Copy the batch to the CPU.

        Raises:
            CannotBeSavedError: if it has more bytes, was changed in place, or holds other types.
        """
        if any(version(tensor) != kept for tensor, kept in self._versions):
            raise CannotBeSavedError("the train step changes it in place")
        size = sum(tensor.numel() * tensor.element_size() for tensor, _ in self._versions if not tensor.is_sparse)
        if size > largest:
            raise CannotBeSavedError(f"{size / 2**20:,.0f} MiB exceed the limit of {largest / 2**20:,.0f} MiB")
        return _copy(self._batch)

    def _keep(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self._versions.append((value, version(value)))
        elif isinstance(value, Mapping):
            return {key: self._keep(item) for key, item in value.items()}
        elif isinstance(value, (tuple, list)):
            return (list if isinstance(value, list) else tuple)(map(self._keep, value))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {item.name: self._keep(getattr(value, item.name)) for item in dataclasses.fields(value)}
        return value


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        if type(value) is Tensor and value.is_sparse:
            return value.detach().cpu()
        if not is_plain(value):
            raise CannotBeSavedError(f"it holds a {type(value).__name__} that is not a single dense array")
        # Cloned, since torch.save writes the whole storage of a view.
        return value.detach().as_subclass(Tensor).cpu().clone()
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    if isinstance(value, dict):
        return {_copy(key): _copy(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(map(_copy, value))
    if type(value).__module__ == "numpy" and hasattr(value, "item") and not getattr(value, "ndim", 1):
        return _copy(value.item())
    raise CannotBeSavedError(f"it holds a {type(value).__name__}; only tensors, numbers and strings can be saved")
