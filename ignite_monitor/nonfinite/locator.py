"""Location of the first non-finite value, by a second pass of a copy of the model."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import Enum
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.events.monitor_events import NonFiniteSource
from ignite_monitor.model._torch import DispatchMode, changes_gradients, eager, version
from ignite_monitor.model.dtensor import any_dtensor
from ignite_monitor.model.forward import after_forward, before_forward
from ignite_monitor.model.isolation import capture_rng_state, generators_of, isolated_pass, set_generator_state
from ignite_monitor.model.modes import has_local_data, hidden_from_user_modes
from ignite_monitor.model.names import named_modules, named_parameters, unwrapped
from ignite_monitor.model.tensors import tensors_in
from ignite_monitor.nonfinite.calls import MOST_CALLS, ModelCall, ModelCalls
from ignite_monitor.reference.reference import detached_copy, forbid_calls_to, separate_copy


class NotLocatedError(Exception):
    """Reason why a source could not be located; its message completes "it could not be located: ..."."""


class NonFiniteLocator:
    """Locate the source of the first of consecutive non-finite gradients.

    A copy of the model is run with the inputs and the RNG state of the train step. If the outputs that received a
    gradient are finite, the loss is the source if that gradient is not; otherwise a random gradient is back-propagated
    through them.

    Attributes:
        calls: calls of the model since its last backward pass, a context around the train step.
        source: that of the latest gradient; None if it is finite or the source could not be located.
    """

    def __init__(self, model: nn.Module, generators: Collection[Any] = ()) -> None:
        self._generators = generators
        self._model = model
        self._was_finite = True
        self.calls = ModelCalls(model, generators)
        self.source: NonFiniteSource | None = None

    def locate(self, is_finite: bool, is_overflow: bool) -> str | None:
        """Handle the end of a backward pass; return the text of a warning.

        If the gradient may be an overflow of a scaled loss, only non-finite values in forward are reported.
        """
        was_finite, self._was_finite = self._was_finite, is_finite
        if is_finite:
            self.source = None
        if is_finite or not was_finite:
            self.calls.backward_ended()
            return None
        try:
            self.source = _locate(unwrapped(self._model), [*self.calls.calls], self._generators, is_overflow)
        except Exception as error:  # noqa: BLE001 - training goes on, also without memory
            self.source = None
            name = "" if isinstance(error, (NotLocatedError, ValueError)) else f"{type(error).__name__}: "
            return (
                None if is_overflow else f"the gradient is not finite; its source could not be located: {name}{error}"
            )
        finally:
            self.calls.backward_ended()
        return None if self.source is None else f"the gradient is not finite. {self.source.text}"


def _locate(
    root: nn.Module, calls: list[ModelCall], named: Collection[Any], is_overflow: bool
) -> NonFiniteSource | None:
    _check(root, calls, generators_of(root, named))
    gradients = _non_finite({name: parameter.grad for name, parameter, _ in named_parameters(root)})
    model = separate_copy(root, named)
    trace = _Trace({module: name for name, module in named_modules(model)})
    with _isolated(root, model, [generator for generator, _ in calls[0].states]):
        with before_forward(trace.names, trace.enter, first=True), after_forward(trace.names, trace.leave):
            for call in calls:
                _call_again(model, call)
        used: list[Tensor] = []
        for call, outputs in zip(calls, trace.outputs, strict=True):
            if not call.received.keys() <= outputs.keys():
                raise NotLocatedError("a copy of the model returns other outputs")
            used += [outputs[place] for place in call.received]
            if not all(_is_finite(item, may_mask=True) for item in used):
                return _forward_source(trace, model, call, used)
        if is_overflow:
            return None
        if not all(map(_is_finite, used)):
            raise NotLocatedError("outputs of the model hold -inf, as a mask does")
        is_loss = not all(_is_finite(extreme) for call in calls for both in call.received.values() for extreme in both)
        has_hooks = any(map(changes_gradients, root.modules())) or any(call.hooked & {*call.received} for call in calls)
        if is_loss and not has_hooks:
            text = "It comes from the loss: the model's outputs are finite, and the gradient that they receive is not"
            return NonFiniteSource("", "loss", text)
        operation = trace.backward(used)
    reached = {name: item.grad for name, item, _ in named_parameters(model) if item.grad is not None}
    if operation is not None and _non_finite(reached) & gradients:
        name = operation[0] or "_root_"
        text = f"It comes from the backward of {name}: {operation[1]} makes a non-finite gradient of a finite one"
        return NonFiniteSource(name, "backward", text)
    if is_loss:
        raise NotLocatedError("hooks may have changed the gradient of the model's outputs")
    raise NotLocatedError("forward and backward of a copy of the model are finite on this rank")


def _check(root: nn.Module, calls: list[ModelCall], generators: Iterable[Any]) -> None:
    ids = {*map(id, generators)}
    reasons = {
        "the model is sharded": any_dtensor(root.parameters()),
        "RNG state is kept for the CPU and CUDA only": any(
            parameter.device.type not in ("cpu", "cuda") for parameter in root.parameters()
        ),
        "a random number generator of the model has been replaced": any(
            not ids <= {id(generator) for generator, _ in call.states} for call in calls
        ),
        "the model was not called as a whole, or is compiled in place": not calls,
        "the model was called too often": len(calls) > MOST_CALLS,
        "no output of the model's calls received a gradient": bool(calls) and not any(call.received for call in calls),
        "the model's inputs have been changed in place": any(
            version(tensor) != before for call in calls for tensor, before in call.versions
        ),
        "changes of the model's inputs can't be seen, since not all are tensors and numbers": not all(
            _is_transparent((call.args, call.kwargs)) for call in calls
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise NotLocatedError(reason)


def _is_transparent(value: Any) -> bool:
    """Return True if :func:`tensors_in` finds all tensors of a value, so that every change in place is noticed."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_transparent, value))
    if isinstance(value, Mapping):
        return all(map(_is_transparent, value.values()))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return all(_is_transparent(getattr(value, field.name, None)) for field in dataclasses.fields(value))
    return isinstance(value, (Tensor, Number, str, bytes, Enum, torch.dtype, torch.device, type, type(None)))


def _forward_source(trace: _Trace, model: nn.Module, call: ModelCall, used: list[Tensor]) -> NonFiniteSource:
    nodes = _ancestors(item for item in used if not _is_finite(item, may_mask=True))
    source = next((module for module, made in trace.sources if not made.isdisjoint(nodes)), None)
    if source is None:
        if _are_finite([tensor for tensor, _ in call.versions]):
            raise NotLocatedError("no module with finite inputs has a non-finite output that is used")
        return NonFiniteSource("", "input", "The model's inputs are not finite")
    name = trace.names[source] or "_root_"
    text = f"It comes from the forward of {name}: its inputs are finite, and its output is not"
    parameters_of_module = set(source.parameters())
    parameters = _non_finite({name: item for name, item, _ in named_parameters(model) if item in parameters_of_module})
    if parameters:
        text += f", nor is its parameter {min(parameters)}"
    return NonFiniteSource(name, "forward", text)


def _ancestors(tensors: Iterable[Tensor]) -> set[Any]:
    """The operations that computed tensors."""
    nodes, waiting = set(), [tensor.grad_fn for tensor in tensors]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            waiting += [following for following, _ in node.next_functions]
    return nodes


@contextlib.contextmanager
def _isolated(root: nn.Module, model: nn.Module, generators: Iterable[Any]) -> Iterator[None]:
    has_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    with (
        isolated_pass(model, generators),
        forbid_calls_to(root, model),
        eager(),
        torch.enable_grad(),
        _NoCollectives() if has_ranks else contextlib.nullcontext(),
    ):
        before = capture_rng_state([])
        yield
        after = capture_rng_state([])
        # The state of these at the model's call is not known.
        if any(before.get(library) != after.get(library) for library in ("python", "numpy")):
            raise NotLocatedError("the model draws from Python's or NumPy's generators")


def _call_again(model: nn.Module, call: ModelCall) -> None:
    for generator, state in call.states:
        set_generator_state(generator, state)
    with contextlib.ExitStack() as contexts:
        for kind, (dtype, enabled) in call.autocast.items():
            contexts.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
        args, kwargs = detached_copy((call.args, call.kwargs))
        model(*args, **kwargs)


class _NoCollectives(DispatchMode):
    """Refuse collectives, in which other ranks may not take part."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            raise NotLocatedError("the model communicates with other ranks")
        return func(*args, **(kwargs or {}))


class _Trace:
    """Follow the calls of modules, and the backward pass of the operations in them; masks may hold -inf."""

    def __init__(self, names: Mapping[nn.Module, str]) -> None:
        self.names = names
        self._open: list[tuple[nn.Module, bool]] = []  # calls in progress, and whether their inputs are finite
        self._owners: dict[Any, str] = {}  # node of the graph -> name of a module
        # Modules with finite inputs and a non-finite output, and the operations that made it, in the order of calls.
        self.sources: list[tuple[nn.Module, set[Any]]] = []
        self.outputs: list[dict[str, Tensor]] = []  # of each call of the model, the module that no other called

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [tensor for _, tensor in tensors_in((args, kwargs))]
        # What is not claimed yet was computed by the module around.
        self._claim(tensors, self.names[self._open[-1][0]] if self._open else "")
        self._open.append((module, all(map(has_local_data, tensors)) and _are_finite(tensors)))

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        _, finite_inputs = self._open.pop()
        is_bad = finite_inputs and not all(_is_finite(item, may_mask=True) for _, item in tensors_in(output))
        tensors = dict(tensors_in(output))
        self._claim(tensors.values(), self.names[module])
        if is_bad:
            bad = [item for item in tensors.values() if not _is_finite(item, may_mask=True)]
            self.sources.append((module, {item.grad_fn for item in bad} - {None}))
        if not self._open:
            self.outputs.append(tensors)

    def backward(self, outputs: list[Tensor]) -> tuple[str, str] | None:
        """Back-propagate random gradients; return module and name of the first operation that makes one non-finite."""
        operations: list[tuple[str, str]] = []

        def hook_of(module: str, name: str) -> Any:
            def hook(grad_inputs: Iterable[Any], grad_outputs: Iterable[Any]) -> None:
                received = not all(map(_is_finite, grad_outputs))
                if not operations and (received or not all(map(_is_finite, grad_inputs))):
                    operations.append((module, f"a gradient hook on the output of {name}" if received else name))

            return hook

        for node, module in self._owners.items():
            node.register_hook(hook_of(module, node.name()))
        torch.autograd.backward(outputs, [torch.randn_like(item) / max(item.numel(), 1) ** 0.5 for item in outputs])
        return operations[0] if operations else None

    def _claim(self, tensors: Iterable[Tensor], name: str) -> None:
        """Assign the operations that computed tensors to a module, if they belong to none."""
        waiting = [tensor.grad_fn for tensor in tensors]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in self._owners:
                self._owners[node] = name
                waiting += [following for following, _ in node.next_functions]


def _non_finite(tensors: Mapping[str, Tensor | None]) -> set[str]:
    return {name for name, tensor in tensors.items() if not _is_finite(tensor)}


def _are_finite(inputs: list[Tensor]) -> bool:
    """Return True if the inputs of a module are finite; a mask, which requires no gradient, has others next to it."""
    return all(_is_finite(item, may_mask=len(inputs) > 1 and not item.requires_grad) for item in inputs)


def _is_finite(tensor: Any, may_mask: bool = False) -> bool:
    """Return True if a tensor is finite, or except for the -inf that a mask may hold."""
    if not isinstance(tensor, Tensor) or not has_local_data(tensor):
        return True
    with hidden_from_user_modes():
        finite = tensor.isfinite()
        if may_mask and not tensor.is_complex():
            finite = finite | (tensor == -torch.inf)
        return bool(finite.all())
