"""Exact 64-bit hashes of tensors and Python values."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.model.devices import move, wide_dtype
from ignite_monitor.model.dtensor import local
from ignite_monitor.model.tensors import bits_of

# SplitMix64 (G. L. Steele, D. Lea and C. H. Flood, "Fast splittable pseudorandom number generators", 2014).
_STEP = 0x9E3779B97F4A7C15 - 2**64
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)

_WORDS_ON_CPU, _WORDS = 1 << 16, 1 << 22  # hashed at once: they fit in a cache, or bound the memory


def hashes_of(items: Mapping[str, Tensor | int], device: torch.device) -> Tensor:
    r"""Hash this rank's part of every item: int64, of shape (items,), on a device.

    The bytes of a tensor are read as 64-bit words :math:`w_i`. With the finalizer :math:`m` of SplitMix64, a bijection
    in which every bit of the result depends on every bit of the argument, the hash is
    :math:`m\bigl(k + \sum_i m(w_i + (i + 1) g)\bigr) \bmod 2^{64}` for the key k of name, dtype and shape. A change
    within one word always changes it.
    """
    sums, keys = [torch.zeros(0, dtype=torch.int64, device=device)], []
    for name, item in items.items():
        tensor = local(item) if isinstance(item, Tensor) else torch.tensor(item, device="cpu")
        words, total = _words(tensor), torch.zeros(1, dtype=torch.int64, device=tensor.device)
        limit = _WORDS_ON_CPU if tensor.device.type == "cpu" else _WORDS
        for first in range(0, len(words), limit):
            part = words[first : first + limit]
            positions = torch.arange(first + 1, first + len(part) + 1, device=part.device)
            total += _mix(positions.mul_(_STEP).add_(part)).sum()
        sums.append(move(total, device))
        keys.append(hash_of((name, str(tensor.dtype), tuple(tensor.shape))))
    return _mix(torch.cat(sums) + move(torch.tensor(keys, dtype=torch.int64, device="cpu"), device))


def _words(tensor: Tensor) -> Tensor:
    """Return the bytes of a strided tensor as 64-bit words, the last one filled with zeros."""
    data = bits_of(tensor).reshape(-1).contiguous().view(torch.uint8)
    missing = -len(data) % 8
    if missing or data.storage_offset() % 8:
        data = nn.functional.pad(data, (0, missing)) if missing else data.clone()
    return data.view(torch.int64)


def _mix(words: Tensor) -> Tensor:
    """Apply the finalizer of SplitMix64 in place; int64 products wrap around, and shifts copy the sign."""
    words ^= (words >> 30) & (2**34 - 1)
    words *= _FACTORS[0]
    words ^= (words >> 27) & (2**37 - 1)
    words *= _FACTORS[1]
    words ^= (words >> 31) & (2**33 - 1)
    return words


def as_numbers(hashes: Tensor) -> Tensor:
    """Fold 64-bit hashes to 53 bits, which float64 holds exactly; to 24 bits on devices without float64."""
    wide = wide_dtype(hashes.device)
    return (hashes & (2 ** (53 if wide == torch.float64 else 24) - 1)).to(wide)


def hash_of(value: Any) -> int:
    """Hash the ``repr`` of numbers, strings, and sequences of them to 64 bits."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little", signed=True)
