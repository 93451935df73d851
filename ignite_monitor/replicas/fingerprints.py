"""An exact hash of tensors, alike wherever and in whatever order it is computed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

# Tensors of at most so many elements are hashed together, and larger ones in pieces of the second size.
_SMALL = 1 << 16
_PIECE = 1 << 20

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprints(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    r"""A number for the bits of each tensor, :math:`\sum_i (b_i + 1)(2 i + 1) \bmod 2^{64}` for elements with bits b.

    Integers are added, so neither device nor order matter. One flipped bit always changes it, since the weights are
    odd; so do two elements of up to 32 bits that change places.

    Args:
        tensors: tensors of any dtype, on any devices, with strided elements.
        device: where the numbers are to be.

    Returns:
        int64, of shape (tensors,).
    """
    with torch.no_grad():
        found: dict[int, Tensor] = {}
        small: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        bits = [_bits(tensor) for tensor in tensors]
        for place, each in enumerate(bits):
            if len(each) > _SMALL:
                found[place] = _of_large(each)
            else:
                small.setdefault((each.device, each.dtype), []).append(place)
        for places in small.values():
            numbers = _of_small([bits[place] for place in places])
            found |= dict(zip(places, numbers.to(device, non_blocking=True).unbind(), strict=True))
        in_order = [found[place].to(device, non_blocking=True) for place in range(len(tensors))]
        return torch.stack(in_order) if in_order else torch.zeros(0, dtype=torch.int64, device=device)


def fingerprint_of(value: Any) -> int:
    """A number for what Python writes numbers, strings, and tuples and lists of such as."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little", signed=True)


def _bits(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg().view(_INTEGERS[tensor.itemsize]).reshape(-1)


def _weights(count: int, device: torch.device) -> Tensor:
    return 2 * torch.arange(count, dtype=torch.int64, device=device) + 1


def _of_large(bits: Tensor) -> Tensor:
    weights = _weights(min(_PIECE, len(bits)), bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _PIECE):
        piece = bits[start : start + _PIECE].to(torch.int64) + 1
        total = total + (piece * weights[: len(piece)]).sum() + 2 * start * piece.sum()
    return total


def _of_small(bits: Sequence[Tensor]) -> Tensor:
    sizes = [len(each) for each in bits]
    device = bits[0].device
    weights = _weights(max(sizes), device)
    terms = (torch.cat(list(bits)).to(torch.int64) + 1) * torch.cat([weights[:size] for size in sizes])
    sums = torch.cat([terms.new_zeros(1), terms.cumsum(0)])
    ends = torch.tensor(list(accumulate(sizes, initial=0)), device="cpu").to(device, non_blocking=True)
    return sums[ends].diff()
