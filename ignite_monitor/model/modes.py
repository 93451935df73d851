"""Modes to compute in: hidden from the user's modes, or at full precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.model._torch import (
    disabled_dispatch_modes,
    dispatch_modes,
    hooks_of_saved_tensors,
    is_functorch_wrapped,
    unseen_by_dispatch,
    unseen_by_functions,
)


@contextmanager
def hidden_from_user_modes() -> Iterator[None]:
    """Compute without a graph, hidden from the user's modes: selective checkpointing, counters of operations."""
    with unseen_by_functions(), unseen_by_dispatch(), torch.no_grad():  # in this order modes are not asked about it
        yield


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Compute hidden from the user's dispatch modes, with those that the code inside enters."""
    return disabled_dispatch_modes() if dispatch_modes() else nullcontext()


def without_saved_tensors_hooks() -> AbstractContextManager[Any]:
    """Build a graph hidden from the user's hooks on saved tensors, as those of checkpointing; it has no backward."""
    hidden = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda tensor: tensor)
    return hidden if hooks_of_saved_tensors(False) else nullcontext()


def has_local_data(tensor: Tensor) -> bool:
    """Return True for data on one device: no DTensor, nested, meta or fake tensor, and none under ``vmap``."""
    return (
        (type(tensor) is Tensor or type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__)
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_meta or is_functorch_wrapped(tensor))
    )


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute products and convolutions of float32 in float32, neither in TF32 nor in bfloat16, without autocast."""
    mkldnn, cudnn = torch.backends.mkldnn, torch.backends.cudnn
    backends: list[Any] = [torch.backends.cuda.matmul, getattr(mkldnn, "matmul", mkldnn)]
    backends += [getattr(cudnn, name, None) for name in ("conv", "rnn")]
    before = [(backend, backend.fp32_precision) for backend in backends if hasattr(backend, "fp32_precision")]
    try:
        legacy = torch.get_float32_matmul_precision()
    except RuntimeError:  # the user has set fp32_precision
        legacy = "highest"
    older = not hasattr(backends[-1], "fp32_precision") and cudnn.allow_tf32
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        try:
            if legacy != "highest":
                torch.set_float32_matmul_precision("highest")
            if older:
                cudnn.allow_tf32 = False
            for backend, value in before:
                if value not in ("none", "ieee"):
                    backend.fp32_precision = "ieee"
            yield
        finally:
            if legacy != "highest":
                torch.set_float32_matmul_precision(legacy)
            if older:
                cudnn.allow_tf32 = True
            for backend, value in before:
                if legacy != "highest" or backend.fp32_precision != value:
                    backend.fp32_precision = "none"  # inherited, unless that is another value
                    if backend.fp32_precision != value:
                        backend.fp32_precision = value
