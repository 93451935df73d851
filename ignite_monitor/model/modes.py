"""What to compute in: unseen by the user's modes, at full precision, with gradients as the user expects them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.model._torch import in_backward as in_backward
from ignite_monitor.model._torch import is_functorch_wrapped, unseen_by_dispatch, unseen_by_functions


@contextmanager
def aside() -> Iterator[None]:
    """A context in which operations build no graph and are seen by no mode and no subclass of tensors.

    Modes that the user has entered act on every operation: selective activation checkpointing keeps outputs of a
    forward in the order in which they come and hands them out again in backward, so that one more would shift all of
    them; a counter of floating-point operations would count ours.
    """
    with unseen_by_functions(), unseen_by_dispatch(), torch.no_grad():  # in this order modes are not asked about it
        yield


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is data on one device: no DTensor, nested, meta or fake tensor, and none under ``vmap``."""
    return (
        (type(tensor) is Tensor or type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__)
        and tensor.layout is _strided
        and not (tensor.is_nested or tensor.is_meta or is_functorch_wrapped(tensor))
    )


_strided = torch.strided


def users_grad_mode() -> AbstractContextManager[Any]:
    """What to call a user's function in: in a backward pass autograd has turned gradients off, which nobody expects."""
    return torch.enable_grad() if in_backward() else nullcontext()


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """While it lasts, products of float32 on a device are float32's, neither TF32 nor bfloat16, and autocast is off."""
    mkldnn = torch.backends.mkldnn
    backends: list[Any] = [torch.backends.cuda.matmul, getattr(mkldnn, "matmul", mkldnn)]
    with torch.no_grad(), torch.autocast(device.type, enabled=False), ExitStack() as before:
        if all(hasattr(each, "fp32_precision") for each in backends):
            for each in backends:
                before.callback(setattr, each, "fp32_precision", each.fp32_precision)
                each.fp32_precision = "ieee"
        else:
            before.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
        yield
