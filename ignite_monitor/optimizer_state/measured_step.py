"""Gradients against an optimizer's moments, from sampled elements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ignite_monitor.events.gradient_tracker import OptimizerStep
from ignite_monitor.model._torch import foreach_norm
from ignite_monitor.model.devices import move, move_like
from ignite_monitor.model.names import is_from_torch
from ignite_monitor.model.sampling import ParameterSamples

_MOMENTUM = ("exp_avg", "momentum_buffer")
_SQUARE = ("max_exp_avg_sq", "exp_avg_sq")  # AMSGrad divides by the largest so far
_DECOUPLED = ("AdamW", "Muon")  # their weight decay is no part of the gradient


class MomentStatistics(NamedTuple):
    """Statistics of a step."""

    names: list[str]
    statistics: Tensor  # (3, parameters): RMS, epsilon-dominated fraction, momentum cosine; NaN if not known
    update_norm: Tensor | float  # the l2 norm of the change of all parameters; NaN if one is not measured


class MomentMeasurement(ParameterSamples):
    """Measures the steps of an optimizer of torch, one after the other."""

    def start(self) -> None:
        """Prepare for a train step."""
        super().start()
        self._members: list[int] = []

    @torch.no_grad()
    def keep_gradients(self, step: OptimizerStep) -> None:
        """Keep samples of the gradients that a step uses: unscaled, negated where they are maximized, with decay."""
        self.step_started(step.optimizer, step.made)
        self._made, parameters = step.made, self.parameters
        gradients = {id(item): item.grad for item in step.parameters if item.grad is not None and item.numel()}
        self._members = [
            index
            for index in (self.indices if is_from_torch(step.optimizer) else ())
            if (gradient := gradients.get(id(parameters[index]))) is not None
            and gradient.layout == torch.strided
            and not gradient.is_complex()
        ]
        self._all_measured = len(self._members) == len(gradients)
        if not self._members:
            return
        self._gradient = self.flat(self._members, [parameters[index].grad for index in self._members])
        if step.loss_scale is not None:
            self._gradient /= move_like(step.loss_scale, self._gradient)
        groups = {id(item): group for group in step.optimizer.param_groups for item in group["params"]}
        self._groups = [groups[id(parameters[index])] for index in self._members]
        adds_decay = type(step.optimizer).__name__ not in _DECOUPLED
        parts = self.split(self._gradient, self._members)
        for index, group, part in zip(self._members, self._groups, parts, strict=True):
            if group.get("maximize"):
                part.neg_()
            if adds_decay and group.get("weight_decay") and not group.get("decoupled_weight_decay"):
                part.add_(self.take(index, parameters[index]), alpha=group["weight_decay"])

    @torch.no_grad()
    def completed(self, optimizer: Optimizer) -> MomentStatistics | None:
        """Measure the step that has returned; None if there is nothing to be measured."""
        members = self._members
        if not members:
            return None
        states = [optimizer.state.get(self.parameters[index], {}) for index in members]
        momenta, squares = ([_first(state, names) for state in states] for names in (_MOMENTUM, _SQUARE))
        if all(moment is None for moment in momenta + squares):
            return None
        eps = self._vector([group.get("eps", math.nan) for group in self._groups])
        decay = self._vector([group.get("betas", (math.nan, math.nan))[1] for group in self._groups])
        # Of the root of the second moment; 1 without one.
        correction = (1 - decay ** self._vector([state.get("step", math.nan) for state in states])).rsqrt()
        correction = correction.nan_to_num(1.0, 1.0)
        lengths = torch.tensor([self.sizes[index] for index in members], device="cpu")
        min_root = (eps.nan_to_num(0.0) / correction)[move(torch.repeat_interleave(lengths), self.device)]
        flats = _compared(self._gradient, self._elements(momenta), self._elements(squares), min_root)
        norms = list[Tensor]()
        for same in (flats[:-2], flats[-2:]):  # one launch on a device takes tensors of one dtype
            parts = [part for flat in same for part in self.split(flat, members)]
            norms += foreach_norm(parts, 2.0, dtype=self.dtype)
        norms += self.norms(self.split(self.changes(members), members)).unbind()
        at = move(torch.tensor(members, device="cpu"), self.device)
        table = self.over_ranks(torch.stack(norms).view(len(flats) + 1, -1), members)
        if isinstance(self._made, Tensor):
            table = torch.where(move(self._made, self.device), table, math.nan)
        used, *rows, changes = table.unbind()
        few = used.square() < self.min_nonzero[at]
        update_norm = (changes * self.factors[at]).masked_fill(few, math.nan).square().sum().sqrt()
        return MomentStatistics(
            [self.names[index] for index in members],
            _statistics(rows, eps, correction, self.counts[at], few),
            update_norm if self._all_measured else math.nan,
        )

    def _elements(self, moments: Sequence[Tensor | None]) -> Tensor:
        """The sampled elements of moments, one parameter after the other; NaN without a moment."""
        unknown = self.split(torch.full_like(self._gradient, math.nan), self._members)
        return torch.cat([
            part if moment is None else self.take(index, moment)
            for index, part, moment in zip(self._members, unknown, moments, strict=True)
        ])  # fmt: skip

    def _vector(self, values: Sequence[Any]) -> Tensor:
        """One tensor of numbers and tensors with one element, without synchronization."""
        device, dtype = self.device, self.dtype
        if not any(isinstance(value, Tensor) for value in values):
            return move(torch.tensor(values, dtype=dtype, device="cpu"), device)
        tensors = [
            value if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype, device="cpu") for value in values
        ]
        if len({tensor.device for tensor in tensors}) > 1:
            tensors = [move(tensor, device) for tensor in tensors]
        return move(torch.stack([tensor.detach().reshape(()).to(dtype) for tensor in tensors]), device)


def _first(state: Mapping[str, Any], names: Sequence[str]) -> Tensor | None:
    return next((state[name] for name in names if isinstance(state.get(name), Tensor)), None)


def _compared(gradient: Tensor, momentum: Tensor, square: Tensor, min_root: Tensor) -> Sequence[Tensor]:
    """First 1 where there is a gradient, then numbers by element, whose norms :func:`_statistics` needs.

    All have the gradient's dtype but the last two, the parts of a product, which have the widest.

    ``min_root`` is the smallest root to divide by.
    """
    root = square.sqrt()
    # 0 / 0 is 0.
    ratio = gradient / root.maximum(min_root.clamp(min=torch.finfo(root.dtype).tiny).to(root.dtype))
    dominated, used = (root < min_root).to(root.dtype), (gradient != 0).to(root.dtype)
    product = gradient.to(min_root.dtype) * momentum
    return used, gradient, momentum, ratio, dominated, product.clamp(min=0).sqrt(), (-product).clamp(min=0).sqrt()


def _statistics(norms: Sequence[Tensor], eps: Tensor, correction: Tensor, counts: Tensor, few: Tensor) -> Tensor:
    gradient, momentum, ratio, dominated, positive_part, negative_part = norms
    rms = ratio / counts.sqrt() / correction
    unknown = 0 * rms  # NaN where the second moment is missing or not finite
    fraction = dominated.square() / counts + unknown + 0 * eps
    lengths = gradient * momentum
    info = torch.finfo(lengths.dtype)
    # Products that have lost digits, and samples of too few gradients.
    lengths = lengths.masked_fill((lengths <= info.tiny / info.eps) | few, math.nan)
    cosine = (positive_part.square() - negative_part.square()) / lengths
    return torch.stack([(rms + unknown).masked_fill(few, math.nan), fraction.clamp(0, 1), cosine.clamp(-1, 1)])
