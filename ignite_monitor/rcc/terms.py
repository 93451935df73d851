"""Terms of the refined coordinate check, and their norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ignite_monitor.model.devices import move, wide_dtype

# Columns of the table of norms.
QUANTITIES = ("weight_update", "input_drift", "input", "input_change", "output_change")


class Change(NamedTuple):
    r"""Change of a layer's output.

    Attributes:
        weight_update: :math:`f_t(x_t) - f_0(x_t)`.
        input_drift: :math:`f_0(x_t) - f_0(x_0)`.
    """

    weight_update: Tensor
    input_drift: Tensor


def output_change(output: Tensor, initial_on_input: Tensor, reference_output: Tensor) -> Change:
    """Change of any function's output, from :math:`f_t(x_t)`, :math:`f_0(x_t)` and :math:`f_0(x_0)`."""
    return Change(output - initial_on_input, initial_on_input - reference_output)


# Sums of the feature norms of one call, and numbers of norms.
NormSums = tuple[Tensor, list[int]]


def norm_sums(change: Change, inputs: Sequence[Tensor], dim: int) -> NormSums:
    """Sum the feature norms of one call.

    Args:
        change: the change of the output; its weight update is overwritten.
        inputs: the model's input and its change; without them the weight update is measured alone.
        dim: the dimension of the features; the last one if there are fewer dimensions.
    """
    norms = [_feature_norms(change.weight_update, dim)]
    if inputs:
        norms += [_feature_norms(item, dim) for item in (change.input_drift, *inputs)]
        norms.append(_feature_norms(change.weight_update.add_(change.input_drift), dim))
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
        counts.index_add_(0, index, torch.tensor([own for _, (_, own) in calls], dtype=dtype, device="cpu"))
        sums.index_add_(0, move(index, device), torch.stack([move(own, device) for _, (own, _) in calls]))
    return torch.stack([sums, move(counts, device)])


def mean_norms(sums: Tensor, counts: Tensor) -> Tensor:
    """Mean norms of each layer, and the share of the weight update, 0 where it and the input drift are 0.

    Args:
        sums: of shape (layers, quantities).
        counts: of the same shape.

    Returns:
        A tensor of shape (layers, quantities + 1); NaN for no norms and for non-finite values.
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
