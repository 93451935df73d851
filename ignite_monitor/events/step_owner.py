"""The owner of optimizer steps: does once what monitors ask of a step, and undoes it before the user's post-hooks.

- Fused optimizers of ``torch.optim`` skip by their ``found_inf``, as with GradScaler: on the device.
- Others of ``torch.optim``, which evaluate a closure first, step while their gradients are taken away.
- The step of any other is not run: it may update weights without gradients too. A call with a closure, or that bypasses
  ``optimizer.step``, is refused.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence, Set
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ignite_monitor.events.gradient_tracker import OptimizerStep, StepRequests
from ignite_monitor.events.hooks import LastHook, Patch, register_first, remove_all, weak_method
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.model._torch import (
    AFTER_STEP,
    foreach_scale,
    has_step_hooks,
    post_hooks,
    pre_hooks,
    running_steps,
    untraced,
    values_of,
)
from ignite_monitor.model.devices import move
from ignite_monitor.model.dtensor import any_dtensor, local
from ignite_monitor.model.names import is_from_torch, parameters_of, without_accelerate

_FIX = "skip the step in the train step, if engine.state.unhealthy_spike is True after backward"


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

    _running: ClassVar[list[StepRequests]] = []  # the steps that run, of all engines

    def __init__(self, source: Any) -> None:
        self._source = weakref.proxy(source)  # which owns it
        methods = self._await_step, self._start_step, self._end_step
        self._hooks = [torch.compiler.disable(weak_method(method)) for method in methods]
        untraced(LastHook.__call__)
        self.acting: Set[Optimizer] = set()  # those that monitors may skip or scale in this train step
        self._patches: list[Patch] = []
        self._is_called = False  # whether the replaced step of one runs
        self._installed: list[Any] = []  # hooks of all steps
        self._depth = 0  # number of steps within which they were installed, by another engine's handler
        weakref.finalize(self, remove_all, self._installed).atexit = False
        self._last_hook: LastHook | None = None
        self._undo: _Undo | None = None
        self._requests: StepRequests | None = None  # of the step that runs
        self._forget()

    def _forget(self, is_over: bool = True) -> None:
        """Forget the step that runs; if it is over, restore what it has left if it has raised an error."""
        if is_over:
            if self._last_hook is not None:
                self._last_hook.remove()
            if self._undo is not None:
                self._undo()
            self._last_hook = self._undo = None
        if self._requests in self._running:  # else an interrupt has come between the two
            self._running.remove(self._requests)
        self._requests = None
        self._about: dict[int, OptimizerStep] = {}  # the step, by id of the model
        self._kwargs: Any = None  # of the call, once it has been started: torch hands the same object to all hooks
        self._is_reported = False
        self.evaluates_again = False  # whether the closure of a step that has started is evaluated once more

    def install(self) -> None:
        """Hook the steps of all optimizers."""
        self._depth = running_steps()
        register_first(register_optimizer_step_pre_hook, self._hooks[0], self._installed)
        register_first(register_optimizer_step_post_hook, self._hooks[2], self._installed)

    def uninstall(self) -> None:
        """Forget the step that runs, and remove the hooks, but not within it: its call goes through all hooks."""
        if self._requests is not None or running_steps() > self._depth:
            self._forget(is_over=False)
        else:
            self._forget()
            remove_all(self._installed)

    def patch(self) -> None:
        """Replace ``step`` of the acting optimizers that can be skipped in no other way, for a train step."""
        for optimizer in self.acting:
            if not allows_closures(optimizer):
                self._patches.append(Patch(optimizer, "step", self._call, is_method=True))

    def end_train_step(self, is_installed: bool) -> None:
        """Restore the optimizers."""
        if self._patches:
            remove_all(self._patches)
        if self._last_hook is not None or self._undo is not None or self._requests is not None:
            self._forget()
        if not is_installed:
            self.uninstall()

    def _call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before, self._is_called = self._is_called, True
        try:
            return original(*args, **kwargs)
        except SkippedError as skipped:
            for hook in post_hooks(skipped.args[0]):  # among them the one that ends the step
                hook(*skipped.args)
            return None
        finally:
            self._is_called = before

    def _await_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        # The step is started after all other pre-hooks, which may change its gradients.
        if not self._source.in_train_step or (self._requests is not None and running_steps() > 1):
            return None  # a step inside of another one, of a wrapped optimizer or base class
        requests = StepRequests(optimizer, may_skip=optimizer in self.acting)
        about = {}
        for key, tracker in self._source.trackers.items():
            about[key] = OptimizerStep(tracker, optimizer, tracker.parameters_of(optimizer), requests)
        if not any(map(attrgetter("parameters"), about.values())) or self._source.sees_capture():
            return None
        if self._requests is not None:  # an earlier step has raised an error
            self._forget()
        self._about, self._requests = about, requests
        self._running.append(requests)
        hooks = pre_hooks(optimizer)
        key = next(reversed(hooks))
        if key == self._installed[0].id:
            return self._start_step(optimizer, args, kwargs)
        last = hooks[key]  # of another engine's, or the user's
        self._last_hook = last if isinstance(last, LastHook) else LastHook(optimizer, hooks)
        self._last_hook.starts.append(self._hooks[1])
        return None

    def _start_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        requests = self._requests
        if requests is None or requests.optimizer is not optimizer:
            return None
        for other in self._running:  # of other engines
            if other.optimizer is optimizer and other.made is False:
                return None
        self._kwargs = kwargs
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        is_patched = optimizer in self.acting and not allows_closures(optimizer)
        if is_patched and (callable(closure) or not self._is_called):
            raise ValueError(
                f"on_spike can skip a step of {type(optimizer).__name__} only if it is called as optimizer.step() "
                f"after backward(), without a closure: call it so, or {_FIX}"
            )
        if callable(closure):
            replacement = self._reporting(closure, requests)
            if optimizer in self.acting:  # it would evaluate it first, and once
                with torch.enable_grad():
                    loss = replacement()
                replacement = lambda: loss  # noqa: E731
            if "closure" in kwargs:
                kwargs["closure"] = replacement
            else:
                args = (args[0], replacement, *args[2:])
        else:
            self._report_step(requests)
        for other in self._running:
            if other.optimizer is optimizer:
                other.made = requests.made
        if is_patched and requests.made is False:
            raise SkippedError(optimizer, args, kwargs)
        if requests.made is False:
            self._undo = _Undo.of(optimizer)
            self._undo.take_gradients()
        return args, kwargs

    def _reporting(self, closure: Callable[..., Any], requests: StepRequests) -> Callable[..., Any]:
        """A closure that reports the step once it has computed the gradients that the step uses."""

        @functools.wraps(closure)
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            self.evaluates_again = self._is_reported
            try:
                loss = closure(*args, **kwargs)
            finally:
                self.evaluates_again = False
            self._report_step(requests)
            return loss

        return evaluate

    def _report_step(self, requests: StepRequests) -> None:
        if self._requests is requests and not self._is_reported:  # no handler has detached the monitors
            self._is_reported = True
            self._source.fire(MonitorEvents.OPTIMIZER_STEP_STARTED, self._about)

    def decide(self) -> bool:
        """Decide on the step that starts as monitors have asked; return False if it is known to be skipped."""
        requests = self._requests
        if requests is None:  # a handler has detached the monitors
            return True
        optimizer = requests.optimizer
        if requests.factors:
            gradients = {
                id(gradient): gradient for item in parameters_of(optimizer) if (gradient := item.grad) is not None
            }
            scale([*gradients.values()], _combined(torch.minimum, requests.factors))
        found_inf = getattr(optimizer, "found_inf", None)  # with which fused optimizers skip
        if found_inf is not None:
            found_inf = move(found_inf.reshape(()), parameters_of(optimizer)[0].device)
            requests.made = found_inf == 0
        if not requests.flags:
            return True
        flag = _combined(torch.logical_or, requests.flags)
        if skips_on_device(optimizer):
            self._undo = _Undo.of(optimizer)
            skipped = move(flag.to(torch.float32), parameters_of(optimizer)[0].device)
            found_inf = skipped if found_inf is None else torch.maximum(skipped, found_inf)
            vars(optimizer)["found_inf"], requests.made = found_inf, found_inf == 0
        elif torch.is_nonzero(flag):  # read on the host
            requests.made = False
        for step in self._about.values():
            step.tracker.step_skipped(flag, own=bool(step.parameters))
        return requests.made is not False

    def _end_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._requests is None or self._requests.optimizer is not optimizer:
            return
        if self._kwargs is not None and self._kwargs is not kwargs:  # of a step inside of the one that runs
            return
        about = self._about
        if self._is_reported:
            self._source.fire(MonitorEvents.OPTIMIZER_STEP_COMPLETED, about)
        for step in about.values():
            step.tracker.step_completed(own=bool(step.parameters), may_skip=bool(self.acting))
        self._forget()


class _Undo:
    """Restores an optimizer as soon as its step has returned: torch calls it before all post-hooks."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._found_inf = getattr(optimizer, "found_inf", None)  # GradScaler's
        self._gradients: list[tuple[Tensor, Tensor]] = []
        vars(optimizer)[AFTER_STEP] = self

    @classmethod
    def of(cls, optimizer: Optimizer) -> _Undo:
        """Return that of the step that starts; monitors of another engine may have made it."""
        return vars(optimizer).get(AFTER_STEP) or cls(optimizer)

    def take_gradients(self) -> None:
        """Take the gradients away, so that the step changes nothing."""
        for parameter in parameters_of(self._optimizer):
            if parameter.grad is not None:
                self._gradients.append((parameter, parameter.grad))
                parameter.grad = None

    def __call__(self) -> None:
        attributes = vars(self._optimizer)
        if attributes.get(AFTER_STEP) is not self:
            return
        del attributes[AFTER_STEP]
        for parameter, gradient in self._gradients:
            if parameter.grad is None:  # else the step has raised an error, and there was a backward since
                parameter.grad = gradient
        if self._found_inf is not None:
            attributes["found_inf"] = self._found_inf
        else:
            attributes.pop("found_inf", None)


def allows_closures(optimizer: Optimizer) -> bool:
    """Return True if a step can be skipped with a closure too, which is evaluated first."""
    return is_from_torch(optimizer) and not isinstance(optimizer, LBFGS)


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return True if the next step of an optimizer can be skipped by its ``found_inf``."""
    if type(optimizer) not in (Adam, AdamW, SGD, Adagrad):  # a subclass may do more in its step
        return False
    stepping: list[Tensor] = []
    for group in optimizer.param_groups:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        # A first step makes a state even if it skips, and fused SGD never fills momentum buffers that it has made so.
        is_first = group.get("momentum") != 0 and not all(parameter in optimizer.state for parameter in parameters)
        if is_first or not group.get("fused"):
            return False
        stepping += parameters
    # Fused kernels do not mix sharded parameters with a plain found_inf, and a copy of it to the CPU may come too late.
    return len({parameter.device for parameter in stepping}) <= 1 and not any_dtensor(stepping)


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


def _combined(combine: Callable[[Tensor, Tensor], Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """Combine 0-dim tensors of any devices."""
    return functools.reduce(lambda one, other: combine(one, move(other, one.device)), tensors)


def _refused(optimizer: Optimizer, reason: str) -> ValueError:
    return ValueError(f"Steps of {type(optimizer).__name__} cannot be skipped, since it {reason}: {_FIX}")
