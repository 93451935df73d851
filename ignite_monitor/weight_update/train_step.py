"""Gradient norms and weight changes of one train step, parameter by parameter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.events.gradient_tracker import OptimizerStep
from ignite_monitor.model.devices import move
from ignite_monitor.model.hashes import hashes_of
from ignite_monitor.model.norms import norms
from ignite_monitor.model.sampling import NARROW, ParameterSamples

_ROWS = 9  # of norms to combine over ranks


class MeasuredUpdates(NamedTuple):
    """Results of a train step by parameter: NaN, or False, where they are not known."""

    gradients: Tensor  # norms; inf for gradients that are not finite
    has_gradients: bool
    weights: Tensor  # norms before the step
    drifts: Tensor  # as ratios, of the changes from the start of the last measured train step to that of this one
    ratios: Tensor
    unmoved: Tensor  # True if all elements were compared, and no step has moved one
    few: Tensor  # True if too few elements of a sample have moved to estimate the ratio
    stepped: Tensor  # True if a step was to move it
    lost: Tensor | None  # fraction of the elements with a gradient whose update was lost to rounding


class UpdateMeasurement(ParameterSamples):
    """Measures the train steps of a run, one after the other.

    The gradient norm of a parameter is that of the last backward before its own last step, or without a step of the
    last backward. A gradient that no backward has left in this iteration is measured when a step starts. Norms of
    gradients and weights are those of all elements; changes are sampled.
    """

    def __init__(self, model: nn.Module, sample_size: int | None, optimizer: Optimizer | None, eps: float) -> None:
        super().__init__(model, sample_size, optimizer)
        self._eps = eps
        self._narrow = [parameter.dtype in NARROW for parameter in self.parameters]
        # Updates of low-precision weights that rounding loses are no reason to copy the weights.
        is_narrow = torch.tensor(self._narrow, dtype=torch.bool, device="cpu")
        self._min_moved = self.min_nonzero.masked_fill(move(is_narrow, self.device), 1.0)
        self._distances: Tensor | None = None  # of all indices, from start to start since the last results; None for 0

    @torch.no_grad()
    def start_from(self, hashes: Tensor) -> None:
        """Prepare for a train step; the first one takes parameters with other :meth:`hashes` for moved."""
        before = self._before
        super().start()
        self._add_distances(before, hashes)
        self._after_backward: dict[int, Tensor] = {}  # norms of gradients
        self._of_last_step: dict[int, Tensor | None] = {}
        self._between_steps = torch.zeros_like(self.factors)  # norms of changes before further steps, added
        self._had_gradient: dict[int, Tensor] = {}  # the elements of low-precision parameters that had a gradient
        self._weights = self._norms({index: self.parameters[index] for index in self.indices}, math.nan)

    def hashes(self) -> Tensor:
        """Hash all parameters as they were when the last results were known; 0 for those that have moved since."""
        hashes = torch.zeros(len(self.parameters), dtype=torch.int64, device=self.device)
        values = hashes_of({self.names[i]: copy for i, copy in self._before.items()}, hashes.device)
        kept = values if self._distances is None else values * (self._distances == 0)
        return hashes.index_copy(0, self._to_device(self.indices), kept)

    def _add_distances(self, before: Mapping[int, Tensor], hashes: Tensor) -> None:
        """Add the changes between the starts of two train steps; infinite where they can't be compared."""
        after, unread = self._before, self._distances
        if not after:
            self._distances = None
        elif not before:
            is_same = self.hashes() == move(hashes, self.device)
            self._distances = torch.where(is_same[self._to_device(self.indices)], 0.0, math.inf)
        else:
            known = [
                before[i] if i in before and len(before[i]) == len(it) else math.inf + it for i, it in after.items()
            ]
            changes = torch.cat(known).sub_(self._flat_before)
            self._distances = self.norms(self.split(changes, self.indices))
            if unread is not None:
                self._distances += unread if [*before] == [*after] else math.inf

    def _to_device(self, indices: Iterable[int]) -> Tensor:
        return move(torch.tensor([*indices], dtype=torch.int64, device="cpu"), self.device)

    def gradients_ready(self, reached: Set[int], scale: Tensor | None) -> None:
        """Measure the gradients that a backward may have changed, by ids of parameters; they are scaled."""
        self._measure((index for index in self.indices if id(self.parameters[index]) in reached), scale)

    def measured_step_started(self, step: OptimizerStep) -> None:
        """Note an optimizer's step that is about to be made, and keep the norms of the gradients that it uses."""
        parameters = self.parameters
        indices = [
            index for index in self.step_started(step.optimizer, step.made) if parameters[index].grad is not None
        ]
        if step.tracker.reduced:  # else it is another gradient on each rank
            self._measure((index for index in indices if index not in self._after_backward), step.loss_scale)
        if again := [index for index in indices if index in self._of_last_step]:
            changes = self.norms(self.split(self.changes(again), again))
            self._between_steps.index_add_(0, self._to_device(again), changes)
        self._of_last_step |= {index: self._after_backward.get(index) for index in indices}

    @torch.no_grad()
    def completed(self) -> MeasuredUpdates | None:
        """Measure the train step that has returned; None if there was neither a gradient nor a step."""
        members = self.indices
        gradients = self._after_backward | self._of_last_step
        known = {index: norm for index, norm in gradients.items() if norm is not None}
        if not known and not self.stepped:
            return None
        unknown = torch.full((), math.nan, dtype=self.dtype, device=self.device)
        at = self._to_device(members)
        factors = self.factors[at]
        distances = torch.zeros_like(factors) if self._distances is None else self._distances * factors
        rows, self._distances = [torch.stack([known.get(i, unknown) for i in members]), self._weights, distances], None
        has_rounded = bool(self._had_gradient) and self.keeps_no_copies
        if self.stepped:
            flat = self.changes(members)
            # Each rank scales its own part: another one may have learned already that the parameter needs no sample.
            rows += [self.norms(self.split(flat, members)) * factors, self._counts(flat != 0)]
            rows += [factors - 1, self._between_steps[at]]
            if has_rounded:
                parts = zip(members, self.split(torch.zeros_like(flat, dtype=torch.bool), members), strict=True)
                had = torch.cat([self._had_gradient.get(*pair) for pair in parts])
                rows += [self._counts(had & (flat == 0)), self._counts(had)]
        # A rank that made no step takes part with as many rows as one that did.
        rows += [torch.zeros_like(rows[0])] * (_ROWS - len(rows))
        measured = self.over_ranks(torch.stack(rows), members)
        table = torch.full((7, len(self.parameters)), math.nan, dtype=measured.dtype, device=measured.device)
        norms, weights, distances, changes, roots, sampled, _ = table.index_copy_(1, at, measured[:7]).unbind()
        stepped, moved, is_sampled = self.stepped.mask(len(roots), self.device), roots.square(), sampled > 0
        few = stepped & is_sampled & (moved < self._min_moved)
        sizes = weights + self._eps
        ratios = changes / sizes
        ratios = ratios.masked_fill(~stepped | ratios.isinf() | few, math.nan)
        unmoved = table[4:].sum(0) == 0  # not sampled, and neither moved nor moved back by two steps
        lost = (measured[7:].square() * stepped[at]).sum(1) if has_rounded else None
        fraction = None if lost is None else lost[0] / lost[1]
        return MeasuredUpdates(norms, bool(known), weights, distances / sizes, ratios, unmoved, few, stepped, fraction)

    def _counts(self, flags: Tensor) -> Tensor:
        """Roots of the numbers of True by parameter: norms, so that ranks are combined as they are for norms."""
        return self.norms(self.split(flags.to(torch.float32), self.indices))

    @torch.no_grad()
    def _measure(self, indices: Iterable[int], scale: Tensor | None) -> None:
        candidates = {index: self.parameters[index] for index in indices}
        gradients = {i: item.grad for i, item in candidates.items() if item.requires_grad and item.grad is not None}
        if not gradients:
            return
        values = self._norms(gradients, math.inf)
        values = values if scale is None else values / move(scale.to(values.dtype), values.device)
        self._after_backward |= zip(gradients, values.unbind(), strict=True)
        for index, gradient in gradients.items():
            if self._narrow[index] and index not in self._of_last_step and gradient.layout == torch.strided:
                self._had_gradient[index] = self.take(index, gradient) != 0

    def _norms(self, tensors: Mapping[int, Tensor], nonfinite: float) -> Tensor:
        """Norms of tensors by index of a parameter, of all elements on this rank; ``nonfinite`` if they are not."""
        parts = [self.own_part(*pair) for pair in tensors.items()]
        values = move(norms(parts), self.device) if parts else self.factors[:0]
        return values.nan_to_num(nonfinite, nonfinite)
