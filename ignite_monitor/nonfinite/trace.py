"""What is finite and what is not of the inputs, outputs and gradients of a model's modules, call by call."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.model._torch import parameters_in, pytree
from ignite_monitor.model.forward import after_forward, before_forward
from ignite_monitor.model.modes import aside, is_plain
from ignite_monitor.monitor.publisher import transfer

# What a tensor may hold: -inf; NaN or inf; what can't be looked at.
_MINUS, _OTHER, _UNKNOWN = 1, 2, 4


class Seen:
    """What some tensors hold."""

    def __init__(self) -> None:
        self.codes: list[Any] = []  # of floating-point tensors: 0-dim tensors, and numbers at last
        self.requires_grad: list[bool] = []  # of the same
        self.others = False  # whether there were tensors of whole numbers too

    def add(self, tensor: Tensor) -> None:
        """Look at a tensor."""
        if tensor.is_floating_point() or tensor.is_complex():
            self.codes.append(_code_of(tensor))
            self.requires_grad.append(tensor.requires_grad)
        else:
            self.others = True

    def holds(self, unwanted: int, *, masks: bool = False) -> bool:
        """Whether one of them holds what is unwanted; with ``masks``, -inf is welcome in what requires no gradient."""
        pairs = zip(self.codes, self.requires_grad, strict=True)
        return any(code & (unwanted & ~_MINUS if masks and not required else unwanted) for code, required in pairs)


@dataclass(eq=False)
class TracedCall:
    """One call of a module."""

    name: str
    module: nn.Module
    parent: TracedCall | None  # the call that it was made in
    inputs: Seen = field(default_factory=Seen)
    outputs: Seen = field(default_factory=Seen)
    given: Seen = field(default_factory=Seen)  # the gradients that have come to its outputs
    passed: Seen = field(default_factory=Seen)  # the gradients that have gone on to its inputs and shared parameters
    shared: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)  # what keeps each, its name, and it

    def is_in(self, other: TracedCall) -> bool:
        """Whether it was made in another one."""
        return self.parent is not None and (self.parent is other or self.parent.is_in(other))

    @property
    def output_is_bad(self) -> bool:
        """Whether there is in its outputs what is not finite, and no mask."""
        return self.outputs.holds(_MINUS | _OTHER, masks=True)

    @property
    def begins_it(self) -> bool:
        """Whether its outputs are not finite, and its inputs are."""
        is_mask_alone = len(self.inputs.codes) == 1 and not self.inputs.others  # a mask is the mask of something
        return self.output_is_bad and not self.inputs.holds(_MINUS | _OTHER | _UNKNOWN, masks=not is_mask_alone)

    @property
    def gets_bad_gradients(self) -> bool:
        """Whether gradients come to its outputs that are not finite."""
        return self.given.holds(_MINUS | _OTHER | _UNKNOWN)

    @property
    def passes_bad_gradients(self) -> bool:
        """Whether it passes gradients on to its inputs that are not finite."""
        return self.passed.holds(_MINUS | _OTHER)


class Trace:
    """Follows the calls of a model's modules, by name, and their backward."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._names = {id(module): name for name, module in modules.items()}
        self._modules = list(modules.values())
        self._open: list[TracedCall] = []
        self.calls: list[TracedCall] = []  # in the order in which they return
        self.outputs: list[Tensor] = []  # what the outermost ones return, as far as it has gradients
        owned = Counter(id(each) for module in self._modules for each in module.parameters(recurse=False))
        self.shared = {each for each, owners in owned.items() if owners > 1}  # ids of parameters

    @contextmanager
    def followed(self) -> Iterator[None]:
        """What to run the model in."""
        before = before_forward(self._modules, self._enter, first=True)
        try:
            with before, after_forward(self._modules, self._leave):
                yield
        finally:
            while self._open:
                _give_back(self._open.pop())

    def to_host(self, *kinds: str) -> None:
        """Have what is known of such tensors of all calls on the host."""
        seen: list[Seen] = [getattr(call, kind) for call in self.calls for kind in kinds]
        for each, codes in zip(seen, transfer([each.codes for each in seen]), strict=True):
            each.codes = [int(code) for (code,) in codes]

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = TracedCall(self._names[id(module)], module, self._open[-1] if self._open else None)
        self._open.append(call)
        for tensor in _tensors_in((args, kwargs)):
            call.inputs.add(tensor)
        if self.shared:
            registry: dict[str, Any] = parameters_in(module)
            call.shared = [(registry, key, each) for key, each in registry.items() if id(each) in self.shared]
            for _, key, each in call.shared:
                registry[key] = _aliased(each, call.passed)
        return _aliased((args, kwargs), call.passed)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        call = self._open.pop()
        _give_back(call)
        self.calls.append(call)
        for tensor in _tensors_in(output):
            call.outputs.add(tensor)
        output = _aliased(output, call.given)
        if call.parent is None:
            self.outputs += [each for each in _tensors_in(output) if each.requires_grad]
        return output


def _give_back(call: TracedCall) -> None:
    for registry, key, each in call.shared:
        registry[key] = each


def not_finite(tensors: Mapping[str, Tensor | None]) -> set[str]:
    """The names of those that are not finite; what can't be looked at is taken for finite."""
    given = {name: each for name, each in tensors.items() if each is not None}
    (codes,) = transfer([[_code_of(each) for each in given.values()]])
    return {name for name, (code,) in zip(given, codes, strict=True) if code not in (0, _UNKNOWN)}


def _code_of(tensor: Tensor) -> Tensor:
    with aside():
        if not is_plain(tensor):
            return torch.tensor(_UNKNOWN, device="cpu")
        if not tensor.numel():
            return torch.tensor(0, device="cpu")
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        # NaN is both the smallest and the largest.
        low, high = torch.aminmax(values.float() if values.element_size() == 1 else values)
        return (low == -torch.inf) * _MINUS + ~(high < torch.inf) * _OTHER


def _aliased(tree: Any, seen: Seen) -> Any:
    """The same with another one in place of each tensor, and the gradients of these seen when they come.

    A tensor's own gradient is that of all who use it. Hooks that users put on what a module is given or returns have
    another tensor again, so that they change gradients on the module's side of what is seen.
    """
    aliases: dict[int, Tensor] = {}

    def alias(tensor: Tensor) -> Tensor:
        if not (tensor.requires_grad and torch.is_grad_enabled() and is_plain(tensor)):
            return tensor
        if id(tensor) not in aliases:
            seen_one: Tensor = _Alias.apply(tensor)  # type: ignore[no-untyped-call]
            seen_one.register_hook(seen.add)
            aliases[id(tensor)] = _Alias.apply(seen_one)  # type: ignore[no-untyped-call]
        return aliases[id(tensor)]

    return pytree.tree_map_only(Tensor, alias, tree)


class _Alias(torch.autograd.Function):
    """The same numbers in the same memory, and no view, of which there may be none where a module works in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _tensors_in(value: Any, depth: int = 8) -> Iterator[Tensor]:
    members: Iterable[Any] = ()
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, set)):
        members = value
    elif isinstance(value, Mapping):
        members = value.values()
    elif dataclasses.is_dataclass(value) or (hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type))):
        members = vars(value).values() if hasattr(value, "__dict__") else ()
    for each in members if depth else ():
        yield from _tensors_in(each, depth - 1)
