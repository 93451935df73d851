"""How much weights have moved, which have stopped, and the order statistics that sum many parameters up."""

from __future__ import annotations

import torch
from torch import Tensor

from ignite_monitor.model.devices import upload
from ignite_monitor.model.norms import row_norms as row_norms
from ignite_monitor.model.norms import row_norms_of_each as row_norms_of_each

_RANKS = torch.tensor([[1, 1, 95, 0, 1], [-1, 0, -1, 0, -1], [2, 2, 100, 1, 1]], device="cpu")


def update_ratios(changes: Tensor, weights: Tensor, eps: float) -> Tensor:
    """How much parameters have moved for their size: norms of changes by those of the weights before, plus ``eps``."""
    return changes / (weights + eps)


def count_still(still: Tensor, ratios: Tensor, threshold: float, measured: Tensor) -> Tensor:
    """In how many measured steps in a row each parameter has stood still, one more step included.

    Others than the measured ones keep their count. A ratio of NaN, of weights that are not finite, is no standing
    still.
    """
    return torch.where(measured, torch.where(ratios <= threshold, still + 1, 0), still)


def order_statistics(values: Tensor) -> Tensor:
    """Median, 95th percentile, minimum and maximum, along the last dimension, of what is not NaN; NaN of nothing.

    The median of an even number of values is the mean of the two in the middle; the percentile is the nearest-rank one,
    the smallest value that at least 95 % of the values do not exceed (rank ceil(0.95 n)).
    """
    if not values.shape[-1]:
        return values.new_full((*values.shape[:-1], 4), torch.nan)
    # The two in the middle, the percentile, the first and the last are at (count * factor + summand) // divisor, from 0
    # on. Sorting puts NaN last, which is all there is where the count is 0.
    factors, summands, divisors = upload(_RANKS, values.device).unbind()
    count = (values == values).sum(-1, keepdim=True)
    at = torch.addcmul(summands, count, factors).floor_divide_(divisors).clamp_(min=0)
    picked = values.sort(-1).values.gather(-1, at)
    return torch.cat([picked[..., :2].mean(-1, keepdim=True), picked[..., 2:]], -1)
