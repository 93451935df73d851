"""Skipping a step of an optimizer: no update, no weight decay, no momentum, no step count.

- Fused optimizers of ``torch.optim`` skip by their ``found_inf``, as with GradScaler: on the device.
- From others of ``torch.optim`` gradients are hidden during the step, which then does nothing.
- The step of any other is not run: it may update weights without gradients too. A call with a closure, or that bypasses
  ``optimizer.step``, is refused, since parameters may have changed before it can be skipped.
- LBFGS is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer

from ignite_monitor.events.hooks import Patch, remove_all
from ignite_monitor.model.names import parameters_of
from ignite_monitor.model.norms import any_dtensor

_FIX = "skip the step in the train step, if engine.state.unhealthy_spike is True after backward"


def check_step(action: str, optimizer: Optimizer | None) -> None:
    """Refuse an optimizer whose steps cannot be skipped or clipped, with a ValueError."""
    if optimizer is None:
        raise ValueError(f"on_spike={action!r} needs the argument optimizer, in whose step it acts")
    optimizer, reason = _innermost(optimizer), None
    if action == "skip" and isinstance(optimizer, LBFGS):
        reason = "evaluates a closure more than once in a step"
    elif not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        reason = "does not call the constructor of torch.optim.Optimizer, and has no step hooks"
    if reason is not None:
        raise ValueError(f"on_spike={action!r} does not work with {type(optimizer).__name__}, which {reason}: {_FIX}")


class _SkippedError(Exception):
    """Ends a step before it begins."""


class StepSkipper:
    """Skips an optimizer's step from within, and restores everything after it."""

    def __init__(self) -> None:
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []
        self._found_inf: tuple[Any, Tensor | None] | None = None  # of which optimizer; before
        self._is_inside = self._is_skipped = False

    @contextmanager
    def context(self, optimizer: Any, completed: Callable[[Optimizer], None]) -> Iterator[None]:
        """Context of a train step; ``completed`` is called after a step that is not run."""
        optimizer, handles = _innermost(optimizer), list[Any]()
        if not _is_from_torch(optimizer):
            self._completed = functools.partial(completed, optimizer)
            handles.append(Patch(optimizer, "step", self._step))
            handles.append(optimizer.register_step_pre_hook(torch.compiler.disable(self._before_step)))
        try:
            yield
        finally:
            remove_all(handles)

    def _step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._is_inside = True
        try:
            return step(*args, **kwargs)
        except _SkippedError:
            return self._completed()
        finally:
            self._is_inside = self._is_skipped = False

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_inside or callable(kwargs.get("closure", args[1] if len(args) > 1 else None)):
            raise ValueError(
                f"on_spike='skip' can skip a step of {type(optimizer).__name__} only if it is called as "
                f"optimizer.step() after backward(), without a closure: call it so, or {_FIX}"
            )
        if self._is_skipped:
            raise _SkippedError

    def skip(self, optimizer: Optimizer, spike: Tensor, read: Callable[[Tensor], bool]) -> None:
        """Skip the step that starts if a 0-dim bool tensor is True; ``read`` reads it on the host, if need be."""
        if skips_on_device(optimizer):
            found_inf = getattr(optimizer, "found_inf", None)
            self._found_inf = optimizer, found_inf
            skipped = spike.to(torch.float32)
            if found_inf is not None:
                skipped = torch.maximum(found_inf, skipped.to(found_inf.device))
            optimizer.found_inf = skipped  # type: ignore[attr-defined]
        elif read(spike):
            self._is_skipped = not _is_from_torch(optimizer)
            for parameter in parameters_of(optimizer):
                if parameter.grad is not None:
                    self._hidden.append((parameter, parameter.grad))
                    parameter.grad = None

    def restore(self) -> None:
        """Restore what :meth:`skip` has changed."""
        while self._hidden:
            parameter, gradient = self._hidden.pop()
            if parameter.grad is None:
                parameter.grad = gradient
        if self._found_inf is not None:
            (optimizer, before), self._found_inf = self._found_inf, None
            if before is not None:
                optimizer.found_inf = before
            elif hasattr(optimizer, "found_inf"):
                del optimizer.found_inf


def hides_gradients(optimizer: Optimizer) -> bool:
    """Return True if its step is skipped by hiding its gradients."""
    return _is_from_torch(optimizer) and not isinstance(optimizer, LBFGS)


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return True if its next step can be skipped by its ``found_inf``."""
    if type(optimizer) not in (Adam, AdamW, SGD, Adagrad):  # a subclass may do more in its step
        return False
    if not all(group.get("fused") for group in optimizer.param_groups):
        return False
    stepping = [parameter for parameter in parameters_of(optimizer) if parameter.grad is not None]
    # At its first step fused SGD takes momentum buffers into use even if it skips, and never fills them.
    # Fused kernels do not mix sharded parameters with a plain found_inf.
    return all(parameter in optimizer.state for parameter in stepping) and not any_dtensor(stepping)


def _is_from_torch(optimizer: Optimizer) -> bool:
    # Their steps do nothing without gradients; a subclass may do more.
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")  # Adafactor and Muon: "torch.optim"


def _innermost(optimizer: Optimizer) -> Optimizer:
    """The optimizer that another one passes its steps to, as that of accelerate does."""
    inner = getattr(optimizer, "optimizer", None)
    return _innermost(inner) if isinstance(inner, Optimizer) else optimizer
