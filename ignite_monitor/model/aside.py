"""Computing on a model's tensors while it runs, so that nothing of the model's own notices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ignite_monitor.model._torch import is_functorch_wrapped, unseen_by_dispatch, unseen_by_functions


@contextmanager
def aside() -> Iterator[None]:
    """A context in which operations build no graph and are seen by no mode and no subclass of tensors.

    Modes that the user has entered act on every operation: selective activation checkpointing keeps outputs of a
    forward in the order in which they come and hands them out again in backward, so that one more would shift all of
    them; a counter of floating-point operations would count ours.
    """
    with torch.no_grad(), unseen_by_functions(), unseen_by_dispatch():
        yield


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is data on one device: no DTensor, nested, meta or fake tensor, and none under ``vmap``."""
    return (
        (type(tensor) is Tensor or type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__)
        and tensor.layout is _strided
        and not (tensor.is_nested or tensor.is_meta or is_functorch_wrapped(tensor))
    )


_strided = torch.strided
