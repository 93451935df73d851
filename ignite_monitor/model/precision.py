"""Matrix products in the dtype of their factors, whatever the user has allowed for training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """While it lasts, products of float32 are float32's, neither TF32 nor bfloat16, and autocast is off.

    Args:
        device: the device that the products are made on.
    """
    with torch.no_grad(), torch.autocast(device.type, enabled=False), _float32_products():
        yield


@contextlib.contextmanager
def _float32_products() -> Iterator[None]:
    backends: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn]
    if hasattr(torch.backends.mkldnn, "matmul"):
        backends = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]
    if all(hasattr(backend, "fp32_precision") for backend in backends):
        before = [backend.fp32_precision for backend in backends]
        for backend in backends:
            backend.fp32_precision = "ieee"
        try:
            yield
        finally:
            for backend, precision in zip(backends, before, strict=True):
                backend.fp32_precision = precision
        return
    allowed = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(allowed)
