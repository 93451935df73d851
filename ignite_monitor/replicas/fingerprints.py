"""Exact hashes of tensors, independent of device and order of summation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.model.devices import move

_PIECE = 1 << 20  # elements that are hashed at once, to bound the memory

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprints(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    r"""Hash the bits of tensors.

    The hash is :math:`\sum_i (b_i + 1)(2 i + 1) \bmod 2^{64}` for elements with bits :math:`b_i` as signed integers.
    The weights are odd, so one flipped bit always changes it, and so do two exchanged elements of up to 32 bits.

    Args:
        tensors: strided tensors of any dtype and device.
        device: device of the result.

    Returns:
        int64 tensor of shape (tensors,).
    """
    with torch.no_grad():
        hashes = [move(_hash(tensor), device) for tensor in tensors]
        return torch.stack(hashes) if hashes else torch.zeros(0, dtype=torch.int64, device=device)


def fingerprint_of(value: Any) -> int:
    """Hash the ``repr`` of numbers, strings, and sequences of them to 64 bits."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little", signed=True)


def _hash(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    bits = tensor.resolve_neg().view(_INTEGERS[tensor.itemsize]).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _PIECE):
        piece = bits[start : start + _PIECE].to(torch.int64) + 1
        index = torch.arange(start, start + len(piece), dtype=torch.int64, device=bits.device)
        total = total + (piece * (2 * index + 1)).sum()
    return total
