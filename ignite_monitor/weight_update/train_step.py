"""Gradient norms and weight changes of one train step, parameter by parameter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from typing import NamedTuple

import torch
from torch import Tensor

from ignite_monitor.events.gradient_tracker import OptimizerStep
from ignite_monitor.model.devices import move
from ignite_monitor.model.norms import summed_values
from ignite_monitor.model.sampled_step import SampledStep

_ROWS = 5  # gradient, weights, change, and the counts of lost updates and of gradients


class StepResult(NamedTuple):
    """Norms over a train step by parameter, NaN where they are not known."""

    gradients: Tensor  # inf for gradients that are not finite
    has_gradients: bool
    weights: Tensor  # before the step
    changes: Tensor
    moved: Tensor | None = None  # the parameters that were to move; None if there was no step
    lost: Tensor | None = None  # fraction of the elements with a gradient whose update was lost to rounding


class MeasuredStep(SampledStep):
    """Measures the train steps of a run, one after the other.

    The gradient norm of a parameter is that of the last backward before its own last step, or without a step of the
    last backward. A gradient that no backward has left in this iteration is measured when a step starts.
    """

    def start(self) -> None:
        """Prepare for a train step."""
        super().start()
        self._latest: dict[int, Tensor] = {}
        self._taken: dict[int, Tensor | None] = {}
        self._used: dict[int, Tensor | None] = {}
        self._nonzero: dict[int, Tensor] = {}  # the elements of low-precision parameters that had a gradient

    def gradients_ready(self, reached: Set[int], scale: Tensor | None) -> None:
        """Measure the gradients that a backward may have changed, by ids of parameters; they are scaled."""
        self._measure((index for index in self.own if id(self.samples.parameters[index]) in reached), scale)

    def measured_step_started(self, step: OptimizerStep) -> None:
        """Note an optimizer's step that is about to be made, and the gradients that it is made with."""
        parameters = self.samples.parameters
        indices = [index for index in self.step_started(step.optimizer) if parameters[index].grad is not None]
        if step.tracker.reduced:  # else it is another gradient on each rank
            self._measure((index for index in indices if index not in self._latest), step.loss_scale)
        self._taken = {index: self._latest.get(index) for index in indices}

    def step_completed(self) -> None:
        """Keep the norms of the gradients that a step was made with: later ones are of other optimizers."""
        self._used |= self._taken
        self._taken = {}

    def rounds(self, names: Iterable[str]) -> bool:
        """Return True if rounding may keep a parameter, by name, from moving."""
        return any(self.is_rounded(index) for index, name in enumerate(self.samples.names) if name in set(names))

    @torch.no_grad()
    def completed(self) -> StepResult | None:
        """Measure the train step that has returned; None if there was neither a gradient nor a step."""
        samples, own = self.samples, self.own
        known = {index: norm for index, norm in (self._latest | self._used).items() if norm is not None}
        if not known and not self.stepped:
            return None
        unknown = torch.full((), math.nan, dtype=samples.dtype, device=samples.device)
        rows = [torch.stack([known.get(index, unknown) for index in own])]
        rounded = {index for index in self._nonzero if self.is_rounded(index)}
        if self.stepped:
            changes = self.split(self.changes(own), own)
            rows += [samples.norms(self.before(own)), samples.norms(changes)]
            if rounded:
                # Counts, as norms of zeros and ones, so that ranks are combined as they are for norms.
                had = [
                    self._nonzero[index].to(change.dtype) if index in rounded else torch.zeros_like(change)
                    for index, change in zip(own, changes, strict=True)
                ]
                lost = [mask * (change == 0) for mask, change in zip(had, changes, strict=True)]
                rows += [samples.norms(lost), samples.norms(had)]
        at = move(torch.tensor(own, device="cpu"), samples.device)
        # A rank that made no step takes part with as many rows as one that did.
        rows += [torch.zeros_like(rows[0])] * (_ROWS - len(rows))
        measured = samples.over_ranks(torch.stack(rows), own) * samples.factors[at]
        table = torch.full((3, len(samples.parameters)), math.nan, dtype=measured.dtype, device=measured.device)
        gradients, weights, changed = table.index_copy_(1, at, measured[:3]).unbind()
        if not self.stepped:
            return StepResult(gradients, bool(known), weights, changed)
        moved = self.stepped.mask(len(samples.parameters), samples.device)
        lost_count, had_count = (measured[3:].square() * moved[at]).sum(1).unbind()
        return StepResult(gradients, bool(known), weights, changed, moved, lost_count / had_count if rounded else None)

    @torch.no_grad()
    def _measure(self, indices: Iterable[int], scale: Tensor | None) -> None:
        gradients = {
            index: parameter.grad
            for index in indices
            if (parameter := self.samples.parameters[index]).requires_grad and parameter.grad is not None
        }
        if not gradients:
            return
        parts = []
        for index, gradient in gradients.items():
            if gradient.layout != torch.strided:  # all of it is measured, so nothing is to be estimated
                parts.append(summed_values(gradient).flatten().to(self.samples.device) / self.samples.factors[index])
                continue
            parts.append(self.samples.take(index, gradient))
            if index not in self._used and self.is_rounded(index):
                self._nonzero[index] = parts[-1] != 0
        norms = self.samples.norms(parts).nan_to_num(math.inf, math.inf)
        norms = norms if scale is None else norms / scale.to(norms)
        self._latest |= zip(gradients, norms.unbind(), strict=True)
