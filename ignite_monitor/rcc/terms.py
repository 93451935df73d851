r"""The refined coordinate check: how much of a layer's change is its weights', and how much its inputs'.

A layer f with weights W has become :math:`f_t`, and its input :math:`x_t`; at the reference they were :math:`f_0` and
:math:`x_0`. Its output has changed by

.. math:: f_t(x_t) - f_0(x_0) = (f_t(x_t) - f_0(x_t)) + (f_0(x_t) - f_0(x_0))

of which the first term, for a matrix :math:`(W_t - W_0) x_t`, is the update of the weights at work, and the second,
:math:`W_0 (x_t - x_0)`, what the layers before it have done. The method is that of `On the Surprising Effectiveness of
Large Learning Rates under Standard Width Scaling <https://arxiv.org/abs/2505.22491>`_.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ignite_monitor.model.devices import wide_dtype

QUANTITIES = ("weight_update", "input_drift", "input", "input_change", "output_change")

Norms = dict[int, Tensor]
"""Vectors of norms by offset: that in :data:`QUANTITIES`, or as many more for the same without the bias."""


class Change(NamedTuple):
    r"""The change of a layer's output, in two parts.

    Attributes:
        weight_update: :math:`f_t(x_t) - f_0(x_t)`.
        input_drift: :math:`f_0(x_t) - f_0(x_0)`.
        stacked: where there is room for both and their sum, of shape (3, …): of that they are the first rows.
    """

    weight_update: Tensor
    input_drift: Tensor
    stacked: Tensor | None = None

    @property
    def output(self) -> Tensor:
        """The sum of both, the whole change."""
        return self.weight_update + self.input_drift


def linear_change(
    function: Callable[[Tensor, Tensor], Tensor],
    weight_change: Tensor,
    reference_weight: Tensor,
    input_change: Tensor,
    x: Tensor,
) -> Change:
    r"""The change of an output that is linear in the input and in the weight.

    Differences are taken before the function and not after it, so that small ones keep their digits:

    .. math:: f(x_t, W_t) - f(x_0, W_0) = f(x_t, W_t - W_0) + f(x_t - x_0, W_0)

    Args:
        function: of an input and a weight, linear in either: a matrix product, a convolution, a product.
        weight_change: :math:`W_t - W_0`.
        reference_weight: :math:`W_0`, of the same shape.
        input_change: :math:`x_t - x_0`.
        x: :math:`x_t`, of the same shape.

    Examples:
        .. code-block:: python

            change = linear_change(torch.nn.functional.linear, W - W_0, W_0, x - x_0, x)
            mean_norm(change.weight_update), mean_norm(change.input_drift)
    """
    # Two small tensors suit the caches of a CPU better than a large one.
    if x.device.type == "cpu" or function not in (F.linear, torch.mul):
        return Change(function(x, weight_change), function(input_change, reference_weight))
    features = x.shape[-1] if function is torch.mul else len(weight_change)
    stacked = x.new_empty(3, *x.shape[:-1], features)
    for row, inputs, weight in zip(stacked, (x, input_change), (weight_change, reference_weight), strict=False):
        if function is torch.mul:
            torch.mul(inputs, weight, out=row)
        else:
            torch.mm(inputs.reshape(-1, inputs.shape[-1]), weight.T, out=row.view(-1, features))
    return Change(stacked[0], stacked[1], stacked)


def output_change(output: Tensor, crossed: Tensor, reference_output: Tensor) -> Change:
    """The change of any function's output, from three evaluations of it.

    These are :math:`f_t(x_t)`, :math:`f_0(x_t)` and :math:`f_0(x_0)`. A change that is small beside the outputs has as
    many digits less.
    """
    return Change(output - crossed, crossed - reference_output)


def normalized_change(
    x: Tensor, reference_x: Tensor, shape: Sequence[int], eps: float | None, *, centred: bool
) -> tuple[Tensor, Tensor]:
    r"""The normalised input :math:`n(x)` of LayerNorm or RMSNorm, and how much it has changed.

    With :math:`c(x) = x - \operatorname{mean}(x)`, or x itself for RMSNorm, :math:`r(x) = (\operatorname{mean}(c(x)^2)
    + \epsilon)^{-1/2}` and :math:`n(x) = c(x) r(x)`,

    .. math::

        n(x_t) - n(x_0) = c(x_t - x_0)\, r(x_t) + c(x_0)\, (r(x_t) - r(x_0)), \qquad
        r(x_t) - r(x_0) = -\frac{\operatorname{mean}(c(x_t - x_0)\, c(x_t + x_0))\, r(x_t)^2\, r(x_0)^2}{r(x_t)
        + r(x_0)},

    where nothing large is taken from something large, so that a small change keeps its digits.

    Args:
        x: :math:`x_t`.
        reference_x: :math:`x_0`, of the same shape.
        shape: the last dimensions, over which is normalised.
        eps: :math:`\epsilon`; None for the precision of the inputs' dtype.

    Returns:
        :math:`n(x_t)` and :math:`n(x_t) - n(x_0)`.
    """
    dims = list(range(-len(shape), 0))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    then, change = reference_x, x - reference_x
    if centred and x.device.type != "cpu":  # at fewer operations, but more arithmetic
        now, _, r_now = torch.native_layer_norm(x, shape, None, None, eps)
        _, mean, r_then = torch.native_layer_norm(reference_x, shape, None, None, eps)
        then, change = then - mean, change.sub_(change.mean(dims, keepdim=True))
        both = torch.add(change, then, alpha=2)
    else:
        if centred:
            then, change = then - then.mean(dims, keepdim=True), change.sub_(change.mean(dims, keepdim=True))
        now = then + change
        r_now, r_then = (
            (torch.linalg.vector_norm(each, dim=dims, keepdim=True).square_() / math.prod(shape) + eps).rsqrt_()
            for each in (now, then)
        )
        both = now + then
        now.mul_(r_now)
    growth = both.mul_(change).mean(dims, keepdim=True)
    r_shrinks = growth.mul_((r_now * r_then).square_()).div_(r_now + r_then)
    return now, change.mul_(r_now).addcmul_(then, r_shrinks, value=-1)


def feature_norms(values: Tensor, dim: int = -1) -> Tensor:
    """The l2 norms over one dimension, as a vector with one for each index along the others.

    Args:
        values: a tensor in float32 or float64, of any shape; a number is a vector of one.
        dim: the dimension of the features; the last where there are fewer.
    """
    if not values.ndim:
        values = values.reshape(1)
    if not -values.ndim <= dim < values.ndim or dim % values.ndim == values.ndim - 1:
        norms: Tensor = torch.linalg.vector_norm(values, dim=-1)
    else:  # which reads memory along other dimensions slowly
        norms = values.square().sum(dim).sqrt()
    return norms.reshape(-1)


def input_norms(x: Tensor, input_change: Tensor, dim: int) -> Norms:
    """The norms of a layer's input and of its change over the features."""
    return {2: feature_norms(x, dim), 3: feature_norms(input_change, dim)}


def change_norms(change: Change, dim: int, product: Norms | None = None, bias_change: Tensor | None = None) -> Norms:
    """The norms of the change of a layer's output over the features.

    Args:
        change: without that of the bias; it is used up, which spares memory and time.
        dim: the dimension of the features; the last where there are fewer.
        product: where the same are wanted without the bias, the :func:`input_norms` of what the weight is multiplied
            with.
        bias_change: that of the bias, of a shape that fits the output.
    """
    update, drift, stacked = change
    if stacked is None:
        norms = {0: feature_norms(update, dim), 1: feature_norms(drift, dim)}
        output = drift.add_(update)
        norms[4] = feature_norms(output, dim)
    else:
        torch.add(update, drift, out=stacked[2])
        norms = dict(zip((0, 1, 4), torch.linalg.vector_norm(stacked, dim=-1).flatten(1), strict=True))
    if product is not None:
        norms |= {5 + offset: each for offset, each in (norms | product).items()}
    if bias_change is not None and stacked is None:
        norms[0], norms[4] = (feature_norms(each.add_(bias_change), dim) for each in (update, output))
    elif bias_change is not None and stacked is not None:
        norms[0], norms[4] = torch.linalg.vector_norm(stacked[::2].add_(bias_change), dim=-1).flatten(1)
    return norms


def product_norms(
    function: Callable[[Tensor, Tensor], Tensor],
    weight_change: Tensor,
    reference_weight: Tensor,
    input_change: Tensor,
    x: Tensor,
    *,
    dim: int,
    bias_change: Tensor | None,
    twice: bool,
) -> Norms:
    """The norms of what is multiplied with a weight, as for :func:`linear_change`, and of the change of the output.

    With ``twice`` they are there without the bias too; see :func:`change_norms`.
    """
    norms = input_norms(x, input_change, dim)
    change = linear_change(function, weight_change, reference_weight, input_change, x)
    return norms | change_norms(change, dim, norms if twice else None, bias_change)


def mean_norm(values: Tensor, dim: int = -1) -> Tensor:
    """The mean of the :func:`feature_norms`; NaN if there are none."""
    return feature_norms(values, dim).mean(dtype=wide_dtype(values.device))


def weight_share(weight_update: Tensor, input_drift: Tensor) -> Tensor:
    """The weights' share in a layer's change, by norms, between 0 and 1; 0 where nothing has changed."""
    both = weight_update + input_drift
    return (weight_update / both).masked_fill_(both == 0, 0.0)
