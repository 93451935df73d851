"""Gradients with which the optimizers of a model start their steps."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from ignite_monitor.events.gradient_tracker import OptimizerStep
from ignite_monitor.model.devices import move_like
from ignite_monitor.model.dtensor import is_dtensor, whole_tensor
from ignite_monitor.model.names import parameters_of


class StepGradients:
    """Measure the gradient of each parameter at the start of the first step of an iteration that uses it, unscaled.

    ``measure`` is called with a parameter and its whole gradient, which changes later on.
    """

    def __init__(self, parameters: Collection[nn.Parameter], measure: Callable[[nn.Parameter, Tensor], None]) -> None:
        self._parameters = parameters
        self._measure = measure
        self._seen: set[nn.Parameter] = set()
        self._sharded: dict[nn.Parameter, tuple[Tensor, Tensor | None]] = {}  # gradients and their scale

    @torch.no_grad()
    def step_started(self, step: OptimizerStep) -> None:
        """Measure the gradients of a step, and keep sharded ones."""
        for parameter in parameters_of(step.optimizer) if step.tracker.reduced else ():
            if parameter not in self._parameters or parameter.grad is None or parameter in self._seen:
                continue
            self._seen.add(parameter)
            if is_dtensor(parameter):  # gathering takes all ranks, and another one may make no step
                self._sharded[parameter] = parameter.grad.clone(), step.loss_scale
            else:
                self._measure(parameter, _unscaled(whole_tensor(parameter.grad), step.loss_scale))

    @torch.no_grad()
    def gather(self) -> None:
        """Measure sharded gradients, after the train step: a collective, whatever steps a rank has made."""
        for parameter in filter(is_dtensor, self._parameters):
            gradient, scale = self._sharded.pop(parameter, (None, None))
            whole = whole_tensor(parameter if gradient is None else gradient)
            if gradient is not None:
                self._measure(parameter, _unscaled(whole, scale))


def _unscaled(gradient: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return gradient
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    return wide / move_like(scale, wide)
