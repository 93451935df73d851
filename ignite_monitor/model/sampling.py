"""Which elements of a tensor to look at: the same ones in every process, derived from a name."""

from __future__ import annotations

import torch
from torch import Tensor

_OFFSET_BASIS, _PRIME = 0xCBF29CE484222325, 0x100000001B3
_MASK = (1 << 64) - 1
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def fnv1a_64(text: str) -> int:
    """The 64-bit FNV-1a hash of a text's UTF-8 bytes (Fowler, Noll and Vo), the same in every process.

    Examples:
        >>> hex(fnv1a_64("foobar"))
        '0x85944171f73967e8'
    """
    value = _OFFSET_BASIS
    for byte in text.encode():
        value = ((value ^ byte) * _PRIME) & _MASK
    return value


def spread_indices(seed: int, numel: int, count: int | None) -> Tensor:
    """Indices of a sample without repetition, spread evenly over a flattened tensor: int64, ascending, on the CPU.

    The tensor is cut into ``count`` strata of equal length (to within one element), and of each stratum one element
    is taken, at a place that the SplitMix64 mix of ``seed`` and the stratum's number gives. Each weighed by its
    stratum's length (:func:`stratum_widths`), the squares of such a sample of k give an unbiased estimate of the
    elements' mean square, with a relative standard error of about sqrt((kurtosis - 1) / k).

    Args:
        seed: any integer, of which the lowest 64 bits count.
        count: how many to take; None, or more than there are: all.

    Examples:
        >>> spread_indices(fnv1a_64("foobar"), 100, 4).tolist()
        [15, 34, 69, 85]
    """
    if count is None or count >= numel:
        return torch.arange(numel, device="cpu")
    bounds = _bounds(numel, count)
    numbers = torch.arange(1, count + 1, device="cpu")
    return bounds[:-1] + (_mix(_signed(seed) + numbers * _signed(_GOLDEN)) & _signed(_MASK >> 1)) % bounds.diff()


def stratum_widths(numel: int, count: int) -> Tensor:
    """How many elements each one of a sample of :func:`spread_indices` stands for.

    Examples:
        >>> stratum_widths(10, 4).tolist()
        [2, 3, 2, 3]
    """
    return _bounds(numel, count).diff()


def _bounds(numel: int, count: int) -> Tensor:
    places = torch.arange(count + 1, device="cpu")
    # places * numel // count, without the product that may not fit 64 bits
    return places * (numel // count) + places * (numel % count) // count


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shifted(x, 27)) * _signed(_MIX_2)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    # int64 shifts carry the sign along; SplitMix64 does not
    return (x >> bits) & (_MASK >> bits)


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value
