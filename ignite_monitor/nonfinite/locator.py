"""Location of the first non-finite value, by a second pass of a copy of the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ignite_monitor.events.monitor_events import NonFiniteSource
from ignite_monitor.model._torch import DispatchMode
from ignite_monitor.model.eager import Eager
from ignite_monitor.model.isolation import capture_rng_state, generators_of, isolated_pass
from ignite_monitor.model.names import named_modules, named_parameters, unwrapped
from ignite_monitor.model.norms import any_sharded
from ignite_monitor.nonfinite.calls import ModelCall, ModelCalls
from ignite_monitor.nonfinite.trace import Operation, Trace, TracedCall, non_finite
from ignite_monitor.reference.copies import detached_copy, guarded, separate_copy


class NotLocatedError(Exception):
    """Reason why a source could not be located; its message completes "it could not be located: ..."."""


class NonFiniteLocator:
    """Locate the source of a non-finite gradient.

    When a backward pass ended in a non-finite gradient, a copy of the model is run with the inputs and the RNG state of
    the train step, then a random gradient is back-propagated through it. Only the first of consecutive non-finite
    gradients is located. Otherwise only the model's inputs and RNG state are noted.

    Attributes:
        calls: calls of the model since its last backward pass, a context around the train step.
        found: source of the newest gradient; None if it is finite or the source could not be located.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._was_finite = True
        self.calls = ModelCalls(model)
        self.found: NonFiniteSource | None = None

    def look(self, is_finite: bool, is_overflow: bool, alone: bool) -> str | None:
        """Handle the end of a backward pass; return the text of a warning.

        Args:
            is_finite: whether its gradient is finite.
            is_overflow: whether a non-finite gradient may be an overflow of a scaled loss, so that only non-finite
                values in forward are reported.
            alone: whether the gradient is computed by this process alone.
        """
        self.calls.backward_ended()
        was_finite, self._was_finite = self._was_finite, is_finite
        if is_finite:
            self.found = None
        if is_finite or not was_finite:
            return None
        try:
            self.found = _locate(self._model, self.calls, is_overflow, alone)
        except Exception as error:  # noqa: BLE001 - training goes on, also without memory
            self.found = None
            known = isinstance(error, (NotLocatedError, ValueError))
            reason = str(error) if known else f"{type(error).__name__}: {error}"
            return None if is_overflow else f"the gradient is not finite; its source could not be located: {reason}"
        return None if self.found is None else f"the gradient is not finite. {self.found.text}"


def _locate(model: nn.Module, calls: ModelCalls, is_overflow: bool, alone: bool) -> NonFiniteSource | None:
    root = unwrapped(model)
    _check(model, root, calls)
    gradients = non_finite({name: parameter.grad for name, parameter, _ in named_parameters(root)})
    separate, _ = separate_copy(root)
    modules: dict[str, nn.Module] = {}
    for name, module in named_modules(separate):
        modules.setdefault(name, module)
    trace = Trace(modules)
    with _isolated(root, separate, calls.calls[0]):
        with trace.followed():
            for call in calls.calls:
                _call_again(separate, call)
        if not all(call.finite_outputs for call in trace.outermost):
            return _forward_source(trace.source, separate)
        operation = None if is_overflow or not trace.outputs else trace.backward()
    if is_overflow:
        return None
    reached = {name: item.grad for name, item, _ in named_parameters(separate) if item.grad is not None}
    if operation is not None and non_finite(reached) & gradients:
        return _backward_source(operation)
    if trace.source is not None:
        return _forward_source(trace.source, separate)
    if not alone:
        raise NotLocatedError("all values of this rank are finite, so it is another rank's, or the loss's")
    if not reached or not reached.keys() <= gradients:
        raise NotLocatedError("forward and backward of a copy of the model are finite")
    text = "It comes from the loss: the model's outputs are finite, and so is its backward of a finite gradient"
    return NonFiniteSource("", "loss", text)


def _check(model: nn.Module, root: nn.Module, calls: ModelCalls) -> None:
    reasons = {
        "a scripted module has no copy": any(isinstance(item, torch.jit.ScriptModule) for item in root.modules()),
        "the model is sharded": any_sharded(root.parameters()),
        "the model was not called as a whole, or is compiled in place": not calls.calls,
        "the model was called too often": not calls.complete,
        "the model's inputs have been changed in place": any(call.is_changed for call in calls.calls),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None:
        raise NotLocatedError(reason)


def _forward_source(call: TracedCall | None, root: nn.Module) -> NonFiniteSource:
    if call is None:
        return NonFiniteSource("", "input", "It comes from the model's inputs, which are not finite")
    name = call.name or "_root_"
    text = f"It comes from the forward of {name}: its inputs are finite, and its output is not"
    names = {id(parameter): name for name, parameter, _ in named_parameters(root)}
    parameters = non_finite({names[id(item)]: item for item in call.module.parameters()})
    if parameters:
        text += f", nor is its parameter {min(parameters)}"
    return NonFiniteSource(name, "forward", text)


def _backward_source(operation: Operation) -> NonFiniteSource:
    name = operation.module or "_root_"
    made = "" if operation.made else "a gradient hook on the output of "
    text = f"It comes from the backward of {name}: {made}{operation.name} makes a non-finite gradient of a finite one"
    return NonFiniteSource(name, "backward", text)


# The second pass


@contextlib.contextmanager
def _isolated(root: nn.Module, separate: nn.Module, call: ModelCall) -> Iterator[None]:
    """Isolate a pass of a copy.

    Raises:
        NotLocatedError: if it draws random numbers whose state at the model's call is not known.
    """
    has_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    devices = [generator.device for generator, _ in call.generators]
    with (
        isolated_pass(separate, devices=devices),
        guarded(root, separate),
        Eager(separate),
        torch.enable_grad(),
        _NoCollectives() if has_ranks else contextlib.nullcontext(),
    ):
        before = _other_states(separate)
        yield
        if _other_states(separate) != before:
            raise NotLocatedError("the model draws from Python's or NumPy's generators, or from one of its own")


def _other_states(model: nn.Module) -> str:
    """RNG state other than torch's default generators."""
    state = capture_rng_state([])
    generators = [item for module in model.modules() for item in generators_of(module).values()]
    own = [item.get_state().tolist() for item in generators if isinstance(item, torch.Generator)]
    others = [
        item.bit_generator.state if hasattr(item, "bit_generator") else getattr(item, "getstate", item.get_state)()
        for item in generators
        if not isinstance(item, torch.Generator)
    ]
    return repr((state["python"], state.get("numpy"), own, others))


def _call_again(model: nn.Module, call: ModelCall) -> None:
    for generator, state in call.generators:
        generator.set_state(state)
    with contextlib.ExitStack() as contexts:
        for kind, (enabled, dtype) in call.autocast.items():
            contexts.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
        args, kwargs = detached_copy((call.args, call.kwargs))
        model(*args, **kwargs)


class _NoCollectives(DispatchMode):
    """Refuse collectives, in which other ranks may not take part."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            raise NotLocatedError("the model communicates with other ranks")
        return func(*args, **(kwargs or {}))
