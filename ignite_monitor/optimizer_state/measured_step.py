"""Gradients against an optimizer's moments, from sampled elements."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ignite_monitor.events.gradient_tracker import OptimizerStep
from ignite_monitor.model._torch import foreach_norm
from ignite_monitor.model.devices import move, move_like
from ignite_monitor.model.dtensor import is_dtensor, local
from ignite_monitor.model.modes import has_local_data
from ignite_monitor.model.sampled_step import StepMeasurement

_MOMENTUM = ("exp_avg", "momentum_buffer")
_SQUARE = ("max_exp_avg_sq", "exp_avg_sq")  # AMSGrad divides by the largest so far
# Options of an optimizer that corrects no bias if they are False, and of one with weight decay apart from the gradient.
_CORRECTING = ("bias_correction", "correct_bias")
_DECOUPLED_STEPS = ("AdamW.step", "Muon.step", "Adafactor.step")
_DECOUPLED = ("decoupled_weight_decay", "weight_decouple")
_REAL = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# With these an optimizer keeps the second moment in a basis (SOAP, GaLore) or on a scale (Prodigy) of its own.
_OTHER_UNITS = frozenset({"Q", "GG", "projector", "ortho_matrix", "p0"})


class MomentStatistics(NamedTuple):
    """Statistics of a step."""

    names: list[str]
    statistics: Tensor  # (3, parameters): RMS, epsilon-dominated fraction, momentum cosine; NaN if not known
    update_norm: Tensor | float  # the l2 norm of the change of all parameters; NaN if one is not measured


class MomentMeasurement(StepMeasurement):
    """Measures the steps of an optimizer, one after the other."""

    def start(self) -> None:
        """Prepare for a train step."""
        super().start()
        self._members: list[int] = []
        self.has_unknown_decay = False  # a gradient may have been changed by weight decay

    @torch.no_grad()
    def keep_gradients(self, step: OptimizerStep) -> None:
        """Keep samples of the gradients that a step uses: unscaled, negated where they are maximized, with decay."""
        self.step_started(step.optimizer)
        self._made = step.made
        gradients = {index: self.samples.parameters[index].grad for index in self.indices}
        self._members = [
            index
            for index, gradient in gradients.items()
            if gradient is not None and gradient.layout == torch.strided and not gradient.is_complex()
        ]
        stepping = [item for item in step.parameters if item.grad is not None and item.numel()]
        self._all_measured = len(self._members) == len(stepping)
        if not self._members:
            return
        self._gradient = self.samples.flat(self._members, [gradients[index] for index in self._members])
        if step.loss_scale is not None:
            self._gradient /= move_like(step.loss_scale, self._gradient)
        groups = {id(item): group for group in step.optimizer.param_groups for item in group["params"]}
        self._groups = [groups.get(id(self.samples.parameters[index]), {}) for index in self._members]
        parts = self.split(self._gradient, self._members)
        for index, group, part in zip(self._members, self._groups, parts, strict=True):
            if group.get("maximize"):
                part.neg_()
            decay = _coupled_decay(step.optimizer, group)
            if decay is None:
                part.fill_(math.nan)
                self.has_unknown_decay = True
            elif isinstance(decay, Tensor) or decay:
                part += self.samples.take(index, self.samples.parameters[index]) * decay

    @torch.no_grad()
    def completed(self, optimizer: Optimizer) -> MomentStatistics | None:
        """Measure the step that has returned; None if there is nothing to be measured."""
        samples, members = self.samples, self._members
        if not members or self._made is False:
            return None
        states = [optimizer.state.get(samples.parameters[index], {}) for index in members]
        momenta = [self._moment(*pair, _MOMENTUM) for pair in zip(members, states, strict=True)]
        squares = [self._moment(*pair, _SQUARE) for pair in zip(members, states, strict=True)]
        if all(moment is None for moment in momenta + squares):
            return None
        eps, correction = self._eps_and_correction(states)
        lengths = torch.tensor([self.sizes[index] for index in members], device="cpu")
        min_root = (eps.nan_to_num(0.0) / correction)[move(torch.repeat_interleave(lengths), samples.device)]
        flats = _compared(self._gradient, self._elements(momenta), self._elements(squares), min_root)
        norms = list[Tensor]()
        for same in (flats[:-2], flats[-2:]):  # one launch on a device takes tensors of one dtype
            parts = [part for flat in same for part in self.split(flat, members)]
            norms += foreach_norm(parts, 2.0, dtype=samples.dtype)
        norms += samples.norms(self.split(self.changes(members), members)).unbind()
        at = move(torch.tensor(members, device="cpu"), samples.device)
        table = samples.over_ranks(torch.stack(norms).view(len(flats) + 1, -1), members)
        if isinstance(self._made, Tensor):
            table = torch.where(move(self._made, samples.device), table, math.nan)
        used, *rows, changes = table.unbind()
        few = used.square() < self.min_nonzero[at]
        update_norm = (changes * samples.factors[at]).masked_fill(few, math.nan).square().sum().sqrt()
        return MomentStatistics(
            [samples.names[index] for index in members],
            _statistics(rows, eps, correction, samples.counts[at], few),
            update_norm if self._all_measured else math.nan,
        )

    def _moment(self, index: int, state: Mapping[str, Any], names: Sequence[str]) -> Tensor | None:
        """The first tensor by these names in a parameter's state with a real number for each of its elements."""
        parameter = self.samples.parameters[index]
        if names is _SQUARE and not _OTHER_UNITS.isdisjoint(state):
            return None
        for name in names:
            value = state.get(name)
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.dtype in _REAL:
                part = local(value)
                is_like = is_dtensor(value) == is_dtensor(parameter) and part.device == local(parameter).device
                if is_like and has_local_data(part):
                    return value
        return None

    def _elements(self, moments: Sequence[Tensor | None]) -> Tensor:
        """The sampled elements of moments, one parameter after the other; NaN without a moment."""
        unknown = self.split(torch.full_like(self._gradient, math.nan), self._members)
        return torch.cat([
            part if moment is None else self.samples.take(index, moment)
            for index, part, moment in zip(self._members, unknown, moments, strict=True)
        ])  # fmt: skip

    def _eps_and_correction(self, states: Sequence[Mapping[str, Any]]) -> tuple[Tensor, Tensor]:
        """Epsilon, and the bias correction of the root of the second moment, 1 if it is not known."""
        steps, decays = [], []
        for state, group in zip(states, self._groups, strict=True):
            betas = group.get("betas") if all(group.get(name, True) for name in _CORRECTING) else None
            steps.append(state.get("step", group.get("step", group.get("k"))))
            decays.append(betas[1] if isinstance(betas, (tuple, list)) and len(betas) == 2 else None)
        decay = self._vector(decays) ** self._vector(steps)
        return self._vector([group.get("eps") for group in self._groups]), (1 - decay).rsqrt().nan_to_num(1.0, 1.0)

    def _vector(self, values: Sequence[Any]) -> Tensor:
        """One tensor of numbers and tensors with one element, without synchronization; NaN for anything else."""
        numbers = [value if isinstance(value, (float, int)) else math.nan for value in values]
        vector = torch.tensor(numbers, dtype=self.samples.dtype, device="cpu")
        if not any(isinstance(value, Tensor) for value in values):
            return move(vector, self.samples.device)
        scalars = [
            value.detach().reshape(()) if isinstance(value, Tensor) and value.numel() == 1 else number
            for value, number in zip(values, vector.unbind(), strict=True)
        ]
        if len({scalar.device for scalar in scalars}) > 1:
            scalars = [move(scalar, self.samples.device) for scalar in scalars]
        return move(torch.stack([scalar.to(self.samples.dtype) for scalar in scalars]), self.samples.device)


def _coupled_decay(optimizer: Optimizer, group: dict[str, Any]) -> Any:
    """The factor of the weights that a step adds to the gradient; None if it is not known."""
    step = inspect.unwrap(type(optimizer).step)
    is_torch, decay = step.__module__.startswith("torch.optim"), group.get("weight_decay") or 0.0
    if any(map(group.get, _DECOUPLED)) or (is_torch and step.__qualname__ in _DECOUPLED_STEPS):
        return 0.0
    return decay if is_torch or decay == 0 else None


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
