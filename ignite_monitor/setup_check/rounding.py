"""Fraction of the updates of low-precision weights that rounding loses."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from ignite_monitor.model.sampled_step import SampledStep


class LostUpdates(SampledStep):
    """Counts sampled elements with a gradient that a step leaves as they are; of DTensors those of this rank."""

    @torch.no_grad()
    def keep_gradients(self, optimizer: Optimizer) -> None:
        """Note which elements have a gradient, when a step starts."""
        self.step_started(optimizer)
        gradients = {index: self.samples.parameters[index].grad for index in self.own}
        self._had = {
            index: self.samples.take(index, gradient) != 0
            for index, gradient in gradients.items()
            if gradient is not None and gradient.layout == torch.strided
        }

    @torch.no_grad()
    def fraction(self) -> Tensor | None:
        """Return the fraction after the step; None if the optimizer rounds no weights."""
        had = {index: mask for index, mask in self._had.items() if self.is_rounded(index)}
        if not had:
            return None
        mask = torch.cat([*had.values()])
        return (mask & (self.changes([*had]) == 0)).sum() / mask.sum()
