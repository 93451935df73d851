"""Where the first number that is not finite has come from: forward and backward of a model once more."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.events.monitor_events import NonFiniteSource
from ignite_monitor.model._torch import DispatchMode, buffers_of_each, need, pytree
from ignite_monitor.model.eager import Eager
from ignite_monitor.model.isolation import reference_run
from ignite_monitor.model.names import named_modules, named_parameters, unwrapped
from ignite_monitor.model.norms import any_sharded
from ignite_monitor.model.sharding import flat_sharding
from ignite_monitor.nonfinite.calls import ModelCall, ModelCalls
from ignite_monitor.nonfinite.trace import Trace, TracedCall, not_finite
from ignite_monitor.reference.copies import detached_copy
from ignite_monitor.reference.isolation import put_back
from ignite_monitor.reference.rng import generators_of, preserved_rng_state


class NotFoundError(Exception):
    """Why there is no telling; its message completes "it can't be told from where: …"."""


class NonFiniteLocator:
    """Finds what has produced a gradient that is not finite, where a backward has ended in one.

    The model is run once more with what it has been called with, and the same random numbers, and a random gradient
    through it. Parameters, gradients, buffers, attributes and random numbers are the same afterwards. Only the first
    of such gradients in a row is looked into, and nothing is kept or computed before.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._row = False
        self.calls = ModelCalls(model)
        self.found: NonFiniteSource | None = None  # of the newest gradient, if it is not finite and that could be found

    def look(self, is_finite: bool, is_overflow: bool, alone: bool) -> str | None:
        """A backward has ended; what there is to say of it.

        Args:
            is_finite: whether its gradient is.
            is_overflow: whether a gradient that is not may be one of a loss that has been scaled too much: then only
                what is not finite in forward counts.
            alone: whether the gradient is made by this process alone, and not by others too.
        """
        self.calls.backward_ended()
        repeated, self._row = self._row, not is_finite
        if is_finite:
            self.found = None
        if is_finite or repeated:
            return None
        try:
            self.found = _found(self._model, self.calls, is_overflow, alone)
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self.found = None
            reason = str(error) if isinstance(error, NotFoundError) else f"{type(error).__name__}: {error}"
            return None if is_overflow else f"the gradient is not finite; where it comes from can't be told: {reason}"
        return None if self.found is None else f"the gradient is not finite. {self.found.text}"


def _found(model: nn.Module, calls: ModelCalls, is_overflow: bool, alone: bool) -> NonFiniteSource | None:
    need("The search", pytree)
    root = unwrapped(model)
    modules: dict[str, nn.Module] = {}
    for name, module in named_modules(root):
        modules.setdefault(name, module)
        if isinstance(module, torch.jit.ScriptModule):
            raise NotFoundError("a scripted module would change by being run once more")
    if any_sharded(root.parameters()) or flat_sharding(model) is not None:
        raise NotFoundError("the model is sharded, and each rank looks by itself")
    if not calls.calls:
        raise NotFoundError("the model was not called as a whole, or is compiled in place")
    if not calls.complete:
        raise NotFoundError("the model was called too often")
    if any(call.is_changed for call in calls.calls):
        raise NotFoundError("what the model was called with has been changed in place")
    gradients = not_finite({name: each.grad for name, each, _ in named_parameters(root)})
    trace = Trace(modules)
    through: dict[str, Tensor | None] = {}
    with _unnoticed(list(modules.values()), calls.calls[0]):
        with trace.followed():
            for call in calls.calls:
                _call_again(root, call)
        trace.to_host("inputs", "outputs")
        begun = next((call for call in trace.calls if call.begins_it), None)
        outermost = [call for call in trace.calls if call.parent is None]
        if any(call.output_is_bad for call in outermost):
            return _in_forward(begun, root)
        if is_overflow:
            return None
        if trace.outputs:
            parameters = {name: each for name, each, _ in named_parameters(root) if each.requires_grad}
            # Checkpoints of the reentrant kind know no gradients of some tensors alone.
            with suppress(RuntimeError):
                through = _backward(trace.outputs, parameters)
            trace.to_host("given", "passed")
    reached = {name for name, each in through.items() if each is not None}
    bad = not_finite(through)
    if bad and (bad == gradients if alone else bad <= gradients):
        made = _in_backward(trace, root, bad)
        if made is not None:
            return made
    if begun is not None:
        return _in_forward(begun, root)
    if not alone:
        raise NotFoundError("all is finite on this rank, so it is another one's, or that of the loss")
    if reached and reached <= gradients:
        text = "It comes from the loss: the model's output is finite, and its backward of a finite gradient too"
        return NonFiniteSource("", "loss", text)
    return _first_gradient(trace, root, gradients)


def _in_forward(begun: TracedCall | None, root: nn.Module) -> NonFiniteSource:
    if begun is None:
        return NonFiniteSource("", "input", "It comes from what the model is called with, which is not finite")
    text = f"It comes from {_named(begun)}: its inputs are finite, and its output is not"
    names = {id(each): name for name, each, _ in named_parameters(root)}
    bad = not_finite({names[id(each)]: each for each in begun.module.parameters()})
    if bad:
        text += f", nor is its parameter {min(bad)}"
    return NonFiniteSource(_named(begun), "forward", text)


def _in_backward(trace: Trace, root: nn.Module, bad: set[str]) -> NonFiniteSource | None:
    """The innermost call that makes bad gradients out of finite ones; of several the last one, the first in backward.

    A parameter's gradient is that of all calls which use it: a bad one counts for those that all its causes are in.
    """
    of = {id(each): name for name, each, _ in named_parameters(root) if id(each) not in trace.shared}
    owners: dict[str, list[TracedCall]] = {name: [] for name in of.values()}
    for call in trace.calls:
        for each in call.module.parameters(recurse=False):
            if call.gets_bad_gradients and id(each) in of:
                owners[of[id(each)]].append(call)
    makers = []
    for call in trace.calls:
        if call.gets_bad_gradients:
            continue
        own = {of[id(each)] for each in call.module.parameters() if id(each) in of} & bad
        if call.passes_bad_gradients or any(all(each.is_in(call) for each in owners[name]) for name in own):
            makers.append(call)
    innermost = [call for call in makers if not any(each.is_in(call) for each in makers)]
    if not innermost:
        return None
    text = f"It comes from the backward of {_named(innermost[-1])}: of a finite gradient it makes one that is not"
    return NonFiniteSource(_named(innermost[-1]), "backward", text)


def _first_gradient(trace: Trace, root: nn.Module, gradients: set[str]) -> NonFiniteSource | None:
    # Backward goes through the calls from the last one to the first, in which a gradient is complete.
    names = {id(each): name for name, each, _ in named_parameters(root)}
    order = [names[id(each)] for call in trace.calls for each in call.module.parameters(recurse=False)]
    first = next((name for name in reversed(list(dict.fromkeys(order))) if name in gradients), None)
    if first is None:
        return None
    return NonFiniteSource(
        first, "gradient", f"The first parameter in backward's order of whose gradient that holds is {first}"
    )


def _named(call: TracedCall) -> str:
    return call.name or "_root_"


# Running the model once more


def _call_again(root: nn.Module, call: ModelCall) -> None:
    for generator, state in call.generators:
        generator.set_state(state)
    with ExitStack() as around:
        for kind, (enabled, dtype) in call.autocast.items():
            around.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
        args, kwargs = detached_copy((call.args, call.kwargs))
        root(*args, **kwargs)


def _backward(outputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """The gradients of the parameters by random ones of the outputs, all about as large together as one number."""
    random_ones = [torch.randn_like(each) / max(each.numel(), 1) ** 0.5 for each in outputs]
    found = torch.autograd.grad(outputs, list(parameters.values()), random_ones, allow_unused=True)
    return dict(zip(parameters, found, strict=True))


@contextmanager
def _unnoticed(modules: list[nn.Module], call: ModelCall) -> Iterator[None]:
    """While it lasts the model can be run unnoticed; NotFoundError if it draws numbers that it will not draw again."""
    held = [each for module in modules for each in generators_of(module).values()]
    devices = [generator.device for generator, _ in call.generators]
    has_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    with (
        preserved_rng_state(devices, held),
        _kept(modules),
        put_back(modules, buffers_of_each(modules)),
        reference_run(),
        Eager(*modules[:1]),
        torch.enable_grad(),
        _Alone() if has_ranks else nullcontext(),
    ):
        before = _states_of_others(held)
        yield
        if _states_of_others(held) != before:
            raise NotFoundError("the model draws random numbers of Python's, of NumPy's or of a generator of its own")


def _states_of_others(generators: Sequence[Any]) -> list[str]:
    """States of the random number generators that are not known for each call of the model."""
    numpy = sys.modules.get("numpy.random")
    states = [random.getstate(), None if numpy is None else numpy.get_state()]
    for each in generators:
        if isinstance(each, torch.Generator):
            states.append(each.get_state().tolist())
        elif hasattr(each, "bit_generator"):
            states.append(each.bit_generator.state)
        else:
            states.append(each.getstate() if hasattr(each, "getstate") else each.get_state())
    return [repr(state) for state in states]


@contextmanager
def _kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Attributes of modules are the same afterwards, and what is in lists, dictionaries, sets and tensors there."""
    plain = vars(nn.Module())
    own = [(vars(module), dict(vars(module))) for module in modules]
    held = [each for _, saved in own for name, each in saved.items() if name not in plain]
    contents = [(each, copy.copy(each)) for each in held if type(each) in (list, dict, set)]
    try:
        for attributes, saved in own:
            copies = {name: each.clone() for name, each in saved.items() if isinstance(each, Tensor)}
            attributes.update(copies)
        yield
    finally:
        for attributes, saved in own:
            attributes.clear()
            attributes.update(saved)
        for each, content in contents:
            each.clear()
            each.extend(content) if isinstance(each, list) else each.update(content)


class _Alone(DispatchMode):
    """Refuses to communicate: other ranks may not be looking."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            raise NotFoundError("the model communicates, and each rank looks by itself")
        return func(*args, **(kwargs or {}))
