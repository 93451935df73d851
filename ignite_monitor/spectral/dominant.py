"""The largest eigenvalue of small symmetric matrices by repeated squaring, with bounds from both sides."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_SQUARINGS = 15
_EARLY = 6


class Dominant(NamedTuple):
    """What is known of the largest eigenvalue of each of a batch of matrices."""

    lower: Tensor  # a bound of it, of shape (B,)
    upper: Tensor  # the same
    vector: Tensor  # the unit vector whose Rayleigh quotient is the lower bound, of shape (B, n)
    power: Tensor  # the 64th power of the matrix, scaled, of shape (B, n, n): what filters its leading eigenspace


def dominant(matrices: Tensor) -> Dominant:
    r"""The largest eigenvalue of positive semidefinite matrices, finite, with a trace of the order of 1 or less.

    .. math:: y^\top A y \;\le\; \lambda \;\le\; \left(\operatorname{tr} A^q\right)^{1/q}, \qquad q = 2^{15},

    with y the longest column of :math:`A^q`; the upper bound is at most :math:`n^{1/q}` times too large. Matrix
    products alone: unlike an eigensolver this waits for no device, and repeated eigenvalues do not trouble it.
    """
    smallest = torch.finfo(matrices.dtype).tiny
    power = early = matrices
    log_upper = torch.zeros_like(matrices[:, 0, 0])
    for i in range(_SQUARINGS + 1):
        if i:
            power = power @ power
        if i % 3 == 0:  # from a trace of 1 three squarings lead to one of 1/n⁷ at least
            trace = power.diagonal(dim1=1, dim2=2).sum(1).clamp(min=smallest)
            power = power / trace[:, None, None]
            log_upper = torch.add(log_upper, trace.log(), alpha=2.0**-i)
        if i == _EARLY:
            early = power
    longest = power.diagonal(dim1=1, dim2=2).argmax(1)
    column = power.gather(2, longest[:, None, None].expand(-1, power.shape[1], 1))
    column = column / torch.linalg.vector_norm(column, dim=1, keepdim=True).clamp(min=smallest)
    lower = (column * (matrices @ column)).sum((1, 2))
    return Dominant(lower, log_upper.exp(), column.squeeze(2), early)
