"""Terms of the refined coordinate check, and their norms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ignite_monitor.model.devices import move, wide_dtype

# Columns of the table of norms.
QUANTITIES = ("weight_update", "input_drift", "input", "input_change", "output_change")


# Sums of the feature norms of one call, and numbers of norms.
NormSums = tuple[Tensor, list[int]]


def norm_sums(weight_update: Tensor, input_drift: Tensor, inputs: Sequence[Tensor], dim: int) -> NormSums:
    r"""Sum the feature norms of one call.

    Args:
        weight_update: :math:`f_t(x_t) - f_0(x_t)`, which is overwritten.
        input_drift: :math:`f_0(x_t) - f_0(x_0)`.
        inputs: the model's input and its change; without them the weight update is measured alone.
        dim: the dimension of the features; the last one if there are fewer dimensions.
    """
    norms = [_feature_norms(weight_update, dim)]
    if inputs:
        norms += [_feature_norms(item, dim) for item in (input_drift, *inputs)]
        norms.append(_feature_norms(weight_update.add_(input_drift), dim))
    sums = torch.stack([item.sum(dtype=wide_dtype(item.device)) for item in norms])
    missing = len(QUANTITIES) - len(norms)
    return F.pad(sums, (0, missing)), [item.numel() for item in norms] + [0] * missing


def _feature_norms(values: Tensor, dim: int) -> Tensor:
    return torch.linalg.vector_norm(values, dim=dim if -values.ndim <= dim < values.ndim else -1)  # type: ignore[no-any-return]


def table_of(
    calls: Sequence[tuple[int, NormSums]], incomplete: Sequence[int], layers: int, device: torch.device
) -> Tensor:
    """Table of shape (2, layers, quantities) of sums of norms and their counts, from rows and sums of calls.

    Counts of incomplete rows are NaN, so that the means over all ranks are.
    """
    dtype = wide_dtype(device)
    counts = torch.zeros(layers, len(QUANTITIES), dtype=dtype, device="cpu")
    counts[list(incomplete)] = torch.nan
    sums = torch.zeros(layers, len(QUANTITIES), dtype=dtype, device=device)
    if calls:
        index = torch.tensor([row for row, _ in calls], device="cpu")
        counts.index_add_(0, index, torch.tensor([count for _, (_, count) in calls], dtype=dtype, device="cpu"))
        sums.index_add_(0, move(index, device), torch.stack([move(value, device) for _, (value, _) in calls]))
    return torch.stack([sums, move(counts, device)])


def mean_norms(sums: Tensor, counts: Tensor) -> Tensor:
    """Mean norms of each layer, and the share of the weight update, 0 where it and the input drift are 0.

    Sums and counts are of shape (layers, quantities). NaN marks absent norms and non-finite values.
    """
    means = sums / counts
    both = means[:, 0] + means[:, 1]
    share = (means[:, 0] / both).masked_fill(both == 0, 0.0)
    return torch.cat([means, share[:, None]], 1).nan_to_num(torch.nan, torch.nan, torch.nan)


def over_layers(means: Tensor) -> dict[str, Tensor]:
    """Maximum and median over the layers of the first two quantities, without NaN."""
    statistics = {}
    for quantity, values in zip(QUANTITIES[:2], means.unbind(1), strict=False):
        statistics[f"{quantity}_max"] = values.nan_to_num(-torch.inf).amax()
        statistics[f"{quantity}_median"] = values.nanquantile(0.5)
    return statistics
