"""What gradients, moments and changes of many tensors come to."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ignite_monitor.model.samples import Group
from ignite_monitor.model.updates import row_norms


class Kind(enum.IntEnum):
    """Rows of what is copied, and of what comes of it in its place."""

    GRADIENT, MOMENTUM, SQUARE, BEFORE, AFTER = range(5)
    RATIO, CHANGE, BELOW, PRODUCT = range(2, 6)


class StateRows:
    """Room for samples of the gradients, moments and weights of the parameters of some groups, of one kind.

    Elements of all groups lie one after the other, so that few operations are made for all of them.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        device, dtype = groups[0].kind
        ends = [*itertools.accumulate((math.prod(group.shape) for group in groups), initial=0)]
        self._rows = torch.zeros(Kind.AFTER + 1, ends[-1], dtype=dtype, device=device)
        self._parts = [
            self._rows[:, start:end].unflatten(1, group.shape)
            for group, (start, end) in zip(groups, itertools.pairwise(ends), strict=True)
        ]
        self._rooms = [[group.room(each) for each in part] for group, part in zip(groups, self._parts, strict=True)]
        # Of each element: the parameter's index and, 0 for what is none, the root of what it weighs.
        self._index = torch.cat([each.index.repeat_interleave(each.shape[1]) for each in groups])
        self._weights: Tensor | None = None
        if any(group.weights is not None or group.elements is not None for group in groups):
            weights = torch.ones(ends[-1], dtype=dtype, device=device)
            for group, (start, end) in zip(groups, itertools.pairwise(ends), strict=True):
                own = weights[start:end].view(group.shape)
                for each in (group.weights, group.elements):
                    if each is not None:
                        own.mul_(each)
            self._weights = weights

    def copy(self, kind: Kind, sources: Sequence[Tensor | None]) -> None:
        """Copy the sampled elements of those sources that there are, one for each parameter of the model."""
        for group, rooms in zip(self.groups, self._rooms, strict=True):
            group.copy(sources, rooms[kind])

    def unscale(self, scale: Tensor) -> None:
        """Divide the gradients by what they are scaled by."""
        self._rows[Kind.GRADIENT].div_(scale.to(self._rows, non_blocking=True))

    def sums(self, least: Tensor) -> Tensor:
        """Sums over the elements of each row, for :func:`statistics_of`; uses up what has been copied.

        Args:
            least: of each parameter, the smallest root of the mean of squares that a gradient is divided by, as it is.

        Returns:
            Of shape (6, rows of all groups), in float64 where the device has it.
        """
        if self._rows.is_complex():  # of which nothing is said
            return torch.full((6, sum(group.shape[0] for group in self.groups)), math.nan, device=self._rows.device)
        gradient, momentum, root, change, below = self._rows.unbind()
        change.sub_(below)
        root.sqrt_()
        least = least.to(root.dtype).index_select(0, self._index)
        torch.lt(root, least, out=below)
        # Where nothing is to be divided by anything the ratio is 0.
        torch.maximum(root, least.clamp_(min=torch.finfo(root.dtype).tiny), out=root)
        torch.div(gradient, root, out=root)
        if self._weights is not None:
            self._rows.mul_(self._weights)
        norms = _joined([row_norms(part) for part in self._parts])
        products = gradient.to(norms.dtype).mul_(momentum).split([math.prod(group.shape) for group in self.groups])
        of_rows = [each.view(group.shape).sum(1) for each, group in zip(products, self.groups, strict=True)]
        return torch.cat([norms.square_(), _joined(of_rows).unsqueeze(0)])


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, -1)


def statistics_of(means: Tensor, correction: Tensor) -> Tensor:
    """Statistics of tensors, NaN where there is no such number.

    Args:
        means: what :meth:`StateRows.sums` gives, over the number of elements.
        correction: what the root of the mean of squares is to be multiplied by.

    Returns:
        Of shape (3, tensors): the root mean square of the gradient over the root of its squares' mean, of which part
        of the elements that root is smaller than the least, and the cosine of gradient and momentum.
    """
    gradient, momentum, rms, *_ = means.sqrt().unbind()
    rms = rms / correction
    # Of smaller numbers the products may have lost what the squares have not.
    info = torch.finfo(means.dtype)
    lengths = F.threshold(gradient * momentum, info.tiny / info.eps, math.nan)
    none = 0 * rms  # NaN where that is not finite
    found = torch.stack([rms + none, means[Kind.BELOW] + none, means[Kind.PRODUCT] / lengths])
    found[1:].clamp_(-1, 1)
    return found
