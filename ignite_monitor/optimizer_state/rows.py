"""What gradients, moments and changes of many tensors come to, row by row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ignite_monitor.model.devices import wide_dtype
from ignite_monitor.model.updates import row_norms


class StateStatistics(NamedTuple):
    """Statistics of tensors, one for each, NaN or inf where there is no such number.

    Attributes:
        rms: the root mean square of the gradient over the root of its squares' mean.
        eps_share: of which part of the elements that root is smaller than eps.
        momentum_cosine: the cosine of the gradient and the momentum.
        change: the mean square of what the step has changed.
    """

    rms: Tensor
    eps_share: Tensor
    momentum_cosine: Tensor
    change: Tensor


def row_sums(rows: Tensor, weights: Tensor | None, elements: Tensor | None, correction: Tensor, eps: Tensor) -> Tensor:
    r"""Sums over the elements of each row, for :func:`statistics_of` to make statistics of; uses up what it is given.

    Args:
        rows: of the gradient, its mean, what the step has changed, and the mean of the gradient's squares: of shape
            (4, rows, columns).
        weights: the square root of how often each element counts, of shape (rows or 1, columns); None for once.
        elements: where rows hold elements and not zeros that are none, bool; None for everywhere.
        correction: what the root of the mean of squares is multiplied by, of shape (rows,).
        eps: what the root is compared with, of the same shape; NaN for nothing.

    Returns:
        Of shape (6, rows), in float64 where the device has it.
    """
    gradient, momentum, _, root = rows.unbind()
    root.sqrt_().mul_(correction.to(root.dtype).unsqueeze(1))
    least = eps.to(root.dtype).unsqueeze(1)
    below = (root < least if elements is None else (root < least) & elements).to(root.dtype)
    # Where nothing is to be divided by anything the ratio is 0.
    torch.maximum(root, least.nan_to_num(0.0).clamp_(min=torch.finfo(root.dtype).tiny), out=root)
    torch.div(gradient, root, out=root)
    if weights is not None:
        rows.mul_(weights)
        below.mul_(weights).mul_(weights)
    count = below.sum(1, dtype=wide_dtype(below.device))
    norms = row_norms(rows.flatten(0, 1)).view(4, -1)
    length = norms[0]
    # The product of two small numbers may be none; that of one with a number of a unit vector is.
    gradient.mul_(torch.where(length > 0, 1 / length, 0.0).to(gradient.dtype).unsqueeze(1))
    product = length * gradient.mul_(momentum).sum(1).to(length.dtype)
    return torch.cat([norms.square_(), torch.stack([count, product])])


def statistics_of(means: Tensor) -> StateStatistics:
    """Statistics of tensors.

    Args:
        means: what :func:`row_sums` gives, over the number of elements.
    """
    gradient, momentum, change, rms, below, product = means.unbind()
    cosine = product / (gradient.sqrt() * momentum.sqrt())
    return StateStatistics(rms.sqrt(), below, cosine.clamp(-1, 1), change)
