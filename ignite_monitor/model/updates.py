"""Order statistics over many parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from ignite_monitor.model.devices import upload

_RANKS = torch.tensor([[1, 1, 95, 0, 1], [-1, 0, -1, 0, -1], [2, 2, 100, 1, 1]], device="cpu")


def order_statistics(values: Tensor) -> Tensor:
    """Median, 95th percentile (nearest rank), minimum and maximum of the values that are not NaN; NaN without any.

    They are taken along the last dimension.
    """
    if not values.shape[-1]:
        return values.new_full((*values.shape[:-1], 4), torch.nan)
    # Ranks of the two in the middle, the percentile, the first and the last: (count * factor + summand) // divisor.
    # Sorting puts NaN last, so that where the count is 0 all are NaN.
    factors, summands, divisors = upload(_RANKS, values.device).unbind()
    count = (values == values).sum(-1, keepdim=True)
    at = torch.addcmul(summands, count, factors).floor_divide_(divisors).clamp_(min=0)
    picked = values.sort(-1).values.gather(-1, at)
    return torch.cat([picked[..., :2].mean(-1, keepdim=True), picked[..., 2:]], -1)
