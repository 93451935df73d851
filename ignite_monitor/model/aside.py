"""Computing on a model's tensors while it runs, so that nothing of the model's own notices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def aside() -> Iterator[None]:
    """A context in which operations build no graph and are seen by no mode and no subclass of tensors.

    Modes that the user has entered act on every operation: selective activation checkpointing keeps outputs of a
    forward in the order in which they come and hands them out again in backward, so that one more would shift all of
    them; a counter of floating-point operations would count ours.
    """
    with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is data on one device: no DTensor, nested, meta or fake tensor, and none under ``vmap``."""
    return (
        (type(tensor) is Tensor or type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__)
        and tensor.layout is _strided
        and not (tensor.is_nested or tensor.is_meta or _is_functorch_wrapped_tensor(tensor))
    )


_strided = torch.strided
_is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor
