"""How many items a batch holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def count_items(batch: Any) -> int | None:
    """The length of the first tensor in a batch: in a tensor, or nested in tuples, lists and mappings.

    Returns:
        None if there is no tensor with a dimension in it.
    """
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else None
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    return next((count for count in map(count_items, parts) if count is not None), None)
