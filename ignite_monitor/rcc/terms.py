r"""The refined coordinate check: the change of a layer's output, split into a weight update and an input drift.

A layer f computes :math:`f_t(x_t)` now, and computed :math:`f_0(x_0)` with the weights and the input of the reference:

.. math:: f_t(x_t) - f_0(x_0) = (f_t(x_t) - f_0(x_t)) + (f_0(x_t) - f_0(x_0))

For a linear layer the first term is :math:`(W_t - W_0)\, x_t`, the effect of its updates, and the second is
:math:`W_0\, (x_t - x_0)`, the effect of the layers before it. The method is that of `On the Surprising Effectiveness of
Large Learning Rates under Standard Width Scaling <https://arxiv.org/abs/2505.22491>`_.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ignite_monitor.model.devices import move, upload, wide_dtype

QUANTITIES = ("weight_update", "input_drift", "input", "input_change", "output_change")
"""Columns of the table of norms."""


class Change(NamedTuple):
    r"""Change of a layer's output.

    Attributes:
        weight_update: :math:`f_t(x_t) - f_0(x_t)`.
        input_drift: :math:`f_0(x_t) - f_0(x_0)`.
    """

    weight_update: Tensor
    input_drift: Tensor


def output_change(output: Tensor, crossed: Tensor, reference_output: Tensor) -> Change:
    """Change of any function's output, from :math:`f_t(x_t)`, :math:`f_0(x_t)` and :math:`f_0(x_0)`."""
    return Change(output - crossed, crossed - reference_output)


def feature_norms(values: Tensor, dim: int = -1) -> Tensor:
    """l2 norms over one dimension, flattened.

    Args:
        values: a tensor of float32 or float64 of any shape; a 0-dim tensor is one feature.
        dim: the dimension of the features; the last one if there are fewer dimensions.
    """
    if not values.ndim:
        values = values.reshape(1)
    if not -values.ndim <= dim < values.ndim:
        dim = -1
    norms: Tensor = torch.linalg.vector_norm(values, dim=dim)
    return norms.flatten()


class NormSums(NamedTuple):
    """Sums of the feature norms of one call, and numbers of norms, in the order of :data:`QUANTITIES`."""

    sums: Tensor
    counts: list[int]


def norm_sums(
    update: Tensor, drift: Tensor | None, x: Tensor | None, input_change: Tensor | None, dim: int
) -> NormSums:
    """Sum the feature norms of one call.

    Args:
        update: the weight update; with a drift it is overwritten by the output's change.
        drift: the input drift; None without a floating-point input, as what follows.
        x: the model's input.
        input_change: its difference from the reference's input.
        dim: the dimension of the features.
    """
    norms = [None if item is None else feature_norms(item, dim) for item in (update, drift, x, input_change)]
    norms.append(None if drift is None else feature_norms(update.add_(drift), dim))
    wide = wide_dtype(update.device)
    sums = [update.new_zeros((), dtype=wide) if item is None else item.sum(dtype=wide) for item in norms]
    return NormSums(torch.stack(sums), [0 if item is None else len(item) for item in norms])


def table_of(rows: Sequence[int], calls: Sequence[NormSums], layers: int) -> Tensor:
    """Table of shape (2, layers, quantities) with the sums of norms and their counts.

    Args:
        rows: row of each call's layer.
        calls: the calls, at least one.
        layers: number of rows.
    """
    device = calls[0].sums.device
    counts = [[0] * len(QUANTITIES) for _ in range(layers)]
    for row, call in zip(rows, calls, strict=True):
        counts[row] = [total + count for total, count in zip(counts[row], call.counts, strict=True)]
    sums = torch.zeros(layers, len(QUANTITIES), dtype=calls[0].sums.dtype, device=device)
    index = upload(torch.tensor(rows, device="cpu"), device)
    sums.index_add_(0, index, torch.stack([move(call.sums, device) for call in calls]))
    return torch.stack([sums, upload(torch.tensor(counts, dtype=sums.dtype, device="cpu"), device)])


def mean_norms(sums: Tensor, counts: Tensor) -> Tensor:
    """Mean norms and weight share of each layer; NaN for no norms and for non-finite values.

    The weight share is ``weight_update / (weight_update + input_drift)``, and 0 where both are 0.

    Args:
        sums: of shape (layers, quantities).
        counts: of the same shape.

    Returns:
        A tensor of shape (layers, quantities + 1), the share last.
    """
    means = sums / counts
    both = means[:, 0] + means[:, 1]
    share = (means[:, 0] / both).masked_fill(both == 0, 0.0)
    return torch.cat([means, share[:, None]], 1).nan_to_num(torch.nan, torch.nan, torch.nan)


def over_layers(means: Tensor) -> dict[str, Tensor]:
    """Maximum and median over the layers of the first two quantities, without NaN."""
    statistics = {}
    for column, quantity in enumerate(QUANTITIES[:2]):
        values = means[:, column]
        statistics[f"{quantity}_max"] = values.nan_to_num(-torch.inf).amax()
        statistics[f"{quantity}_median"] = values.nanquantile(0.5)
    return statistics
