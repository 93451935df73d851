"""Forward passes of a model compared with those of a reference, call by call."""

from __future__ import annotations

import contextlib
import re
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.model._torch import backward_number, is_transformed, module_call, version
from ignite_monitor.model.forward import ModuleHook, after_forward, before_forward
from ignite_monitor.model.isolation import is_reference_run
from ignite_monitor.model.norms import any_sharded
from ignite_monitor.model.structure import hookable_modules, modules_by_name
from ignite_monitor.model.tensors import tensors_in
from ignite_monitor.reference.call import Call, Comparison, FailedFunctionError, NotComparableError
from ignite_monitor.reference.copies import TrainingModelUsedError, user_forward_hooks
from ignite_monitor.reference.reference import Reference


class ReferencePasses:
    """Runs a reference before each forward pass of the model, on the same inputs.

    Compared are passes of the whole model in training mode; not what activation checkpointing repeats, passes that
    raise an error, or calls of submodules alone. Copies of the reference's tensors are freed as the model reaches them.

    Args:
        names: names of the modules to compare.
        warn: is called with each reason why something can't be compared, once for each module and kind of reason.

    Attributes:
        incomplete: names of modules of which a call could not be compared since :meth:`watched` began.
        seen: whether a pass was compared.
        outermost: for the newest pass, the module that was called first, a wrapper of the model.
    """

    def __init__(
        self, reference: Reference, names: Iterable[str], comparison: Comparison, warn: Callable[[str], None]
    ) -> None:
        self._reference = reference
        self._comparison = comparison
        self._warn = warn
        self._reasons: set[str] = set()
        self._current: _Pass | None = None
        self._around = contextlib.ExitStack()
        self._weights: dict[int, Tensor] = {}
        self._names = list(names)
        self._modules = modules_by_name(reference.root)
        self._model_names: dict[nn.Module, str] = {}
        self._reference_names: dict[nn.Module, str] = {}
        self._paused = 0
        self.incomplete: set[str] = set()
        self.seen = False
        self.outermost: weakref.ref[nn.Module] = weakref.ref(reference.root)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Compare the model's forward passes inside of this context."""
        self.incomplete.clear()
        hookable = hookable_modules(self._reference.root)
        names = [name for name in self._names if name in hookable]
        if len(names) < len(self._names):
            first = next(name for name in self._names if name not in hookable)
            self.say(f"{first} and others are in a frozen nn.TransformerEncoderLayer, whose fast path has no hooks")
        self._model_names = {self._modules[name]: name for name in names}
        self._reference_names = {self._reference.modules[name]: name for name in names}
        modules = list({self._reference.root: "", **self._model_names})
        try:
            with before_forward(modules, _Hook(self._before)), after_forward(modules, _Hook(self._after)):
                yield
        finally:
            self._forget()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore forward passes inside of this context."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @property
    def warned(self) -> bool:
        """Whether anything could not be compared."""
        return bool(self._reasons)

    def say(self, reason: str, subject: str = "") -> None:
        """Warn of a reason, once for each subject, whatever the numbers in the reason."""
        kind = subject + re.sub(r"\d+", "", reason)
        if kind not in self._reasons:
            self._reasons.add(kind)
            self._warn(subject + reason)

    def _exclude(self, name: str, error: Exception) -> None:
        self.incomplete.add(name)
        reason = str(error) if isinstance(error, NotComparableError) else f"{type(error).__name__}: {error}"
        self.say(reason, f"{name or 'the root module'} is not compared: ")

    def _exclude_all(self, reason: str) -> None:
        self.incomplete.update(self._names)
        self.say(f"{reason}, so nothing is compared")

    def _forget(self) -> None:
        self._current = None
        self._weights = {}
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
        tensors = [item for item in (*args, *kwargs.values(), *module.parameters()) if isinstance(item, Tensor)]
        ignored = self._paused or not module.training or is_reference_run() or backward_number() != -1
        if ignored or is_transformed(tensors) or (calls := _calls_in_progress()).count(module) > 1:
            return
        self.outermost = weakref.ref(calls[-1])
        self._forget()  # a pass that raised an error
        current = self._run(args, kwargs)
        if current is None:
            return
        if self._comparison.by_weights and not any_sharded(module.parameters()):
            self._weights = {id(item): item for item in module.parameters()}
        if self._reference.is_copy:
            self._around.enter_context(_changes_by_user_hooks(self._modules, self._on_change_by_hook))
        self._current = current

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Pass | None:
        current = _Pass()

        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            name = self._reference_names.get(module)
            if name is not None:
                tensors = self._comparison.keep(Call(name, module, args, kwargs, output))
                # Copies: the reference may change its tensors in place.
                copies = [None if item is None else item.detach().clone() for item in tensors]
                current.kept.setdefault(name, deque()).append(copies)

        try:
            self._reference.follow()
            with after_forward(self._reference_names, _Hook(keep)):
                self._reference.run("", args, kwargs)
        except TrainingModelUsedError as error:
            self._exclude_all(str(error))
        except Exception as error:  # noqa: BLE001 - training goes on
            self._exclude_all(f"the reference can't be run on the model's inputs ({type(error).__name__}: {error})")
        else:
            return current
        return None

    def _on_change_by_hook(self, name: str) -> None:
        if self._current is not None:
            self._current = None
            self._exclude_all(
                f"a forward hook on {name or 'the root module'} changes its inputs or outputs, and the reference, a "
                "copy of the model, is without it: give a module as the argument reference"
            )

    def _end(self, module: nn.Module) -> None:
        current = self._current
        if current is None or is_reference_run() or backward_number() != -1 or _calls_in_progress().count(module) > 1:
            return
        self._forget()
        for name in current.unpaired():
            self._exclude(name, NotComparableError("it is called other than in the reference"))
        self.seen = True
        results = {name: calls for name, calls in current.results.items() if name not in self.incomplete}
        self._comparison.passed(results)

    # A call of one module

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        current, name = self._current, self._model_names.get(module)
        if current is None or name is None or is_reference_run() or backward_number() != -1:
            return
        kept = current.take(name)
        if kept is None:
            return
        call = Call(name, module, args, kwargs, kept=kept)
        try:
            if self._weights and any(id(item) not in self._weights for item in module.parameters()):
                raise NotComparableError("its weights are given in its call, as torch.func.functional_call does it")
            call.entered = self._comparison.enter(call)
            current.open[name] = call
        except Exception as error:  # noqa: BLE001 - training goes on
            self._exclude(name, error)

    def _leave(self, module: nn.Module, output: Any) -> None:
        current, name = self._current, self._model_names.get(module, "")
        call = None if current is None or is_reference_run() else current.open.get(name)
        if current is None or call is None or call.module is not module:
            return
        del current.open[name]
        call.output = output
        try:
            with torch.no_grad():
                result = self._comparison.leave(call)
        except FailedFunctionError:
            raise
        except Exception as error:  # noqa: BLE001 - training goes on
            self._exclude(name, error)
            return
        if result is not None:
            current.results.setdefault(name, []).append(result)


class _Pass:
    """One forward pass.

    Attributes:
        kept: name -> for each call of the reference, copies of its tensors.
        open: the model's calls that have not returned.
        results: name -> results of the model's calls.
    """

    def __init__(self) -> None:
        self.kept: dict[str, deque[list[Tensor | None]]] = {}
        self.open: dict[str, Call] = {}
        self.results: dict[str, list[Any]] = {}
        self._unpaired: dict[str, None] = {}

    def take(self, name: str) -> list[Tensor | None] | None:
        """Return the copies for the next call of a module; None if the reference made no such call."""
        calls = self.kept.get(name)
        if not calls or name in self.open:
            self._unpaired[name] = None
            return None
        return calls.popleft()

    def unpaired(self) -> list[str]:
        """Names of modules that the model does not call as often as the reference."""
        rest = {name: None for name, calls in self.kept.items() if calls}
        return list(self._unpaired | rest | dict.fromkeys(self.open))


class _Hook(ModuleHook):
    """A function that is not called for shallow copies of the model's modules."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *values: Any) -> None:
        self._function(*values)


def _calls_in_progress() -> list[nn.Module]:
    """Modules whose forward pass is in progress, the innermost first."""
    frame, modules = sys._getframe(), []
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is module_call:
            modules.append(frame.f_locals["self"])
    return modules


@contextlib.contextmanager
def _changes_by_user_hooks(modules: dict[str, nn.Module], on_change: Callable[[str], None]) -> Iterator[None]:
    """Report the names of modules whose inputs or outputs a user's forward hook changes or replaces."""
    names = {module: name for name, module in modules.items()}
    hooked = [module for module, _ in user_forward_hooks(names)]
    before: list[list[tuple[int, int]]] = []

    def note(module: nn.Module, *values: Any) -> None:
        before.append(_identities(values))

    def compare(module: nn.Module, *values: Any) -> None:
        if before and before.pop() != _identities(values):
            on_change(names[module])

    with (
        before_forward(hooked, note, first=True),
        before_forward(hooked, compare),
        after_forward(hooked, note, first=True),
        after_forward(hooked, compare),
    ):
        yield


def _identities(values: Any) -> list[tuple[int, int]]:
    return [(id(item), version(item)) for _, item in tensors_in(values)]
