"""The owner of optimizer steps: does once what monitors ask of a step.

- Fused optimizers of ``torch.optim`` skip by their ``found_inf``, as with GradScaler: on the device.
- From others of ``torch.optim``, which evaluate a closure first, the step is made by an optimizer without parameters.
- The step of any other is not run: it may update weights without gradients too. A call with a closure, or that bypasses
  ``optimizer.step``, is refused.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ignite_monitor.events.gradient_tracker import GradientTracker, OptimizerStep, StepRequests
from ignite_monitor.events.hooks import Patch, is_nested, remove_all, weak_method
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.model._torch import (
    foreach_scale,
    has_pre_hooks,
    has_step_hooks,
    post_hooks,
    values_of,
)
from ignite_monitor.model.devices import move
from ignite_monitor.model.dtensor import any_dtensor, local
from ignite_monitor.model.names import is_from_torch, parameters_of, without_accelerate

_FIX = "skip the step in the train step, if engine.state.unhealthy_spike is True after backward"

_REPLACES = "_ignite_monitor_replaces"  # attribute of a found_inf: that of the optimizer before the step


def skippable(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that makes the steps, in a wrapper of accelerate; a ValueError if it cannot be skipped."""
    optimizer = without_accelerate(optimizer)
    if isinstance(optimizer, LBFGS):
        raise _refused(optimizer, "evaluates a closure more than once in a step")
    if not has_step_hooks(optimizer):
        raise _refused(optimizer, "has no step hooks (if it wraps an optimizer, give that one)")
    return optimizer


class SkippedError(Exception):
    """Ends a step before it changes anything; its arguments are those of the step's hooks."""


class StepOwner:
    """Reports the steps of optimizers by events, and does once what monitors ask of a step."""

    def __init__(self, source: Any) -> None:
        self._source = weakref.proxy(source)  # which owns it
        methods = self._await_step, self._start_step, self.end_step
        self._hooks = [torch.compiler.disable(weak_method(method)) for method in methods]
        self.acting: Set[Optimizer] = set()  # those that monitors may skip or scale in this train step
        self._patched: dict[Optimizer, _PatchedStep] = {}
        self._replaced: tuple[Any, Tensor | None] | None = None  # an optimizer whose found_inf is replaced, and its own
        self._patches: list[Patch] = []
        self._installed: list[Any] = []  # hooks of all steps
        weakref.finalize(self, remove_all, self._installed).atexit = False
        self._handles: list[Any] = []  # hooks of the step that runs
        self.reset()

    def reset(self) -> None:
        """Forget the step that runs."""
        self._optimizer: Optimizer | None = None
        self._nested = 0  # steps that run within it: of a wrapped optimizer, or of a base class
        self._sharing: dict[GradientTracker, list[nn.Parameter]] = {}  # what it holds of the models
        self._requests: StepRequests | None = None  # once the step is reported
        self._about: dict[int, OptimizerStep] = {}  # the step, by id of the model
        self.evaluates_again = False  # whether the closure of a step that has started is evaluated once more

    def install(self) -> None:
        """Hook the steps of all optimizers."""
        self._installed.append(register_optimizer_step_pre_hook(self._hooks[0]))
        self._installed.append(register_optimizer_step_post_hook(self._hooks[2]))

    def patch(self) -> None:
        """Replace ``step`` of the acting optimizers that can be skipped in no other way, for a train step."""
        for optimizer in self.acting:
            if not allows_closures(optimizer):
                step = self._patched[optimizer] = _PatchedStep(optimizer)
                self._patches.append(Patch(optimizer, "step", step.call, is_method=True))

    def end_train_step(self, is_installed: bool) -> None:
        """Restore the optimizers; forget a step that has raised an error, and remove hooks that a step has kept."""
        if self.acting:
            remove_all(self._patches)
            self._patched.clear()
        if self._optimizer is not None or not is_installed:
            self.uninstall(keep=is_installed)

    def _await_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The step is reported after the hooks of the optimizer's own, which may change its gradients.
        if not self._source.in_train_step:
            return None
        if self._optimizer is not None and is_nested(optimizer):
            self._nested += 1
            return None
        if self._source.sees_capture() or isinstance(args, _SkippedArguments):  # monitors of another engine skip it
            return None
        sharing = {}
        for tracker in self._source.trackers.values():
            if parameters := tracker.parameters_of(optimizer):
                sharing[tracker] = parameters
        if not sharing:
            return None
        if self._optimizer is not None:  # its step has raised an error
            self.release()
        self._optimizer, self._sharing, self._requests, self._nested = optimizer, sharing, None, 0
        if has_pre_hooks(optimizer):
            self._handles.append(optimizer.register_step_pre_hook(self._hooks[1]))
            return None
        return self._start_step(optimizer, args, kwargs)

    def _start_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._optimizer is not optimizer or self._requests is not None:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if optimizer in self._patched:
            self._patched[optimizer].check(closure)
        skipped = False
        if not callable(closure):
            skipped = self._report_step(optimizer)
        else:

            @functools.wraps(closure)
            def evaluate(*args: Any, **kwargs: Any) -> Any:
                nonlocal skipped
                self.evaluates_again = self._requests is not None
                try:
                    loss = closure(*args, **kwargs)
                finally:
                    self.evaluates_again = False
                skipped |= self._report_step(optimizer)  # the step uses the gradients that its closure computes
                return loss

            replacement: Callable[..., Any] = evaluate
            if optimizer in self.acting and optimizer not in self._patched:  # it would evaluate it first, and once
                with torch.enable_grad():
                    loss = evaluate()
                replacement = lambda: loss  # noqa: E731
            if "closure" in kwargs:
                kwargs = kwargs | {"closure": replacement}
            else:
                args = type(args)((args[0], replacement, *args[2:]))
        if skipped and optimizer in self._patched:
            raise SkippedError(args, kwargs)
        return _SkippedArguments((args[0], *args[1:])) if skipped else args, kwargs

    def _report_step(self, optimizer: Optimizer) -> bool:
        """Report the step, once; return True if it is known to be skipped."""
        if self._optimizer is not optimizer or self._requests is not None:
            return False
        self._requests = requests = StepRequests(optimizer in self.acting)
        for key, tracker in self._source.trackers.items():
            self._about[key] = OptimizerStep(tracker, optimizer, self._sharing.get(tracker, []), requests)
        self._source.fire(MonitorEvents.OPTIMIZER_STEP_STARTED, self._about)
        return requests.made is False

    def act(self) -> bool:
        """Do what monitors ask of the step that starts; return False if it is known to be skipped."""
        optimizer, requests = self._optimizer, self._requests
        if optimizer is None or requests is None:  # a handler has detached the monitors
            return True
        if requests.factors:
            gradients = [gradient for item in parameters_of(optimizer) if (gradient := item.grad) is not None]
            scale(gradients, _combined(torch.minimum, requests.factors))
        found_inf = getattr(optimizer, "found_inf", None)  # with which fused optimizers skip
        requests.made = True if found_inf is None else move(found_inf.reshape(()), _device_of(optimizer)) == 0
        if not requests.flags:
            return True
        flag = _combined(torch.logical_or, requests.flags)
        if skips_on_device(optimizer):
            skipped = move(flag.to(torch.float32), _device_of(optimizer))
            if found_inf is not None:
                skipped = torch.maximum(skipped, move(found_inf.reshape(()), skipped.device))
            requests.made = skipped == 0
            # GradScaler's, for the time of the step; monitors of another engine may have replaced it already.
            own = getattr(found_inf, _REPLACES, found_inf)
            setattr(skipped, _REPLACES, own)
            self._replaced = optimizer, own
            optimizer.found_inf = skipped  # type: ignore[attr-defined]
        elif torch.is_nonzero(flag):  # read on the host
            requests.made = False
        for tracker in self._source.trackers.values():
            # A discriminator that has seen backwards of its generator's loss alone is passed through too.
            is_shared = tracker.accumulates and not tracker.has_own_backward
            if tracker in self._sharing or tracker.is_passed_through or is_shared:
                tracker.statistics.restore(flag)
        return requests.made is not False

    def end_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Report the completed step, and start another window of its models."""
        if self._nested:
            self._nested -= 1
            return
        if self._optimizer is not optimizer:
            return
        self.release()
        if self._requests is not None:
            self._source.fire(MonitorEvents.OPTIMIZER_STEP_COMPLETED, self._about)
        for tracker in self._source.trackers.values():
            if tracker in self._sharing or tracker.is_passed_through:
                tracker.step_completed(may_skip=bool(self.acting))
        self.reset()

    def uninstall(self, keep: bool = False) -> None:
        """Forget the step that runs, and remove the hooks; not within a step, where torch goes through all hooks."""
        is_running = self._optimizer is not None
        self.release()
        self.reset()
        if not (keep or is_running):
            remove_all(self._installed)

    def release(self) -> None:
        """Restore the optimizer, also after a step that raised an error, and remove the hooks of the step."""
        if self._handles:
            remove_all(self._handles)
        if self._replaced is not None:
            (optimizer, found_inf), self._replaced = self._replaced, None
            optimizer.found_inf = found_inf
            if found_inf is None:
                del optimizer.found_inf


class _PatchedStep:
    """The replaced ``step`` of an optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.is_running = optimizer, False

    def check(self, closure: Any) -> None:
        """Raise a ValueError if the step that starts can't be skipped."""
        if not self.is_running or callable(closure):
            raise ValueError(
                f"on_spike can skip a step of {type(self.optimizer).__name__} only if it is called as optimizer.step() "
                f"after backward(), without a closure: call it so, or {_FIX}"
            )

    def call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.is_running = True
        try:
            return original(*args, **kwargs)
        except SkippedError as skipped:
            for hook in post_hooks(self.optimizer):  # among them the one that ends the step
                hook(self.optimizer, *skipped.args)
            return None
        finally:
            self.is_running = False


class _SkippedArguments(tuple[Any, ...]):
    """Arguments of a skipped step as its hooks see them; the step, which unpacks them, gets no parameters."""

    def __iter__(self) -> Iterator[Any]:
        optimizer = object.__new__(type(self[0]))
        vars(optimizer).update(vars(self[0]), param_groups=[])
        return iter((optimizer, *self[1:]))


def allows_closures(optimizer: Optimizer) -> bool:
    """Return True if a step can be skipped with a closure too, which is evaluated first."""
    return is_from_torch(optimizer) and not isinstance(optimizer, LBFGS)


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return True if the next step of an optimizer can be skipped by its ``found_inf``."""
    if type(optimizer) not in (Adam, AdamW, SGD, Adagrad):  # a subclass may do more in its step
        return False
    if not all(group.get("fused") for group in optimizer.param_groups):
        return False
    stepping = [parameter for parameter in parameters_of(optimizer) if parameter.grad is not None]
    # At its first step fused SGD takes momentum buffers into use even if it skips, and never fills them.
    # Fused kernels do not mix sharded parameters with a plain found_inf, and a copy of it to the CPU may come too late.
    on_one_device = len({parameter.device for parameter in stepping}) <= 1
    return on_one_device and all(parameter in optimizer.state for parameter in stepping) and not any_dtensor(stepping)


def scale(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by a 0-dim tensor; a factor of 1 changes no bit."""
    by_device: dict[torch.device, list[Tensor]] = {}
    with torch.no_grad():
        for gradient in gradients:
            values = _values(gradient)
            by_device.setdefault(values.device, []).append(values)
        for device, group in by_device.items():
            foreach_scale(group, move(factor, device))


def _values(gradient: Tensor) -> Tensor:
    """The tensor of a gradient's numbers: of a DTensor this rank's part, of a sparse tensor its values."""
    gradient = local(gradient)
    if gradient.layout == torch.sparse_coo:
        return values_of(gradient)
    return gradient if gradient.layout == torch.strided else gradient.values()


def _device_of(optimizer: Optimizer) -> torch.device:
    return parameters_of(optimizer)[0].device  # of all steps


def _combined(combine: Callable[[Tensor, Tensor], Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """Combine 0-dim tensors of any devices."""
    return functools.reduce(lambda one, other: combine(one, move(other, one.device)), tensors)


def _refused(optimizer: Optimizer, reason: str) -> ValueError:
    return ValueError(f"Steps of {type(optimizer).__name__} cannot be skipped, since it {reason}: {_FIX}")
