"""Making one step of an optimizer do nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer

from ignite_monitor.model.norms import any_sharded
from ignite_monitor.model.optimizers import parameters_of


def check_skippable(optimizer: Optimizer | None) -> None:
    """Refuse an optimizer whose step can't be left out.

    Raises:
        ValueError: if there is none, or it is LBFGS, whose step evaluates the loss as often as it likes.
    """
    if optimizer is None:
        raise ValueError("Argument skip_step needs the argument optimizer, whose step is to be skipped")
    if isinstance(optimizer, LBFGS):
        raise ValueError("Argument skip_step does not work with LBFGS, whose line search can't be left out")


class StepSkipper:
    """Makes an optimizer's step do nothing, from within the step, and puts everything back after it.

    Fused optimizers are told by their ``found_inf``, as GradScaler tells them, and skip on the device. From all
    others the gradients are hidden, which makes a step of any optimizer in ``torch.optim`` but LBFGS a no-op: no
    update, no weight decay, no momentum, no step count. A factor of 0 would not do: 0 * NaN is NaN.
    """

    def __init__(self) -> None:
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []
        self._told: tuple[Optimizer, Any] | None = None

    def skip(self, optimizer: Optimizer, spike: Tensor, read: Callable[[], bool]) -> Tensor:
        """Skip the step if the gradient is a spike.

        Args:
            spike: 0-dim bool tensor.
            read: reads ``spike`` on the host; called where it has to be known there.

        Returns:
            How many steps are skipped, 0 or 1, as a 0-dim bool tensor.
        """
        if _skips_on_device(optimizer):
            found_inf = getattr(optimizer, "found_inf", None)
            self._told = (optimizer, found_inf)
            told = spike.to(torch.float32)
            if found_inf is not None:
                told = torch.maximum(found_inf, told.to(found_inf.device))
            optimizer.found_inf = told  # type: ignore[attr-defined]
            return spike
        if read():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._hidden.append((parameter, parameter.grad))
                        parameter.grad = None
        return spike

    def restore(self) -> None:
        """Put back what :meth:`skip` changed."""
        while self._hidden:
            parameter, gradient = self._hidden.pop()
            if parameter.grad is None:
                parameter.grad = gradient
        if self._told is not None:
            optimizer, found_inf = self._told
            self._told = None
            if found_inf is not None:
                optimizer.found_inf = found_inf  # type: ignore[attr-defined]
            elif hasattr(optimizer, "found_inf"):
                del optimizer.found_inf


def _skips_on_device(optimizer: Optimizer) -> bool:
    if type(optimizer) not in (Adam, AdamW, SGD, Adagrad):  # a subclass may do more in its step
        return False
    if not all(group.get("fused") for group in optimizer.param_groups):
        return False
    stepping = [parameter for parameter in parameters_of(optimizer) if parameter.grad is not None]
    # At its first step fused SGD takes momentum buffers into use even where it skips, and never fills them.
    # Fused kernels do not mix sharded parameters with a plain found_inf.
    return all(parameter in optimizer.state for parameter in stepping) and not any_sharded(stepping)
