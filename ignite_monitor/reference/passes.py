"""Forward passes of a model compared with those of a reference, call by call."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.model._torch import in_backward, module_call, running_transform, version
from ignite_monitor.model.dtensor import any_dtensor
from ignite_monitor.model.forward import after_forward, before_forward
from ignite_monitor.model.isolation import in_second_pass
from ignite_monitor.model.names import hookable, modules_by_name
from ignite_monitor.model.tensors import tensors_in
from ignite_monitor.reference.reference import NotComparableError, Reference, user_forward_hooks

_OTHER_CALLS = "it is called other than in the reference"


class FailedFunctionError(RuntimeError):
    """Error of a user's function, which is not caught."""


@dataclass(slots=True)
class Call:
    """One call of a module, of the model or of the reference; the name is that in the model."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None  # before it returns
    kept: list[Tensor | None] = field(default_factory=list)  # of Comparison.keep for the same call of the reference
    entered: Any = None  # of Comparison.enter


class Comparison:
    """Comparison of each call of the model with the same call of the reference.

    :meth:`keep` and :meth:`enter` run in the model's grad mode, :meth:`leave` without gradients. An error excludes the
    module, with a warning; a :class:`FailedFunctionError` is raised.

    Attributes:
        by_weights: whether weights are compared, so that a call with other weights than the module's is excluded.
    """

    by_weights = True

    def keep(self, call: Call) -> Sequence[Tensor | None]:
        """Return the tensors of a reference call to copy for the model's call."""
        raise NotImplementedError

    def enter(self, call: Call) -> Any:
        """Handle the start of a call of the model; the result becomes ``call.entered``."""

    def leave(self, call: Call) -> Any:
        """Return the result of a call of the model, for :meth:`passed`; None for no result."""
        return call.entered

    def passed(self, results: dict[str, list[Any]]) -> None:
        """Take the results of a complete forward pass: for each name, one per call."""
        raise NotImplementedError

    def clear(self) -> None:
        """Forget all results."""


@dataclass
class _Pass:
    """One forward pass of the model: tensors and calls by name."""

    kept: dict[str, deque[list[Tensor | None]]] = field(default_factory=dict)  # of calls that are not made yet
    open: dict[str, Call] = field(default_factory=dict)  # calls that have not returned
    results: dict[str, list[Any]] = field(default_factory=dict)
    weights: set[int] = field(default_factory=set)  # ids of the parameters, if weights are compared


class ReferencePasses:
    """Runs a reference before each forward pass of the model, on the same inputs.

    Compared are passes of the whole model in training mode; not what activation checkpointing repeats, passes that
    raise an error, or calls of submodules alone. Copies of the reference's tensors are freed as the model reaches them.

    Attributes:
        incomplete: names of modules of which a call could not be compared since :meth:`watched` began.
        seen: whether a pass was compared.
        outermost: for the newest pass, the module that was called first, a wrapper of the model.
    """

    def __init__(
        self,
        reference: Reference,
        names: Iterable[str],
        comparison: Comparison,
        warn: Callable[[str], object],
        warned: set[str],  # modules of which was warned
        pauses: Sequence[None] = (),  # passes are ignored while it has elements
    ) -> None:
        self.comparison = comparison
        self.incomplete: set[str] = set()
        self.seen = False
        self.outermost: weakref.ref[nn.Module] = weakref.ref(reference.root)
        self._reference = reference
        self._names = list(names)
        self._modules = modules_by_name(reference.root)
        self._model_names: dict[nn.Module, str] = {}
        self._warn = warn
        self._warned = warned
        self._pauses = pauses
        self._pass: _Pass | None = None
        self._hooks = contextlib.ExitStack()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Compare the model's forward passes inside of this context."""
        self.incomplete.clear()
        hooked = hookable(self._modules)
        self._model_names = {self._modules[name]: name for name in self._names if name in hooked}
        skipped = [name for name in self._names if name not in hooked]
        if skipped:
            text = f"{skipped[0]} and others are in a frozen nn.TransformerEncoderLayer, whose fast path has no hooks"
            self._warn_once("fast path", text)
        modules = {self._reference.root: "", **self._model_names}
        try:
            with before_forward(modules, self._before), after_forward(modules, self._after):
                yield
        finally:
            self._forget()

    @contextlib.contextmanager
    def _excluding(self, name: str) -> Iterator[None]:
        """Exclude a module after an error, so that training goes on."""
        try:
            yield
        except FailedFunctionError:
            raise
        except Exception as error:  # noqa: BLE001 - training goes on
            self.incomplete.add(name)
            reason = str(error) if isinstance(error, NotComparableError) else f"{type(error).__name__}: {error}"
            self._warn_once(f"module {name}", f"{name or 'the root module'} is not compared: {reason}")

    def _exclude_all(self, reason: str) -> None:
        self.incomplete.update(self._names)
        self._warn_once("all", f"{reason}, so nothing is compared")

    def _warn_once(self, subject: str, text: str) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            self._warn(text)

    def _forget(self) -> None:
        self._pass = None
        self._hooks.close()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if in_second_pass() or in_backward():
            return
        if module is self._reference.root and module.training and not self._pauses and running_transform() is None:
            self._start(module, args, kwargs)
        name, current = self._model_names.get(module), self._pass
        if current is None or name is None:
            return
        with self._excluding(name):
            call, kept = Call(name, module, args, kwargs), current.kept.get(name)
            if not kept or name in current.open:
                raise NotComparableError(_OTHER_CALLS)
            call.kept = kept.popleft()
            if current.weights and not current.weights.issuperset(map(id, module.parameters())):
                raise NotComparableError("its weights are given in its call, as torch.func.functional_call does it")
            call.entered = self.comparison.enter(call)
            current.open[name] = call

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        current = self._pass
        if current is None or in_second_pass() or in_backward():
            return
        name = self._model_names.get(module)
        call = None if name is None else current.open.pop(name, None)
        if call is not None:
            call.output = output
            with self._excluding(call.name), torch.no_grad():
                result = self.comparison.leave(call)
                if result is not None:
                    current.results.setdefault(call.name, []).append(result)
        if module is self._reference.root and module not in _calls_in_progress()[1:]:
            self._end(current)

    def _start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls = _calls_in_progress()
        if module in calls[1:]:
            return
        self._forget()  # a pass that raised an error
        self.outermost = weakref.ref(calls[-1])
        names = {self._reference.modules[name]: name for name in self._model_names.values()}
        current = _Pass()

        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            tensors = self.comparison.keep(Call(names[module], module, args, kwargs, output))
            # Copies: the reference may change its tensors in place.
            copies = [None if item is None else item.detach().clone() for item in tensors]
            current.kept.setdefault(names[module], deque()).append(copies)

        try:
            self._reference.match_model()
            with after_forward(names, keep):
                self._reference.run("", args, kwargs)
        except NotComparableError as error:
            self._exclude_all(str(error))
        except Exception as error:  # noqa: BLE001 - training goes on
            self._exclude_all(f"the reference can't be run on the model's inputs ({type(error).__name__}: {error})")
        else:
            self._pass = current
            if self.comparison.by_weights and not any_dtensor(module.parameters()):
                current.weights.update(map(id, module.parameters()))
            if self._reference.is_copy:
                self._hooks.enter_context(_changes_by_user_hooks(self._modules, self._on_change_by_hook))

    def _on_change_by_hook(self, name: str) -> None:
        if self._pass is not None:
            self._pass = None
            self._exclude_all(
                f"a forward hook on {name or 'the root module'} changes its inputs or outputs, and the reference, a "
                "copy of the model, is without it: give a module as the argument reference"
            )

    def _end(self, current: _Pass) -> None:
        self._forget()
        for name in {name for name, calls in current.kept.items() if calls}.union(current.open):
            with self._excluding(name):
                raise NotComparableError(_OTHER_CALLS)
        self.seen = True
        self.comparison.passed({name: calls for name, calls in current.results.items() if name not in self.incomplete})


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
    hooked = list(user_forward_hooks(names))
    before: list[list[tuple[int, int]]] = []

    def note(module: nn.Module, *values: Any) -> None:
        before.append([(id(item), version(item)) for _, item in tensors_in(values)])

    def compare(module: nn.Module, *values: Any) -> None:
        if before and before.pop() != [(id(item), version(item)) for _, item in tensors_in(values)]:
            on_change(names[module])

    with (
        before_forward(hooked, note, first=True),
        before_forward(hooked, compare),
        after_forward(hooked, note, first=True),
        after_forward(hooked, compare),
    ):
        yield
