"""Forward passes of a model beside those of a reference, call by call."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ignite_monitor.model._torch import is_transformed, module_call, version
from ignite_monitor.model.forward import after_forward, before_forward, is_recomputation
from ignite_monitor.model.structure import modules_by_name
from ignite_monitor.reference.reference import Reference, is_reference_run

_ATTEMPTS = 3


class NotComparableError(Exception):
    """Why a call can't be compared; its message completes "it is not compared: …"."""


class FailedFunctionError(RuntimeError):
    """A function of the user's has raised an error, which training is told of."""


class Comparison(Protocol):
    """What there is to compare in a module's call with the same call of the reference.

    :meth:`keep` and :meth:`enter` are called with gradients being recorded as in the model. Errors that :meth:`enter`
    and :meth:`leave` raise leave the call out, with a warning, but for those of functions of the user's.
    """

    def keep(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Sequence[Tensor | None]:
        """What to keep of a call of the reference until the model reaches it."""

    def enter(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], kept: list[Tensor | None]
    ) -> Any:
        """A call of the model begins. What it returns is handed to :meth:`leave`.

        Args:
            kept: what was kept of the same call of the reference; what is taken out of the list is freed.
        """

    def leave(self, name: str, output: Any, entered: Any, kept: list[Tensor | None]) -> Any:
        """A call of the model has returned. What it returns is handed to :meth:`passed`; None for nothing.

        Args:
            entered: what :meth:`enter` returned.
            kept: what was kept of the same call of the reference.
        """

    def passed(self, results: dict[str, list[Any]]) -> None:
        """A forward pass of the whole model has returned.

        Args:
            results: name -> what :meth:`leave` returned, one for each call.
        """


class ReferencePasses:
    """Runs a reference before each forward pass of the model, on the same inputs.

    Seen are passes of the whole model in training mode; neither what activation checkpointing repeats, nor passes
    that raise an error, nor calls of submodules on their own. What is kept of the reference is freed as the model
    reaches it.

    Args:
        warn: is told why something can't be compared, each reason once.
        offload: whether what is kept waits in the host's memory, page-locked, rather than on the device.
    """

    def __init__(
        self,
        reference: Reference,
        names: Iterable[str],
        comparison: Comparison,
        warn: Callable[[str], None],
        *,
        offload: bool = False,
    ) -> None:
        self._reference = reference
        self._comparison = comparison
        self._warn = warn
        self._offload = offload
        self._warned: set[str] = set()
        self._unstable: set[str] = set()  # modules of whose calls something is changed in place later on
        self._current: _Pass | None = None
        ours = modules_by_name(reference.root)
        names = list(names)
        self._ours = {ours[name]: name for name in names}
        self._theirs = {reference.modules[name]: name for name in names}
        self._paused = 0

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While it lasts, the reference runs before the model does, and their calls are compared."""
        root, modules = [self._reference.root], list(self._ours)
        try:
            with (
                before_forward(root, self._start),
                before_forward(modules, self._enter),
                after_forward(modules, self._leave),
                after_forward(root, self._end),
            ):
                yield
        finally:
            self._current = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While it lasts, forward passes are not seen."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @property
    def warned(self) -> bool:
        """Whether there has been a reason why something can't be compared."""
        return bool(self._warned)

    def say(self, reason: str) -> None:
        """Warn why something can't be compared, if that has not been said before."""
        if reason not in self._warned:
            self._warned.add(reason)
            self._warn(reason)

    def _leave_out(self, name: str, error: Exception) -> None:
        reason = error if isinstance(error, NotComparableError) else f"{type(error).__name__}: {error}"
        self.say(f"{name or 'the root module'} is not compared: {reason}")

    def _start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (
            self._paused
            or not module.training
            or is_reference_run()
            or is_recomputation()
            or is_transformed(filter(_is_tensor, chain(args, kwargs.values(), module.parameters())))
            or _is_nested(module)
        ):
            return
        self._current = None  # a pass that has raised an error
        self._current = self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Pass | None:
        # Once more with copies, where something that was kept has been changed in place before the run was over; and
        # where the run makes a backward pass of its own, with what that needs.
        for _ in range(_ATTEMPTS):
            current = _Pass(self._offload, self._unstable)
            saves = self._reference.saves
            try:
                self._reference.follow()
                with after_forward(self._theirs, self._keeping(current)):
                    self._reference.run("", args, kwargs)
            except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
                if self._reference.saves != saves:
                    continue
                reason = f"the reference can't be run on the model's inputs ({type(error).__name__}: {error})"
                self.say(f"{reason}, so nothing is compared")
                return None
            changed = current.changed()
            if not changed:
                return current
            self._unstable |= changed
        return current

    def _keeping(self, current: _Pass) -> Callable[..., None]:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            name = self._theirs[module]
            current.keep(name, self._comparison.keep(name, module, args, kwargs, output))

        return keep

    def _seen(self) -> _Pass | None:
        return None if is_reference_run() or is_recomputation() else self._current

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        current = self._seen()
        if current is None:
            return
        name = self._ours[module]
        kept = current.take(name)
        if kept is None:
            return
        try:
            current.begun[name] = self._comparison.enter(name, module, args, kwargs, kept), kept
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self._leave_out(name, error)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        current = self._seen()
        if current is None:
            return
        name = self._ours[module]
        begun = current.begun.pop(name, None)
        if begun is None:
            return
        try:
            with torch.no_grad():
                result = self._comparison.leave(name, output, *begun)
        except FailedFunctionError:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            self._leave_out(name, error)
            return
        if result is not None:
            current.results.setdefault(name, []).append(result)

    def _end(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        current = self._seen()
        if current is None or _is_nested(module):
            return
        self._current = None
        for name in current.unpaired():
            current.results.pop(name, None)
            self._leave_out(name, NotComparableError("it is called other than in the reference"))
        self._comparison.passed(current.results)


class _Pass:
    def __init__(self, offload: bool, unstable: set[str]) -> None:
        self._offload = offload
        self._unstable = unstable
        self._kept: dict[str, deque[list[tuple[Tensor, torch.device] | None]]] = {}
        self._versions: list[tuple[str, weakref.ref[Tensor], int]] = []
        self._on_host: dict[int, tuple[weakref.ref[Tensor], int, weakref.ref[Tensor]]] = {}
        self._unpaired: dict[str, None] = {}
        self.begun: dict[str, Any] = {}
        self.results: dict[str, list[Any]] = {}

    def keep(self, name: str, tensors: Sequence[Tensor | None]) -> None:
        held = [None if each is None else (self._hold(name, each), each.device) for each in tensors]
        self._kept.setdefault(name, deque()).append(held)

    def _hold(self, name: str, tensor: Tensor) -> Tensor:
        if self._offload:
            return self._offloaded(tensor)
        held = tensor.detach()
        if name in self._unstable:
            return held.clone()
        self._versions.append((name, weakref.ref(held), _version(held)))
        return held

    def _offloaded(self, tensor: Tensor) -> Tensor:
        # The input of several modules is kept once.
        source, version, copy = self._on_host.get(id(tensor), (None, None, None))
        if source is not None and copy is not None and source() is tensor and version == _version(tensor):
            same = copy()
            if same is not None:
                return same
        pinned = tensor.device.type == "cuda"
        held = torch.empty_like(tensor, device="cpu", pin_memory=pinned, requires_grad=False)
        held.copy_(tensor.detach(), non_blocking=True)
        self._on_host[id(tensor)] = weakref.ref(tensor), _version(tensor), weakref.ref(held)
        return held

    def changed(self) -> set[str]:
        return {
            name
            for name, reference, version in self._versions
            if (tensor := reference()) is not None and _version(tensor) != version
        }

    def take(self, name: str) -> list[Tensor | None] | None:
        queue = self._kept.get(name)
        if not queue or name in self.begun:
            self._unpaired[name] = None
            return None
        return [None if each is None else each[0].to(each[1], non_blocking=True) for each in queue.popleft()]

    def unpaired(self) -> list[str]:
        left = {name: None for name, queue in self._kept.items() if queue}
        return list(self._unpaired | left | dict.fromkeys(self.begun))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version(tensor)


def _is_nested(module: nn.Module) -> bool:
    frame, calls = sys._getframe(), 0
    while frame.f_back is not None:
        frame = frame.f_back
        calls += frame.f_code is module_call and frame.f_locals["self"] is module
    return calls > 1
