"""Forward passes of a model compared with those of a reference, call by call."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ignite_monitor.events.hooks import weak_method
from ignite_monitor.model._torch import in_backward, running_transform
from ignite_monitor.model.dtensor import any_dtensor
from ignite_monitor.model.forward import after_forward, before_forward, running_modules
from ignite_monitor.model.isolation import in_second_pass
from ignite_monitor.model.modes import without_dispatch_modes
from ignite_monitor.model.names import hookable, named_modules
from ignite_monitor.monitor.ranks import Ranks
from ignite_monitor.reference.reference import NotComparableError, Reference, user_forward_hooks

_OTHER_CALLS = "it is called other than in the reference"


class Call(NamedTuple):
    """The start of a call of a module, of the model or of the reference; the name is that in the model."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Comparison:
    """Comparison of each call of the model with the same call of the reference, added up until :meth:`clear`.

    Methods run in the model's grad mode. An error excludes the module, with a warning.
    """

    def keep(self, call: Call) -> Tensor | None:
        """Return the tensor of a call of the reference to copy for the model's call."""
        raise NotImplementedError

    def compare(self, call: Call, kept: Tensor | None) -> None:
        """Handle a call of the model, with the tensor kept of the same call of the reference."""
        raise NotImplementedError

    def clear(self) -> None:
        """Forget all calls."""


@dataclass
class _Pass:
    """One forward pass of the model."""

    kept: dict[str, deque[Tensor | None]] = field(default_factory=dict)  # by name, of calls that are not made yet
    weights: set[int] = field(default_factory=set)  # ids of the parameters; empty if they are sharded
    depth: int = 1  # calls of the whole model in progress: it may call itself


class ReferencePasses:
    """Runs a reference before each forward pass of the model, on the same inputs.

    Compared are passes of the whole model in training mode; not what activation checkpointing repeats, or calls of
    submodules alone. Copies of the reference's tensors are freed as the model reaches them.

    Args:
        report: a method like :meth:`Monitor.report`, whose object is not kept.

    Attributes:
        incomplete: names of modules with a call that could not be compared since :meth:`watched` began.
    """

    def __init__(
        self, reference: Reference, names: Iterable[str], comparison: Comparison, report: Callable[..., object]
    ) -> None:
        self.comparison = comparison
        self.incomplete: set[str] = set()
        self._reference = reference
        self._names = list(names)
        self._modules: dict[str, nn.Module] = {}
        self._model_names: dict[nn.Module, str] = {}
        self._report = weak_method(report)
        self._reported: set[str] = set()  # subjects of all runs
        self._pass: _Pass | None = None
        self._outermost: weakref.ref[nn.Module] = weakref.ref(reference.root)  # what was called first in a pass
        self._step_count = 0  # steps of this run
        self._has_compared = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Compare the model's forward passes inside of this context, around one train step."""
        self.comparison.clear()
        self.incomplete.clear()
        self._step_count += 1
        self._modules = dict(named_modules(self._reference.root))
        hooked = hookable(self._modules)
        self._model_names = {hooked[name]: name for name in self._names if name in hooked}
        skipped = [name for name in self._names if name in self._modules and name not in hooked]
        if skipped:
            text = f"{skipped[0]} and others are in a frozen nn.TransformerEncoderLayer, whose fast path has no hooks"
            self._report_once("fast path", text)
        root = self._reference.root
        try:
            before = before_forward({root: "", **self._model_names}, self._before)
            with before, after_forward([root], self._after_root, always=True):
                yield
        finally:
            self._pass = None

    def end_run(self) -> None:
        """Report if no train step of the run had a pass to compare."""
        if self._step_count and not self._has_compared and not self.incomplete:
            text = "monitored iterations had a forward pass of the whole model in training mode, outside of torch.func"
            self._report("no_forward_pass", f"none of {self._step_count} {text}, so nothing is measured")
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
        except Exception as error:  # noqa: BLE001 - training goes on
            self.incomplete.add(name)
            reason = str(error) if isinstance(error, NotComparableError) else f"{type(error).__name__}: {error}"
            self._report_once(f"module {name}", f"{name or 'the root module'} is not compared: {reason}")

    def _exclude_all(self, reason: str) -> None:
        self.incomplete.update(self._names)
        self._report_once("all", f"{reason}, so nothing is compared")

    def _report_once(self, subject: str, text: str) -> None:
        if subject not in self._reported:
            self._reported.add(subject)
            self._report("not_compared", text, once=False)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if in_second_pass() or in_backward():
            return
        if module is self._reference.root and module.training and running_transform() is None:
            if self._pass is None:
                self._start(args, kwargs)
            else:
                self._pass.depth += 1
        name, current = self._model_names.get(module), self._pass
        if current is None or name is None:
            return
        with self._excluding(name), without_dispatch_modes():
            if not current.kept.get(name):
                raise NotComparableError(_OTHER_CALLS)
            kept = current.kept[name].popleft()
            if current.weights and not current.weights.issuperset(map(id, module.parameters())):
                raise NotComparableError("its weights are given in its call, as torch.func.functional_call does it")
            self.comparison.compare(Call(name, module, args, kwargs), kept)

    def _start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._outermost = weakref.ref([*running_modules()][-1])
        names = {self._reference.modules[name]: name for name in self._model_names.values()}
        current = _Pass()

        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensor = self.comparison.keep(Call(names[module], module, args, kwargs))
            # A copy: the reference may change its tensors in place.
            copied = None if tensor is None else tensor.detach().clone()
            current.kept.setdefault(names[module], deque()).append(copied)

        try:
            hooked = user_forward_hooks(self._modules.values()) if self._reference.is_copy else {}
            for name in [name for name, module in self._modules.items() if module in hooked]:
                raise NotComparableError(
                    f"{name or 'the root module'} has a forward hook, and the reference, a copy of the model, is "
                    "without it: give a module as the argument reference"
                )
            self._reference.match_model()
            with before_forward(names, keep):
                self._reference.run(args, kwargs)
        except NotComparableError as error:
            self._exclude_all(str(error))
        except Exception as error:  # noqa: BLE001 - training goes on
            self._exclude_all(f"the reference can't be run on the model's inputs ({type(error).__name__}: {error})")
        else:
            self._pass = current
            parameters = list(self._reference.root.parameters())
            if not any_dtensor(parameters):
                current.weights.update(map(id, parameters))

    def _after_root(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        current = self._pass
        if current is None or in_second_pass() or in_backward():
            return
        current.depth -= 1
        if current.depth:
            return
        self._pass = None
        self._has_compared = True
        if output is None:  # torch's value after an error
            self._exclude_all("a forward pass of the model raised an error or returned None")
            return
        for name in [name for name, calls in current.kept.items() if calls]:
            with self._excluding(name):
                raise NotComparableError(_OTHER_CALLS)
