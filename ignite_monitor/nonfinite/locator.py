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
from ignite_monitor.nonfinite.calls import ModelCall, ModelCalls, UsedOutput, sample
from ignite_monitor.reference.reference import detached_copy, forbid_calls_to, separate_copy


class NotLocatedError(Exception):
    """Reason why a source could not be located; its message completes "it could not be located: ..."."""


class NonFiniteLocator:
    """Locate the source of the first of consecutive non-finite gradients.

    A copy of the model is run with the inputs and the RNG state of the train step. Nothing is concluded unless it
    returns the same outputs, to rounding, as a sample shows. Only outputs that received a gradient count. If they are
    finite, the loss is the source if a gradient is not that came from outside of the model; otherwise random gradients,
    as large as those received, are back-propagated through them.

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
            self.source = _locate(unwrapped(self._model), self.calls, self._generators, is_overflow)
        except Exception as error:  # noqa: BLE001 - training goes on, also without memory
            self.source = None
            name = "" if isinstance(error, (NotLocatedError, ValueError)) else f"{type(error).__name__}: "
            return (
                None if is_overflow else f"the gradient is not finite; its source could not be located: {name}{error}"
            )
        finally:
            self.calls.backward_ended()
        return None if self.source is None else f"the gradient is not finite. {self.source.text}"


def _locate(root: nn.Module, noted: ModelCalls, named: Collection[Any], is_overflow: bool) -> NonFiniteSource | None:
    calls, used = [*noted.calls], [*map(UsedOutput._make, noted.used)]
    _check(root, calls, used, generators_of(root, named))
    gradients = _non_finite({name: parameter.grad for name, parameter, _ in named_parameters(root)})
    is_loss = not all(_is_finite(extreme) for item in used for extreme in item.gradient)
    has_hooks = any(map(changes_gradients, root.modules())) or any(item.is_hooked for item in used)
    text = "It comes from the loss: the model's outputs are finite, and the gradient that they receive is not"
    loss = NonFiniteSource("", "loss", text)
    model = separate_copy(root, named)
    trace = _Trace({module: name for name, module in named_modules(model)})
    outputs: list[tuple[Any, UsedOutput]] = []
    with _isolated(root, model, [generator for generator, _ in calls[0].states]):
        with before_forward(trace.names, trace.enter, first=True), after_forward(trace.names, trace.leave):
            for call in calls:
                _call_again(model, call)
                same = [(trace.outputs.get(item.place), item) for item in used if item.call == call.number]
                if not all(_reproduces(output, item.sample) for output, item in same):
                    raise NotLocatedError("a copy of the model returns other outputs than the model in the train step")
                if bad := [item.place for output, item in same if not _is_finite(output, may_mask=True)]:
                    return _forward_source(trace, model, call, bad)
                outputs += same
        if is_overflow:
            return None
        if not all(_is_finite(output) for output, _ in outputs):
            raise NotLocatedError("outputs of the model hold -inf, as a mask does")
        # Other gradients may come from the backward of the model's later operations.
        inner = _ancestors(node for item in used for node, _ in item.node.next_functions)
        outer = [extreme for item in used if item.node not in inner for extreme in item.gradient]
        if not has_hooks and not all(map(_is_finite, outer)):
            return loss
        operation = trace.backward(outputs)
    reached = _non_finite({name: item.grad for name, item, _ in named_parameters(model) if item.grad is not None})
    if operation is not None and reached and reached <= gradients:
        name = operation[0] or "_root_"
        text = f"It comes from the backward of {name}: {operation[1]} makes a non-finite gradient of a finite one"
        return NonFiniteSource(name, "backward", text)
    if operation is None and is_loss and not has_hooks:
        return loss
    if is_loss:
        raise NotLocatedError("hooks may have changed the gradient of the model's outputs")
    raise NotLocatedError("forward and backward of a copy of the model are finite on this rank")


def _check(root: nn.Module, calls: list[ModelCall], used: list[UsedOutput], generators: Iterable[Any]) -> None:
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
        "no output of the model's calls received a gradient": bool(calls) and not used,
        "the model was called too often": not {item.call for item in used} <= {call.number for call in calls},
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


def _reproduces(output: Tensor | None, kept: Tensor | None) -> bool:
    """Return True if an output equals one whose sample was kept, to rounding: compiled code may round differently."""
    again = None if output is None else sample(output)
    if again is None or kept is None or (again.shape, again.dtype) != (kept.shape, kept.dtype):
        return False
    size = float(kept.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return torch.allclose(again, kept, rtol=0.0, atol=size * torch.finfo(kept.dtype).eps ** 0.5, equal_nan=True)


def _forward_source(trace: _Trace, model: nn.Module, call: ModelCall, places: list[str]) -> NonFiniteSource:
    """Return the source of the non-finite outputs at some places."""
    nodes = _ancestors(trace.outputs[place].grad_fn for place in places)
    sources = [(module, around) for module, around, made in trace.sources if not made.isdisjoint(nodes)]
    if not sources:
        if _are_finite([tensor for tensor, _ in call.versions]):
            raise NotLocatedError("no module with finite inputs has a non-finite output that is used")
        _call_again(model, call, is_repaired=True)
        if not all(_is_finite(trace.outputs[place], may_mask=True) for place in places):
            raise NotLocatedError(
                "the model's inputs are not finite, and with zeros in their place its outputs are not"
            )
        return NonFiniteSource("", "input", "The model's inputs are not finite")
    source, around = sources[0]
    name = trace.names[source] or "_root_"
    text = f"It comes from the forward of {name}: its inputs are finite, and its output is not"
    parameters_of_module = set(source.parameters())
    parameters = _non_finite({name: item for name, item, _ in named_parameters(model) if item in parameters_of_module})
    if parameters:
        return NonFiniteSource(name, "forward", f"{text}, nor is its parameter {min(parameters)}")
    if others := [trace.names[module] for module, _ in sources if module is not source and module not in around]:
        text = "make non-finite outputs of finite inputs"
        raise NotLocatedError(f"{name} and {others[0]} {text}, and which of them reach the model's output is not known")
    return NonFiniteSource(name, "forward", text)


def _ancestors(nodes: Iterable[Any]) -> set[Any]:
    """The operations that led to some, and these."""
    known, waiting = set(), [*nodes]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in known:
            known.add(node)
            waiting += [following for following, _ in node.next_functions]
    return known


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


def _call_again(model: nn.Module, call: ModelCall, is_repaired: bool = False) -> None:
    """Call a copy of the model; if repaired, with zeros for the non-finite elements of its inputs."""
    for generator, state in call.states:
        set_generator_state(generator, state)
    with contextlib.ExitStack() as contexts:
        for kind, (dtype, enabled) in call.autocast.items():
            contexts.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
        args, kwargs = detached_copy((call.args, call.kwargs))
        for _, tensor in tensors_in((args, kwargs)) if is_repaired else ():
            if tensor.is_floating_point() and has_local_data(tensor):
                tensor.data = tensor.data.nan_to_num(0.0, 0.0, 0.0)
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
        # Modules with finite inputs and a non-finite output, those that call them, and the operations that made it.
        self.sources: list[tuple[nn.Module, set[nn.Module], set[Any]]] = []
        self.outputs: dict[str, Tensor] = {}  # of the last call of the model, the module that no other called

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
            self.sources.append((module, {other for other, _ in self._open}, {item.grad_fn for item in bad} - {None}))
        if not self._open:
            self.outputs = tensors

    def backward(self, outputs: Iterable[tuple[Tensor, UsedOutput]]) -> tuple[str, str] | None:
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
        gradients = [_random_gradient(output, *item.gradient) for output, item in outputs]
        torch.autograd.backward([output for output, _ in outputs], gradients)
        return operations[0] if operations else None

    def _claim(self, tensors: Iterable[Tensor], name: str) -> None:
        """Assign the operations that computed tensors to a module, if they belong to none."""
        waiting = [tensor.grad_fn for tensor in tensors]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in self._owners:
                self._owners[node] = name
                waiting += [following for following, _ in node.next_functions]


def _random_gradient(output: Tensor, *extremes: Tensor) -> Tensor:
    """Return a random gradient of an output, between the extremes if they are known and finite."""
    size = extremes[1] - extremes[0] if extremes else torch.tensor(torch.inf, device="cpu")
    if not _is_finite(size):
        return torch.randn_like(output)
    return torch.rand_like(output).mul_(size).add_(extremes[0])


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
