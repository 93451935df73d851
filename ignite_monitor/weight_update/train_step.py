"""Gradient norms and weight changes of one train step, parameter by parameter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.events.gradient_tracker import OptimizerStep
from ignite_monitor.model.devices import move
from ignite_monitor.model.norms import norms as norms_of
from ignite_monitor.model.sampled_step import StepMeasurement
from ignite_monitor.model.sampling import NARROW

_SMALL = 1 << 14  # elements up to which float64 sums are no slower
_ROWS = 7  # of norms to combine over ranks
_FEW = 32  # moved elements of a sample, from which a ratio has an error of about 15 %


class MeasuredUpdates(NamedTuple):
    """Results of a train step by parameter: NaN, or False, where they are not known."""

    gradients: Tensor  # norms; inf for gradients that are not finite
    has_gradients: bool
    weights: Tensor  # norms before the step
    ratios: Tensor
    unmoved: Tensor  # True if all elements were compared, and none has moved
    few: Tensor  # True if too few elements of a sample have moved to estimate the ratio
    stepped: Tensor  # True if a step was to move it
    lost: Tensor | None  # fraction of the elements with a gradient whose update was lost to rounding


class UpdateMeasurement(StepMeasurement):
    """Measures the train steps of a run, one after the other.

    The gradient norm of a parameter is that of the last backward before its own last step, or without a step of the
    last backward. A gradient that no backward has left in this iteration is measured when a step starts. Norms of
    gradients and weights are those of all elements; changes are sampled.
    """

    def __init__(self, model: nn.Module, sample_size: int | None, optimizer: Optimizer | None, eps: float) -> None:
        super().__init__(model, sample_size, optimizer)
        self._eps = eps
        # Updates of low-precision weights that rounding loses are no reason to copy the weights.
        is_narrow = torch.tensor(
            [item.dtype in NARROW for item in self.samples.parameters], dtype=torch.bool, device="cpu"
        )
        least = (self.samples.counts / _FEW).clamp(max=_FEW)
        self._least_moved = least.masked_fill(move(is_narrow, self.samples.device), 1.0)

    @torch.no_grad()
    def start(self) -> None:
        """Prepare for a train step."""
        super().start()
        self._after_backward: dict[int, Tensor] = {}  # norms of gradients
        self._of_running_step: dict[int, Tensor | None] = {}
        self._of_last_step: dict[int, Tensor | None] = {}
        self._had_gradient: dict[int, Tensor] = {}  # the elements of low-precision parameters that had a gradient
        sampled = [index for index in self.indices if self.samples.is_sampled(index)]
        self._whole_norms = self._norms({index: self.samples.parameters[index] for index in sampled})

    def gradients_ready(self, reached: Set[int], scale: Tensor | None) -> None:
        """Measure the gradients that a backward may have changed, by ids of parameters; they are scaled."""
        self._measure((index for index in self.indices if id(self.samples.parameters[index]) in reached), scale)

    def measured_step_started(self, step: OptimizerStep) -> None:
        """Note an optimizer's step that is about to be made, and the gradients that it is made with."""
        parameters = self.samples.parameters
        indices = [index for index in self.step_started(step.optimizer) if parameters[index].grad is not None]
        if step.tracker.reduced:  # else it is another gradient on each rank
            self._measure((index for index in indices if index not in self._after_backward), step.loss_scale)
        self._of_running_step = {index: self._after_backward.get(index) for index in indices}

    def step_completed(self) -> None:
        """Keep the norms of the gradients that a step was made with: later ones are of other optimizers."""
        self._of_last_step |= self._of_running_step
        self._of_running_step = {}

    def any_rounded(self, names: Iterable[str]) -> bool:
        """Return True if rounding may keep a parameter, by name, from moving."""
        return any(self.is_rounded(index) for index, name in enumerate(self.samples.names) if name in set(names))

    @torch.no_grad()
    def completed(self) -> MeasuredUpdates | None:
        """Measure the train step that has returned; None if there was neither a gradient nor a step."""
        samples, members = self.samples, self.indices
        gradients = self._after_backward | self._of_last_step
        known = {index: norm for index, norm in gradients.items() if norm is not None}
        if not known and not self.stepped:
            return None
        unknown = torch.full((), math.nan, dtype=samples.dtype, device=samples.device)
        rows = [torch.stack([known.get(index, unknown) for index in members])]
        rounded = {index for index in self._had_gradient if self.is_rounded(index)}
        if self.stepped:
            flat = self.changes(members)
            before = samples.norms(self.before(members)).unbind()
            rows += [
                torch.stack([self._whole_norms.get(index, norm) for index, norm in zip(members, before, strict=True)])
            ]
            rows += [samples.norms(self.split(flat, members)), self._counts(flat != 0)]
            sampled = torch.tensor([samples.is_sampled(index) for index in members], dtype=samples.dtype, device="cpu")
            rows += [move(sampled, samples.device)]
            if rounded:
                parts = zip(members, self.split(torch.zeros_like(flat, dtype=torch.bool), members), strict=True)
                had = torch.cat([self._had_gradient[index] if index in rounded else part for index, part in parts])
                rows += [self._counts(had & (flat == 0)), self._counts(had)]
        # A rank that made no step takes part with as many rows as one that did.
        rows += [torch.zeros_like(rows[0])] * (_ROWS - len(rows))
        measured = samples.over_ranks(torch.stack(rows), members)
        at = move(torch.tensor(members, device="cpu"), samples.device)
        table = torch.full((5, len(samples.parameters)), math.nan, dtype=measured.dtype, device=measured.device)
        norms, weights, changes, roots, sampled = table.index_copy_(1, at, measured[:5]).unbind()
        stepped, moved, is_sampled = self.stepped.mask(len(roots), samples.device), roots.square(), sampled > 0
        few = stepped & is_sampled & (moved < self._least_moved)
        ratios = changes * samples.factors / (weights + self._eps)
        ratios = ratios.masked_fill(~stepped | ratios.isinf() | few, math.nan)
        unmoved = ~is_sampled & (moved == 0)
        lost, had_gradient = (measured[5:].square() * stepped[at]).sum(1).unbind()
        fraction = lost / had_gradient if rounded else None
        return MeasuredUpdates(norms, bool(known), weights, ratios, unmoved, few, stepped, fraction)

    def _counts(self, flags: Tensor) -> Tensor:
        """Roots of the numbers of True by parameter: norms, so that ranks are combined as they are for norms."""
        return self.samples.norms(self.split(flags.to(torch.float32), self.indices))

    @torch.no_grad()
    def _measure(self, indices: Iterable[int], scale: Tensor | None) -> None:
        gradients = {
            index: parameter.grad
            for index in indices
            if (parameter := self.samples.parameters[index]).requires_grad and parameter.grad is not None
        }
        for index, norm in self._norms(gradients).items():
            self._after_backward[index] = norm if scale is None else norm / scale.to(norm)
            gradient = gradients[index]
            if index not in self._of_last_step and gradient.layout == torch.strided and self.is_rounded(index):
                self._had_gradient[index] = self.samples.take(index, gradient) != 0

    def _norms(self, tensors: dict[int, Tensor]) -> dict[int, Tensor]:
        """Norms by index of a parameter, of all elements on this rank; inf where they are not finite."""
        samples, norms = self.samples, dict[int, Tensor]()
        small = [i for i, item in tensors.items() if item.layout == torch.strided and item.numel() <= _SMALL]
        rest = [i for i in tensors if i not in small]
        if small:
            together = samples.norms([samples.take(i, tensors[i], whole=True) for i in small])
            norms |= zip(small, together.nan_to_num(math.inf, math.inf).unbind(), strict=True)
        if rest:
            together = move(norms_of([samples.own_part(i, tensors[i]) for i in rest]), samples.device)
            norms |= zip(rest, together.nan_to_num(math.inf, math.inf).unbind(), strict=True)
        return norms
