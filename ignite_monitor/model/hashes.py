"""Exact 64-bit hashes of tensors and Python values."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.model.devices import move
from ignite_monitor.model.dtensor import local
from ignite_monitor.model.tensors import bits_of

# SplitMix64 (G. L. Steele, D. Lea and C. H. Flood, "Fast splittable pseudorandom number generators", 2014).
_STEP = 0x9E3779B97F4A7C15 - 2**64
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)

_WORDS_ON_CPU, _WORDS = 1 << 16, 1 << 22  # hashed at once: they fit in a cache, or bound the memory


def hashes_of(items: Mapping[str, Any], device: torch.device) -> Tensor:
    r"""Hash this rank's part of every item: int64, of shape (items,), on a device.

    The bytes of a tensor are read as 64-bit words :math:`w_i`. With the finalizer :math:`m` of SplitMix64, a bijection
    in which every bit of the result depends on every bit of the argument, the hash is
    :math:`m\bigl(k + \sum_i m(w_i + (i + 1) g)\bigr) \bmod 2^{64}` for the key k of name, dtype and shape. A change
    within one word always changes it. Other values have no words, and a key of their name and ``repr``.
    """
    sums, keys = [nothing := torch.zeros((), dtype=torch.int64, device=device)], [0]
    for name, item in items.items():
        if isinstance(item, Tensor):
            part = local(item)
            sums.append(move(_sum_of_words(part), device))
            keys.append(_key((name, part.dtype, part.shape)))
        else:
            sums.append(nothing)
            keys.append(_key((name, item)))
    return _mix(torch.stack(sums) + move(torch.tensor(keys, dtype=torch.int64, device="cpu"), device))[1:]


def _key(value: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little", signed=True)


def _sum_of_words(tensor: Tensor) -> Tensor:
    data = bits_of(tensor).reshape(-1).contiguous().view(torch.uint8)
    missing = -len(data) % 8
    if missing or data.storage_offset() % 8:
        data = nn.functional.pad(data, (0, missing)) if missing else data.clone()
    first, total = 1, torch.zeros((), dtype=torch.int64, device=tensor.device)
    for words in data.view(torch.int64).split(_WORDS_ON_CPU if tensor.is_cpu else _WORDS):
        positions = torch.arange(first, first := first + len(words), device=words.device)
        total += _mix(positions.mul_(_STEP).add_(words)).sum()
    return total


def _mix(words: Tensor) -> Tensor:
    """Apply the finalizer of SplitMix64 in place; int64 products wrap around, and shifts copy the sign."""
    words ^= (words >> 30) & (2**34 - 1)
    words *= _FACTORS[0]
    words ^= (words >> 27) & (2**37 - 1)
    words *= _FACTORS[1]
    words ^= (words >> 31) & (2**33 - 1)
    return words
