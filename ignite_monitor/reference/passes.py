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
from torch.nn.parallel import DistributedDataParallel

from ignite_monitor.events.hooks import weak_method
from ignite_monitor.model._torch import in_backward, module_call, running_transform, version
from ignite_monitor.model.dtensor import any_dtensor
from ignite_monitor.model.forward import after_forward, before_forward
from ignite_monitor.model.isolation import in_second_pass
from ignite_monitor.model.modes import without_dispatch_modes
from ignite_monitor.model.names import hookable, modules_by_name
from ignite_monitor.model.tensors import tensors_in
from ignite_monitor.monitor.ranks import Ranks
from ignite_monitor.reference.reference import NotComparableError, Reference, user_forward_hooks

# Kind and text of a report.
JOINED = "joined_ranks", "ranks may have run out of data under join(), so nothing is published of forward passes"

_OTHER_CALLS = "it is called other than in the reference"


class FailedFunctionError(RuntimeError):
    """Error of a user's function, which is not caught."""


class Pause:
    """A context manager that is true inside of its blocks, which may be nested."""

    def __init__(self) -> None:
        self._depth = 0

    def __bool__(self) -> bool:
        return self._depth > 0

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1


@dataclass(slots=True)
class Call:
    """One call of a module, of the model or of the reference; the name is that in the model."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None  # before it returns
    kept: list[Tensor | None] = field(default_factory=list)  # of Comparison.keep for the same call of the reference


class Comparison:
    """Comparison of each call of the model with the same call of the reference, added up until :meth:`clear`.

    :meth:`keep` and :meth:`enter` run in the model's grad mode, :meth:`leave` without gradients. An error excludes the
    module, with a warning; a :class:`FailedFunctionError` is raised.
    """

    def keep(self, call: Call) -> Sequence[Tensor | None]:
        """Return the tensors of a reference call to copy for the model's call."""
        raise NotImplementedError

    def enter(self, call: Call) -> None:
        """Handle the start of a call of the model."""

    def leave(self, call: Call) -> None:
        """Handle the end of a call of the model."""

    def clear(self) -> None:
        """Forget all calls."""


@dataclass
class _Pass:
    """One forward pass of the model: tensors and calls by name."""

    kept: dict[str, deque[list[Tensor | None]]] = field(default_factory=dict)  # of calls that are not made yet
    open: dict[str, Call] = field(default_factory=dict)  # calls that have not returned
    weights: set[int] = field(default_factory=set)  # ids of the parameters; empty if they are sharded


class ReferencePasses:
    """Runs a reference before each forward pass of the model, on the same inputs.

    Compared are passes of the whole model in training mode; not what activation checkpointing repeats, or calls of
    submodules alone. Copies of the reference's tensors are freed as the model reaches them.

    Args:
        report: a method like :meth:`Monitor.report`, whose object is not kept.
        pause: passes are ignored while it is true.

    Attributes:
        incomplete: names of modules with a call that could not be compared since :meth:`watched` began.
    """

    def __init__(
        self,
        reference: Reference,
        names: Iterable[str],
        comparison: Comparison,
        report: Callable[..., object],
        pause: Pause,
    ) -> None:
        self.comparison = comparison
        self.incomplete: set[str] = set()
        self._reference = reference
        self._names = list(names)
        self._modules: dict[str, nn.Module] = {}
        self._model_names: dict[nn.Module, str] = {}
        self._report = weak_method(report)
        self._reported: set[str] = set()  # subjects of all runs
        self._pause = pause
        self._pass: _Pass | None = None
        self._hooks = contextlib.ExitStack()
        self._outermost: weakref.ref[nn.Module] = weakref.ref(reference.root)  # what was called first in a pass
        self._step_count = 0  # steps of this run
        self._has_compared = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Compare the model's forward passes inside of this context, around one train step."""
        self.comparison.clear()
        self.incomplete.clear()
        self._step_count += 1
        self._modules = modules_by_name(self._reference.root)
        hooked = hookable(self._modules)
        self._model_names = {hooked[name]: name for name in self._names if name in hooked}
        skipped = [name for name in self._names if name in self._modules and name not in hooked]
        if skipped:
            text = f"{skipped[0]} and others are in a frozen nn.TransformerEncoderLayer, whose fast path has no hooks"
            self._report_once("fast path", text)
        called = {self._reference.root: "", **self._model_names}
        try:
            with before_forward(called, self._before), after_forward(called, self._after):
                yield
                self._exclude_failed_pass()
        finally:
            self._forget()

    def end_run(self, consequence: str) -> None:
        """Report if no train step of the run had a pass to compare."""
        if self._step_count and not self._has_compared and not self.incomplete:
            text = "monitored iterations had a forward pass of the whole model in training mode"
            self._report("no_forward_pass", f"none of {self._step_count} {text}, so {consequence}")
        self._step_count, self._has_compared = 0, False

    def resolve_wrapper(self, ranks: Ranks) -> None:
        """Find the ranks of a wrapper that the train step calls, of a model that was given without it."""
        wrapper = self._outermost()
        if isinstance(wrapper, DistributedDataParallel) and ranks.size == 1:
            ranks.resolve(wrapper)

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
            self._report_once(f"module {name}", f"{name or 'the root module'} is not compared: {reason}")

    def _exclude_all(self, reason: str) -> None:
        self.incomplete.update(self._names)
        self._report_once("all", f"{reason}, so nothing is compared")

    def _exclude_failed_pass(self) -> None:
        if self._pass is not None:
            self._exclude_all("a forward pass of the model raised an error")

    def _report_once(self, subject: str, text: str) -> None:
        if subject not in self._reported:
            self._reported.add(subject)
            self._report("not_compared", text, once=False)

    def _forget(self) -> None:
        self._pass = None
        self._hooks.close()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if in_second_pass() or in_backward():
            return
        if module is self._reference.root and module.training and not self._pause and running_transform() is None:
            self._start(module, args, kwargs)
        name, current = self._model_names.get(module), self._pass
        if current is None or name is None:
            return
        with self._excluding(name), without_dispatch_modes():
            call, kept = Call(name, module, args, kwargs), current.kept.get(name)
            if not kept or name in current.open:
                raise NotComparableError(_OTHER_CALLS)
            call.kept = kept.popleft()
            if current.weights and not current.weights.issuperset(map(id, module.parameters())):
                raise NotComparableError("its weights are given in its call, as torch.func.functional_call does it")
            self.comparison.enter(call)
            current.open[name] = call

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        current = self._pass
        if current is None or in_second_pass() or in_backward():
            return
        call = current.open.pop(self._model_names.get(module, ""), None)
        if call is not None:
            call.output = output
            with self._excluding(call.name), torch.no_grad(), without_dispatch_modes():
                self.comparison.leave(call)
        if module is self._reference.root and module not in _calls_in_progress()[1:]:
            self._end(current)

    def _start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls = _calls_in_progress()
        if module in calls[1:]:
            return
        self._exclude_failed_pass()
        self._forget()
        self._outermost = weakref.ref(calls[-1])
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
            if not any_dtensor(module.parameters()):
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
        self._has_compared = True
        for name in {name for name, calls in current.kept.items() if calls}.union(current.open):
            with self._excluding(name):
                raise NotComparableError(_OTHER_CALLS)


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
