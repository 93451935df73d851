r"""Alignment: how much larger a product with a weight is than its factors, as an exponent of the fan-in.

A layer with weights :math:`W_0 + \Delta W` and n inputs gets :math:`z_0 + \Delta z`, where it got :math:`z_0` at the
start. For an input z, W of shape (outputs, n), and root mean squares over their elements,

.. math:: \frac{\log \mathrm{RMS}(z W^\top) - \log(\mathrm{RMS}(z)\, \mathrm{RMS}(W))}{\log n}

is 1/2 in the mean where z and W know nothing of each other, since n random terms add up to :math:`\sqrt n`, and 1 where
every term has the same sign, as for :math:`W = u z^\top`. The three products of what changes are those of `Scaling
Exponents Across Parameterizations and Optimizers <https://arxiv.org/abs/2407.05872>`_: :math:`\alpha` of
:math:`z_0 \Delta W^\top`, :math:`\omega` of :math:`\Delta z W_0^\top`, and u of :math:`\Delta z \Delta W^\top`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

TERMS = ("z0_dW", "dZ_w0", "dZ_dW")
"""What the three are of."""

Product = Callable[[Tensor, Tensor], Tensor]


def rms(values: Tensor) -> Tensor:
    """The root mean square of every row.

    Args:
        values: a tensor whose first dimension is that of the rows.
    """
    rows = values.flatten(1)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms / math.sqrt(rows.shape[1])


def row_alignment(product: Product, fan_in: float, x: Tensor, weight: Tensor) -> Tensor:
    """The alignment of an input and a weight, by row; NaN where the input, the weight or their product is 0.

    Args:
        product: of an input and a weight, linear in either: a matrix product or a convolution.
        fan_in: n, how many products each output is the sum of, more than 1.
        x: z, whose first dimension is that of the rows.
    """
    exponents = (rms(product(x, weight)).log() - (rms(x) * rms(weight[None])).log()) / math.log(fan_in)
    return torch.where(exponents.isfinite(), exponents, math.nan)


def alignment_sums(
    product: Product,
    fan_in: float,
    initial_input: Tensor,
    input_change: Tensor,
    initial_weight: Tensor,
    weight_change: Tensor,
) -> Tensor:
    r"""The sums of all three alignments over the rows of a batch in which they are defined, and the numbers of these.

    Args:
        product: of an input and a weight, linear in either: a matrix product or a convolution.
        fan_in: n, how many products each output is the sum of, more than 1.
        initial_input: :math:`z_0`, whose first dimension is that of the rows.
        input_change: :math:`\Delta z`, of the same shape.
        initial_weight: :math:`W_0`.
        weight_change: :math:`\Delta W`, of the same shape.

    Returns:
        A tensor of shape (2, 3): sums and counts, in the order of :data:`TERMS`.

    Examples:
        .. code-block:: python

            sums, counts = alignment_sums(torch.nn.functional.linear, W.shape[1], z_0, z - z_0, W_0, W - W_0)
            alpha, omega, u = sums / counts
    """
    both = torch.cat([initial_input, input_change])
    alpha, u = row_alignment(product, fan_in, both, weight_change).chunk(2)
    rows = torch.stack([alpha, row_alignment(product, fan_in, input_change, initial_weight), u])
    return torch.stack([rows.nansum(1), (~rows.isnan()).sum(1, dtype=rows.dtype)])


def over_layers(alignments: Tensor) -> Tensor:
    """Mean, smallest and largest alignment over the layers in which it is defined, NaN where there is none.

    Args:
        alignments: of shape (layers, terms), NaN where it is not defined.

    Returns:
        A tensor of shape (3, terms).
    """
    unknown = alignments.isnan()
    smallest = alignments.masked_fill(unknown, math.inf).amin(0)
    largest = alignments.masked_fill(unknown, -math.inf).amax(0)
    statistics = torch.stack([alignments.nanmean(0), smallest, largest])
    return statistics.masked_fill(unknown.all(0), math.nan)
