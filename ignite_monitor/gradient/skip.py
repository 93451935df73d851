"""Making one step of an optimizer do nothing: no update, no weight decay, no momentum, no step count.

=====================================  ===============================================================================
optimizer                              how its step is left out
=====================================  ===============================================================================
fused ones of ``torch.optim``          by their ``found_inf``, as GradScaler does it: on the device, nobody waits
others of ``torch.optim``              its gradients are hidden while it runs, which makes it do nothing
any other                              it is not run: gradients set to zero, flattened or counted would move weights
LBFGS, SAM and others that need a      refused: what a closure is evaluated at has been changed by then
closure
=====================================  ===============================================================================
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer

from ignite_monitor.model.norms import any_sharded
from ignite_monitor.model.optimizers import parameters_of

_FIX = "skip the step in the train step, if engine.state.unhealthy_spike is True after backward"


def check_skippable(optimizer: Optimizer | None) -> None:
    """Refuse an optimizer of which it is known that its step can't be left out.

    Raises:
        ValueError: if there is none, its step evaluates a closure when and as often as it likes, or it has no hooks.
    """
    if optimizer is None:
        raise ValueError("on_spike='skip' needs the argument optimizer, whose step is to be skipped")
    optimizer = _innermost(optimizer)
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    needs_closure = closure is not None and closure.default is inspect.Parameter.empty
    if (
        isinstance(optimizer, LBFGS)
        or needs_closure
        or (hasattr(optimizer, "first_step") and not _is_torchs(optimizer))
    ):
        raise ValueError(
            f"on_spike='skip' does not work with {name}, whose step evaluates a closure more than once: {_FIX}"
        )
    check_hooks("skip", optimizer)


def check_hooks(action: str, optimizer: Optimizer) -> None:
    """Refuse an optimizer without step hooks.

    Args:
        action: the value of ``on_spike`` that needs them.

    Raises:
        ValueError: if it has no hooks.
    """
    optimizer = _innermost(optimizer)
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise ValueError(
            f"on_spike={action!r} needs an optimizer with step hooks, but {type(optimizer).__name__} does not call the "
            f"constructor of torch.optim.Optimizer: {_FIX}"
        )


class _LeftOut(Exception):  # noqa: N818
    """Ends a step before it begins."""


class StepSkipper:
    """Makes an optimizer's step do nothing, from within the step, and puts everything back after it."""

    def __init__(self) -> None:
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []
        self._told: tuple[Optimizer, Any] | None = None
        self._is_inside = self._is_left_out = False

    @contextmanager
    def around(self, optimizer: Optimizer, completed: Callable[[Optimizer], None]) -> Iterator[None]:
        """What has to be around a train step so that steps can be left out.

        Args:
            completed: is told of a step that is not run, once it would have returned.
        """
        optimizer = _innermost(optimizer)
        if _is_torchs(optimizer):
            yield
            return
        before, original = vars(optimizer).get("step"), optimizer.step

        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            self._is_inside = True
            try:
                return original(*args, **kwargs)
            except _LeftOut:
                completed(optimizer)
                return None
            finally:
                self._is_inside = self._is_left_out = False

        handle = optimizer.register_step_pre_hook(torch.compiler.disable(self._before_step))
        optimizer.step = step  # type: ignore[method-assign]
        try:
            yield
        finally:
            handle.remove()
            if vars(optimizer).get("step") is step:
                if before is None:
                    del optimizer.step
                else:
                    optimizer.step = before  # type: ignore[method-assign]

    def skip(self, optimizer: Optimizer, spike: Tensor, read: Callable[[], bool]) -> Tensor:
        """Skip the step if the gradient is a spike.

        Args:
            spike: 0-dim bool tensor.
            read: reads ``spike`` on the host; called where it has to be known there.

        Returns:
            How many steps are skipped, 0 or 1, as a 0-dim bool tensor.
        """
        if skips_on_device(optimizer):
            found_inf = getattr(optimizer, "found_inf", None)
            self._told = (optimizer, found_inf)
            told = spike.to(torch.float32)
            if found_inf is not None:
                told = torch.maximum(found_inf, told.to(found_inf.device))
            optimizer.found_inf = told  # type: ignore[attr-defined]
            return spike
        if read():
            self._is_left_out = not _is_torchs(optimizer)
            for parameter in parameters_of(optimizer):
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

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = type(optimizer).__name__
        if callable(kwargs.get("closure", args[1] if len(args) > 1 else None)):
            raise ValueError(
                f"on_spike='skip' cannot skip a step of {name} that is given a closure, because it may have changed "
                f"parameters when it evaluates the closure: call backward() before step(), or {_FIX}"
            )
        if not self._is_inside:
            raise ValueError(
                f"on_spike='skip' can skip a step of {name} only if it is called as optimizer.step(), but a method "
                f"kept from before was called: call optimizer.step(), or {_FIX}"
            )
        if self._is_left_out:
            raise _LeftOut


def _is_torchs(optimizer: Optimizer) -> bool:
    """Whether its step does nothing where there are no gradients; a subclass may do more."""
    return type(optimizer).__module__.startswith("torch.optim.")


def hides_gradients(optimizer: Optimizer) -> bool:
    """Whether its step is left out by hiding its gradients."""
    return _is_torchs(optimizer) and not isinstance(optimizer, LBFGS)


def _innermost(optimizer: Optimizer) -> Optimizer:
    """The optimizer that another one passes its steps to, as that of accelerate does."""
    inner = getattr(optimizer, "optimizer", None)
    return _innermost(inner) if isinstance(inner, Optimizer) else optimizer


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether its next step can be left out by its ``found_inf``."""
    if type(optimizer) not in (Adam, AdamW, SGD, Adagrad):  # a subclass may do more in its step
        return False
    if not all(group.get("fused") for group in optimizer.param_groups):
        return False
    stepping = [parameter for parameter in parameters_of(optimizer) if parameter.grad is not None]
    # At its first step fused SGD takes momentum buffers into use even where it skips, and never fills them.
    # Fused kernels do not mix sharded parameters with a plain found_inf.
    return all(parameter in optimizer.state for parameter in stepping) and not any_sharded(stepping)
