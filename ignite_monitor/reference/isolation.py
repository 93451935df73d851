"""Former place of :mod:`ignite_monitor.model.isolation`, for packages that still import from it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from ignite_monitor.model import isolation
from ignite_monitor.model.isolation import is_reference_run as is_reference_run
from ignite_monitor.model.isolation import preserved_buffers

here = isolation._thread


def put_back(modules: list[nn.Module], registries: list[dict[str, Any]]) -> AbstractContextManager[None]:
    """Former name of ``preserved_buffers``."""
    return preserved_buffers(modules)
