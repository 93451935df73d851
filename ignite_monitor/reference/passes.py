"""Forward passes of a model beside those of a reference, call by call."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.model._torch import current_backward, is_transformed, module_call, parameters_of_each, versions
from ignite_monitor.model._torch import version as version_of
from ignite_monitor.model.forward import ModuleHook, after_forward, before_forward
from ignite_monitor.model.norms import any_sharded
from ignite_monitor.model.structure import modules_by_name
from ignite_monitor.reference.call import Call, Comparison, FailedFunctionError, NotComparableError
from ignite_monitor.reference.isolation import TrainingModelUsedError, here
from ignite_monitor.reference.reference import Reference
from ignite_monitor.reference.user_hooks import noticed

_ATTEMPTS = 3


class ReferencePasses:
    """Runs a reference before each forward pass of the model, on the same inputs.

    Seen are passes of the whole model in training mode; neither what activation checkpointing repeats, nor passes
    that raise an error, nor calls of submodules on their own. What is kept of the reference is freed as the model
    reaches it.

    Args:
        warn: is told why something can't be compared, each reason once.
        offload: whether what is kept waits in the host's memory, page-locked, rather than on the device.

    Attributes:
        incomplete: names of which a call could not be compared since :meth:`watched` began.
        seen: whether a pass has been compared.
        outermost: of the newest pass, the module that was called from outside, a wrapper of the model.
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
        self._current: KeptPass | None = None
        self._around = contextlib.ExitStack()
        self._weights: dict[nn.Module, tuple[Any, ...]] = {}
        self._modules = modules_by_name(reference.root)
        names = list(names)
        self._ours = {self._modules[name]: name for name in names}
        self._theirs = {reference.modules[name]: name for name in names}
        self._paused = 0
        self.incomplete: set[str] = set()
        self.seen = False
        self.outermost: weakref.ref[nn.Module] = weakref.ref(reference.root)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While it lasts, the reference runs before the model does, and their calls are compared."""
        modules = list({self._reference.root: "", **self._ours})
        self.incomplete.clear()
        try:
            with (
                before_forward(modules, _Hook(self._before)),
                after_forward(modules, _Hook(self._after)),
            ):
                yield
        finally:
            self._forget()

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
        self.incomplete.add(name)
        reason = error if isinstance(error, NotComparableError) else f"{type(error).__name__}: {error}"
        self.say(f"{name or 'the root module'} is not compared: {reason}")

    def _leave_all_out(self, reason: str) -> None:
        self.incomplete.update(self._ours.values())
        self.say(f"{reason}, so nothing is compared")

    def _forget(self) -> None:
        self._current = None
        self._weights.clear()
        self._around.close()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is self._reference.root:
            self._start(module, args, kwargs)
        self._enter(module, args, kwargs)

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._leave(module, output)
        if module is self._reference.root:
            self._end(module)

    # A pass of the whole model

    def _start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (
            self._paused
            or not module.training
            or here.running
            or current_backward() != -1
            or is_transformed(
                [each for each in (*args, *kwargs.values(), *module.parameters()) if isinstance(each, Tensor)]
            )
            or (around := _modules_around()).count(module) > 1
        ):
            return
        self.outermost = weakref.ref(around[-1])
        self._forget()  # a pass that has raised an error
        current = self._run(args, kwargs)
        if current is None:
            return
        if self._comparison.by_weights:
            # Parts of sharded ones are put together while a module runs.
            sharded = any_sharded(module.parameters())
            modules = list(module.modules())
            self._weights = {
                each: tuple(own.values())
                for each, own in zip(modules, parameters_of_each(modules), strict=True)
                if own and not (sharded and any_sharded(each.parameters(recurse=False)))
            }
        if self._reference.is_copy:
            self._around.enter_context(noticed(self._modules, self._hook_has_changed))
        self._current = current

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> KeptPass | None:
        # Once more with copies, where something that was kept has been changed in place before the run was over; and
        # where the run makes a backward pass of its own, with what that needs.
        for _ in range(_ATTEMPTS):
            current = KeptPass(self._offload, self._unstable)
            saves = self._reference.saves
            try:
                self._reference.follow()
                with after_forward(self._theirs, _Hook(self._keeping(current))):
                    self._reference.run("", args, kwargs)
            except TrainingModelUsedError as error:
                self._leave_all_out(str(error))
                return None
            except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
                if self._reference.saves != saves:
                    continue
                self._leave_all_out(
                    f"the reference can't be run on the model's inputs ({type(error).__name__}: {error})"
                )
                return None
            changed = current.changed()
            if not changed:
                return current
            self._unstable |= changed
        return current

    def _keeping(self, current: KeptPass) -> Callable[..., None]:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            name = self._theirs.get(module)
            if name is None:
                return
            current.keep(name, self._comparison.keep(Call(name, module, args, kwargs, output)))

        return keep

    def _hook_has_changed(self, name: str) -> None:
        if self._current is not None:
            self._current = None
            self._leave_all_out(
                f"a forward hook on {name or 'the root module'} changes its inputs or outputs, and the reference, a "
                "copy of the model, is without it: give a module as the argument reference"
            )

    def _end(self, module: nn.Module) -> None:
        current = self._current
        if current is None or here.running or current_backward() != -1 or _modules_around().count(module) > 1:
            return
        self._forget()
        for name in current.unpaired():
            self._leave_out(name, NotComparableError("it is called other than in the reference"))
        self.seen = True
        self._comparison.passed({name: each for name, each in current.results.items() if name not in self.incomplete})

    # A call of one module

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        current, name = self._current, self._ours.get(module)
        if current is None or name is None or here.running or current_backward() != -1:
            return
        kept = current.take(name)
        if kept is None:
            return
        call = Call(name, module, args, kwargs, kept=kept)
        try:
            if self._weights and not self._has_its_weights(module):
                raise NotComparableError("its weights are given in its call, as torch.func.functional_call does it")
            call.entered = self._comparison.enter(call)
            current.begun[name] = call
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self._leave_out(name, error)

    def _leave(self, module: nn.Module, output: Any) -> None:
        current, name = self._current, self._ours.get(module, "")
        call = None if current is None or here.running else current.begun.get(name)
        if current is None or call is None or call.module is not module:
            return
        del current.begun[name]
        call.output = output
        try:
            with torch.no_grad():
                result = self._comparison.leave(call)
        except FailedFunctionError:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            self._leave_out(name, error)
            return
        if result is not None:
            current.results.setdefault(name, []).append(result)

    def _has_its_weights(self, module: nn.Module) -> bool:
        """Whether a module and all in it have the parameters that they had when the pass began."""
        modules = list(module.modules())
        return all(
            len(then) == len(now) and all(map(is_, now.values(), then))
            for each, now in zip(modules, parameters_of_each(modules), strict=True)
            if (then := self._weights.get(each)) is not None
        )


class _Hook(ModuleHook):
    """Calls a function that tells the modules of the model from shallow copies of them."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *given: Any) -> None:
        self._function(*given)


def _modules_around() -> list[nn.Module]:
    """The modules whose forward passes are going on, the innermost first."""
    frame, found = sys._getframe(), []
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is module_call:
            found.append(frame.f_locals["self"])
    return found


class KeptPass:
    """The calls of one forward pass: of the reference's what is kept, of the model's those under way.

    Args:
        unstable: names of modules of whose calls a copy has to be kept, since it is changed in place later on.

    Attributes:
        begun: the model's calls that have not returned yet.
        results: name -> what its calls have come to.
    """

    def __init__(self, offload: bool, unstable: set[str]) -> None:
        self._offload = offload
        self._unstable = unstable
        self._kept: dict[str, deque[list[tuple[Tensor, torch.device] | None]]] = {}
        self._versions: list[tuple[str, weakref.ref[Tensor], int]] = []
        self._on_host: dict[int, tuple[weakref.ref[Tensor], int, weakref.ref[Tensor]]] = {}
        self._unpaired: dict[str, None] = {}
        self.begun: dict[str, Call] = {}
        self.results: dict[str, list[Any]] = {}

    def keep(self, name: str, tensors: Sequence[Tensor | None]) -> None:
        """Keep tensors of a call of the reference."""
        held = [None if each is None else (self._hold(name, each), each.device) for each in tensors]
        self._kept.setdefault(name, deque()).append(held)

    def changed(self) -> set[str]:
        """The names of whose tensors some have been changed in place since they were kept."""
        there = [(name, tensor, then) for name, kept, then in self._versions if (tensor := kept()) is not None]
        now = versions([tensor for _, tensor, _ in there])
        return {name for (name, _, then), version in zip(there, now, strict=True) if version != then}

    def take(self, name: str) -> list[Tensor | None] | None:
        """What was kept of the next call of a name; None where the reference has made no such call."""
        queue = self._kept.get(name)
        if not queue or name in self.begun:
            self._unpaired[name] = None
            return None
        return [None if each is None else each[0].to(each[1], non_blocking=True) for each in queue.popleft()]

    def unpaired(self) -> list[str]:
        """The names that are not called in the model as they are in the reference."""
        left = {name: None for name, queue in self._kept.items() if queue}
        return list(self._unpaired | left | dict.fromkeys(self.begun))

    def _hold(self, name: str, tensor: Tensor) -> Tensor:
        if self._offload:
            return self._offloaded(tensor)
        held = tensor.detach()
        if name in self._unstable:
            return held.clone()
        self._versions.append((name, weakref.ref(held), version_of(held)))
        return held

    def _offloaded(self, tensor: Tensor) -> Tensor:
        # The input of several modules is kept once.
        source, version, copy = self._on_host.get(id(tensor), (None, None, None))
        if source is not None and copy is not None and source() is tensor and version == version_of(tensor):
            same = copy()
            if same is not None:
                return same
        pinned = tensor.device.type == "cuda"
        held = torch.empty_like(tensor, device="cpu", pin_memory=pinned, requires_grad=False)
        held.copy_(tensor.detach(), non_blocking=True)
        self._on_host[id(tensor)] = weakref.ref(tensor), version_of(tensor), weakref.ref(held)
        return held
