"""Gradients against an optimizer's moments, from sampled elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ignite_monitor.model.devices import upload
from ignite_monitor.monitor.sampled_step import SampledStep
from ignite_monitor.optimizer_state.moments import Moments


class StepResult(NamedTuple):
    """What is known of a step.

    Attributes:
        names: of the parameters.
        statistics: RMS, epsilon-dominated fraction and momentum cosine of each parameter, NaN where it has none:
            (3, parameters).
        update_norm: the l2 norm of the change of all parameters, 0-dim.
    """

    names: list[str]
    statistics: Tensor
    update_norm: Tensor


class MeasuredStep(SampledStep):
    """Measures the steps of an optimizer, one after the other."""

    def start(self) -> None:
        """Prepare for a train step."""
        super().start()
        self._members: list[int] = []

    @torch.no_grad()
    def keep_gradients(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        """Keep samples of the gradients that an optimizer is about to use, divided by a 0-dim scale."""
        self.step_started(optimizer)
        parameters = self.samples.parameters
        # Parameters with sparse gradients, complex ones and those without a gradient are not measured.
        self._members = [
            index
            for index in self.own
            if (gradient := parameters[index].grad) is not None
            and gradient.layout == torch.strided
            and not gradient.is_complex()
        ]
        if self._members:
            self._gradient = self.samples.flat(self._members, [parameters[index].grad for index in self._members])
            if scale is not None:
                self._gradient /= scale.to(self._gradient, non_blocking=True)

    @torch.no_grad()
    def completed(self, optimizer: Optimizer) -> StepResult | None:
        """Measure the step that has returned; None if there is nothing to be measured."""
        samples, members = self.samples, self._members
        if not members or not self.stepped:
            return None
        moments = Moments(optimizer, [samples.parameters[i] for i in members], samples.dtype, samples.device)
        if not moments:
            return None
        lengths = [len(each) for each in self.per_parameter(self._gradient, members)]
        change = self.after(members).sub_(self.before(members))
        momentum, square = (
            torch.cat([
                torch.zeros(length, device=samples.device) if moment is None else samples.take(index, moment)
                for index, moment, length in zip(members, of_kind, lengths, strict=True)
            ])
            for of_kind in (moments.momentum, moments.square)
        )  # fmt: skip
        owner = upload(torch.repeat_interleave(torch.tensor(lengths, device="cpu")), samples.device)
        least = moments.eps.nan_to_num(0.0) / moments.correction
        elements = _elements(self._gradient, momentum, square, least.nan_to_num(0.0)[owner])
        flats = [*elements, change]
        norms = samples.norms([part for flat in flats for part in self.per_parameter(flat, members)])
        at = upload(torch.tensor(members, device="cpu"), samples.device)
        *rows, change_norm = samples.over_ranks(norms.view(len(flats), -1), members).unbind()
        statistics = _statistics(torch.stack(rows), moments, samples.counts[at])
        moved = self.stepped.mask(len(samples.parameters), samples.device)[at]
        total = torch.where(moved, change_norm * samples.factors[at], 0.0).square().sum().sqrt()
        # 0 / 0 without a step.
        update_norm = total / moved.any()
        names = [samples.names[index] for index in members]
        return StepResult(names, torch.where(moved, statistics, math.nan), update_norm)


def _elements(gradient: Tensor, momentum: Tensor, square: Tensor, least: Tensor) -> Sequence[Tensor]:
    """Numbers for each element, whose norms over a parameter :func:`_statistics` needs.

    Args:
        least: the smallest root of the second moment, not bias-corrected, that a gradient is divided by.
    """
    root = square.sqrt()
    # Where nothing is divided by anything the ratio is 0.
    ratio = gradient / root.maximum(least.clamp(min=torch.finfo(root.dtype).tiny).to(root.dtype))
    dominated = (root < least).to(root.dtype)
    product = gradient.to(least.dtype) * momentum
    return gradient, momentum, ratio, dominated, product.clamp(min=0).sqrt(), (-product).clamp(min=0).sqrt()


def _statistics(norms: Tensor, moments: Moments, counts: Tensor) -> Tensor:
    gradient, momentum, ratio, dominated, above, below = norms.unbind()
    rms = ratio / counts.sqrt() / moments.correction
    # NaN where the second moment, or its eps, is missing or not finite.
    fraction = dominated.square() / counts + 0 * rms + 0 * moments.eps
    lengths = gradient * momentum
    # The products of smaller numbers have lost digits.
    info = torch.finfo(norms.dtype)
    cosine = (above.square() - below.square()) / lengths.masked_fill(lengths <= info.tiny / info.eps, math.nan)
    return torch.stack([rms + 0 * rms, fraction.clamp(0, 1), cosine.clamp(-1, 1)])
