"""The leading eigenvector of small symmetric matrices by repeated squaring."""

from __future__ import annotations

import torch
from torch import Tensor

_SQUARINGS = 15


def dominant(matrices: Tensor) -> Tensor:
    r"""Unit vectors with nearly the largest Rayleigh quotient of positive semidefinite matrices A.

    The longest column of :math:`A^q`, :math:`q = 2^{15}`. Unlike an eigensolver this synchronizes with no device, and
    repeated eigenvalues do no harm.

    Args:
        matrices: (B, n, n), finite, with a trace of the order of 1 or less.

    Returns:
        (B, n); zeros for a zero matrix.
    """
    smallest = torch.finfo(matrices.dtype).tiny
    power = matrices
    for i in range(_SQUARINGS + 1):
        if i:
            power = power @ power
        if i % 3 == 0:  # three squarings take a trace of 1 to one of at least 1/n⁷
            trace = power.diagonal(dim1=1, dim2=2).sum(1).clamp(min=smallest)
            power = power / trace[:, None, None]
    longest = power.diagonal(dim1=1, dim2=2).argmax(1)
    column = power.gather(2, longest[:, None, None].expand(-1, power.shape[1], 1)).squeeze(2)
    unit: Tensor = column / torch.linalg.vector_norm(column, dim=1, keepdim=True).clamp(min=smallest)
    return unit
