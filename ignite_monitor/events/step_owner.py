"""The owner of optimizer steps: does once what monitors ask of a step, and undoes it once.

- Fused optimizers of ``torch.optim`` skip by their ``found_inf``, as with GradScaler: on the device.
- From others of ``torch.optim`` gradients are hidden during the step, which then does nothing.
- The step of any other is not run: it may update weights without gradients too. A call with a closure, or that bypasses
  ``optimizer.step``, is refused, since parameters may have changed before it can be skipped.
- A wrapper without step hooks is refused if its step moves a parameter although the step inside was skipped.
- LBFGS is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer

from ignite_monitor.events.gradient_tracker import GradientTracker, StepRequests
from ignite_monitor.events.hooks import Patch, remove_all, weak_method
from ignite_monitor.model._torch import first_post_hook, foreach_scale, has_step_hooks, post_hooks, sparse_parts
from ignite_monitor.model.devices import move
from ignite_monitor.model.dtensor import any_dtensor, is_dtensor
from ignite_monitor.model.names import parameters_of

_FIX = "skip the step in the train step, if engine.state.unhealthy_spike is True after backward"


def check_skippable(optimizer: Optimizer) -> None:
    """Refuse, with a ValueError, an optimizer whose steps are known to be impossible to skip or to scale."""
    if isinstance(optimizer, LBFGS):
        raise _refused(optimizer, "evaluates a closure more than once in a step")
    if not any(map(has_step_hooks, _chain(optimizer))):
        raise _refused(optimizer, "does not call the constructor of torch.optim.Optimizer, and has no step hooks")


class SkippedError(Exception):
    """Ends a step before it begins."""


class StepOwner:
    """Skips or scales the step of an optimizer as monitors ask, and undoes it before other hooks of the optimizer.

    Args:
        completed: function that is called after a step that is not run.
    """

    def __init__(self, completed: Callable[[Optimizer], None]) -> None:
        self._completed = completed
        self._undo: list[Callable[[], Any]] = []  # what restores the optimizer, in reverse order
        self._handles: list[Any] = []  # hooks of the step that runs
        self._patched: list[_PatchedStep] = []
        self._calls: list[Optimizer] = []  # patched steps that run, the outermost first
        self._kept: list[tuple[nn.Parameter, Tensor]] = []  # parameters before a step skipped inside of a wrapper's

    @contextmanager
    def context(self, optimizers: Iterable[Optimizer]) -> Iterator[None]:
        """Context of a train step in which steps of these optimizers may be skipped."""
        unique = {id(inner): inner for optimizer in optimizers for inner in _chain(optimizer)}
        self._patched = [_PatchedStep(self, inner) for inner in unique.values() if not _is_from_torch(inner)]
        handles: list[Any] = [Patch(step.optimizer, "step", step.call) for step in self._patched]
        try:
            yield
        finally:
            remove_all(handles)
            self._patched = []
            self.release()

    def check_call(self, optimizer: Optimizer, closure: object) -> None:
        """Refuse, with a ValueError, a step that could not be skipped any more."""
        if not self._patched or all(optimizer is not step.optimizer for step in self._patched):
            return
        if optimizer not in self._calls or callable(closure):
            raise ValueError(
                f"on_spike='skip' can skip a step of {type(optimizer).__name__} only if it is called as "
                f"optimizer.step() after backward(), without a closure: call it so, or {_FIX}"
            )

    def act(self, optimizer: Optimizer, requests: StepRequests, trackers: Iterable[GradientTracker]) -> None:
        """Do what monitors ask of the step that starts."""
        if requests.factors:
            for factor, gradients in _grouped(optimizer, requests.factors):
                scale(gradients, factor)
        found_inf = getattr(optimizer, "found_inf", None)  # with which fused optimizers skip
        requests.made = True if found_inf is None else found_inf.reshape(()) == 0
        if not requests.flags:
            return
        flag = _any(requests.flags)
        if isinstance(flag, Tensor) and not self._calls and skips_on_device(optimizer):
            skipped = flag.to(torch.float32)
            if found_inf is not None:
                skipped = torch.maximum(found_inf.reshape(()), skipped.to(found_inf.device))
            requests.made = skipped == 0
            self._replace_found_inf(optimizer, found_inf, skipped)
        elif flag:  # read on the host
            requests.made = False
            self._hide_gradients(optimizer)
        else:
            return
        for tracker in trackers:
            tracker.statistics.restore(flag)
        if self._undo:  # the gradients that the user's hooks see are those that the train step made
            self._handles.append(first_post_hook(optimizer, weak_method(self.undo)))

    def end_skipped(self, optimizer: Optimizer) -> None:
        """End the step of an optimizer that may do more than use its gradients, if it is skipped.

        Raises:
            SkippedError: to the patched step.
        """
        if self._undo and not _is_from_torch(optimizer):
            raise SkippedError

    def undo(self, *_: Any) -> None:
        """Restore what a skipped step has changed in its optimizer."""
        while self._undo:
            self._undo.pop()()

    def release(self) -> None:
        """Undo, also after a step that raised an error, and remove the hooks of the step."""
        if self._undo:
            self.undo()
        while self._handles:
            self._handles.pop().remove()

    def add_pre_hook(self, optimizer: Optimizer, hook: Callable[..., Any]) -> None:
        """Call a function after the other pre-hooks of the step that starts."""
        self._handles.append(optimizer.register_step_pre_hook(hook))

    def _replace_found_inf(self, optimizer: Any, before: Tensor | None, value: Tensor) -> None:
        optimizer.found_inf = value
        if before is None:
            self._undo.append(lambda: vars(optimizer).pop("found_inf", None))
        else:  # GradScaler's, for the time of the step
            self._undo.append(lambda: setattr(optimizer, "found_inf", before))

    def _hide_gradients(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, LBFGS):
            raise _refused(optimizer, "evaluates a closure more than once in a step")
        if not _is_from_torch(optimizer) and optimizer not in self._calls:
            raise _refused(optimizer, "is of unknown kind, and not the attribute acts_on of a monitor")
        parameters = parameters_of(optimizer)
        if self._calls and self._calls[0] is not optimizer:
            self._kept = [(parameter, parameter.detach().clone()) for parameter in parameters]
        hidden = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]

        def show() -> None:
            for parameter, gradient in hidden:
                if parameter.grad is None:
                    parameter.grad = gradient

        self._undo.append(show)
        for parameter, _ in hidden:
            parameter.grad = None

    def run(self, optimizer: Optimizer, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a patched step, unless it is skipped."""
        self._calls.append(optimizer)
        try:
            result = step(*args, **kwargs)
        except SkippedError:
            self.undo()
            for hook in post_hooks(optimizer):
                hook(optimizer, (optimizer, *args), kwargs)
            result = self._completed(optimizer)
        finally:
            self._calls.pop()
            kept, self._kept = self._kept, self._kept if self._calls else []
        if not self._calls and kept:
            self._check_unmoved(optimizer, kept)
        return result

    @torch.no_grad()
    def _check_unmoved(self, wrapper: Optimizer, kept: list[tuple[nn.Parameter, Tensor]]) -> None:
        moved = [(parameter, before) for parameter, before in kept if not torch.equal(parameter.detach(), before)]
        for parameter, before in moved:
            parameter.copy_(before)
        if moved:
            raise _refused(wrapper, "moves parameters although the step of the optimizer in it is skipped")


class _PatchedStep:
    """The replaced ``step`` of an optimizer."""

    def __init__(self, owner: StepOwner, optimizer: Optimizer) -> None:
        self.owner, self.optimizer = owner, optimizer

    def call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.owner.run(self.optimizer, original, args, kwargs)


def hides_gradients(optimizer: Optimizer) -> bool:
    """Return True if a step of this optimizer is skipped by hiding its gradients."""
    return _is_from_torch(optimizer) and not isinstance(optimizer, LBFGS)


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return True if the next step of an optimizer can be skipped by its ``found_inf``."""
    if type(optimizer) not in (Adam, AdamW, SGD, Adagrad):  # a subclass may do more in its step
        return False
    if not all(group.get("fused") for group in optimizer.param_groups):
        return False
    stepping = [parameter for parameter in parameters_of(optimizer) if parameter.grad is not None]
    # At its first step fused SGD takes momentum buffers into use even if it skips, and never fills them.
    # Fused kernels do not mix sharded parameters with a plain found_inf.
    return all(parameter in optimizer.state for parameter in stepping) and not any_dtensor(stepping)


def scale(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by a 0-dim tensor; a factor of 1 changes no bit."""
    by_device: dict[torch.device, list[Tensor]] = {}
    with torch.no_grad():
        for gradient in gradients:
            values = _values(gradient)
            by_device.setdefault(values.device, []).append(values)
        for device, group in by_device.items():
            foreach_scale(group, move(factor, device))


def _values(gradient: Any) -> Tensor:
    """The tensor of a gradient's numbers: of a DTensor this rank's part, of a sparse tensor its values."""
    if is_dtensor(gradient):
        gradient = gradient.to_local()
    if gradient.layout == torch.sparse_coo:
        return sparse_parts(gradient)[1]
    values: Tensor = gradient if gradient.layout == torch.strided else gradient.values()
    return values


def _grouped(optimizer: Optimizer, factors: Mapping[GradientTracker, Tensor]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Group the gradients of an optimizer by the smallest factor that is asked of them."""
    smallest: dict[nn.Parameter, Tensor] = {}
    for tracker, factor in factors.items():
        for parameter in tracker.parameters_of(optimizer):
            other = smallest.get(parameter)
            smallest[parameter] = factor if other is None else torch.minimum(factor, other.to(factor.device))
    groups: dict[int, tuple[Tensor, list[Tensor]]] = {}
    for parameter, factor in smallest.items():
        if parameter.grad is not None:
            groups.setdefault(id(factor), (factor, []))[1].append(parameter.grad)
    yield from groups.values()


def _any(flags: Sequence[bool | Tensor]) -> bool | Tensor:
    """Combine flags without synchronization."""
    tensors = [flag for flag in flags if isinstance(flag, Tensor)]
    if len(tensors) < len(flags) and any(flag for flag in flags if not isinstance(flag, Tensor)):
        return True
    return functools.reduce(lambda one, other: one | move(other, one.device), tensors) if tensors else False


def _chain(optimizer: Optimizer) -> Iterator[Optimizer]:
    """The optimizer, and those that it passes its steps to, as that of accelerate does."""
    yield optimizer
    for inner in vars(optimizer).values():
        if isinstance(inner, Optimizer):
            yield from _chain(inner)


def _is_from_torch(optimizer: Optimizer) -> bool:
    # Their steps do nothing without gradients; a subclass may do more.
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")  # Adafactor and Muon: "torch.optim"


def _refused(optimizer: Optimizer, reason: str) -> ValueError:
    return ValueError(f"Steps of {type(optimizer).__name__} cannot be skipped, since it {reason}: {_FIX}")
