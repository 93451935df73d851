"""Elements to sample from a tensor, derived from its name: the same in every run and on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_OFFSET_BASIS, _PRIME = 0xCBF29CE484222325, 0x100000001B3
_MASK = (1 << 64) - 1


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


def sample_indices(name: str, shape: Sequence[int], count: int | None) -> Tensor | None:
    """Draw elements of a flattened tensor independently and uniformly, with replacement.

    Squares of k such elements estimate the mean square without bias, with a relative standard error of
    sqrt((kurtosis - 1) / k). A two-dimensional tensor with more than ``count`` rows gives one element of each row: it
    may be an embedding, of which a step moves few rows.

    Args:
        name: seeds the generator, by its FNV-1a hash.
        shape: of the tensor.
        count: how many to draw; None for all.

    Returns:
        int64 on the CPU; None where the tensor has no more elements than would be drawn.
    """
    numel, rows = torch.Size(shape).numel(), shape[0] if len(shape) == 2 else 0
    if count is None or numel <= max(count, rows):
        return None
    generator = torch.Generator("cpu").manual_seed(fnv1a_64(name))
    if rows <= count:
        return torch.randint(numel, (count,), generator=generator, device="cpu")
    columns = numel // rows
    within = torch.randint(columns, (rows,), generator=generator, device="cpu")
    return torch.arange(rows, device="cpu") * columns + within
