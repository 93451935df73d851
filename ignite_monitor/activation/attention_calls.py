"""Seeing the attention calls of a model's forward without editing the model."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ignite_monitor.activation.attention_arguments import READERS, AttentionArguments
from ignite_monitor.model._torch import device_mode, in_backward, modes_on, need, pop_mode, push_mode
from ignite_monitor.model.forward import ModuleHook, after_forward, before_forward
from ignite_monitor.model.modes import aside, is_plain

_PRODUCTS = {torch.matmul, torch.bmm, torch.baddbmm, torch.einsum}
_PRODUCTS |= {Tensor.matmul, Tensor.bmm, Tensor.baddbmm, Tensor.__matmul__}
_SOFTMAXES = {torch.softmax, Tensor.softmax, torch.nn.functional.softmax}


class AttentionCalls(TorchFunctionMode):
    """Hands every attention call of a forward, detached, to a function.

    Seen are ``torch.nn.functional.scaled_dot_product_attention``, by whatever name it is called, that is also
    transformers' models with ``attn_implementation="sdpa"``, and ``torch.nn.functional.multi_head_attention_forward``,
    that is ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer``. Not seen are attention that a module computes
    by itself from products and a softmax (transformers' ``"eager"``), ``torch.nn.attention.flex_attention``, kernels of
    other packages (``flash_attn``, xFormers), and attention inside scripted modules.

    It is a mode and not a replacement of the functions in their module: a mode sees a function that was imported by
    name as well, it is of one thread alone, and compiled code that guards on those functions stays valid.

    In eval mode ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` have a fast path, which rounds otherwise.
    They leave it while a mode is on, and the latter also if it or a module in it has hooks of its own. For a frozen
    part of a model in training to compute the same bits, enter with False for modules in eval mode, from hooks on all
    modules (``torch.nn.modules.module.register_module_forward_pre_hook``).

    What the function raises is raised where the model calls attention. Calls repeated in backward, by activation
    checkpointing, are not handed on.

    Args:
        current: gives the name of the module that is running, None if its calls don't count.
        on_call: is called with that name, ``query``, ``key``, ``value``, ``mask``, ``is_causal``, ``scale`` and
            ``enable_gqa``, as in ``scaled_dot_product_attention``, under ``no_grad`` and without autocast. Of
            ``multi_head_attention_forward``, which keeps them to itself, they are projected once more from its
            arguments, three matrix products. Both functions are held as they are given: a method of the owner would
            close a reference cycle.

    Attributes:
        skipped: names of modules with calls on tensors that have no values of their own here: DTensors, nested tensors,
            tensors under ``vmap``.
        by_hand: names of modules that seem to compute attention by themselves: a product, a softmax, a product.
    """

    def __init__(self, current: Callable[[], str | None], on_call: Callable[..., None]) -> None:
        check_attention()
        super().__init__()
        self._current = current
        self._on_call = on_call
        self._thread = _Thread()
        self.skipped: set[str] = set()
        self.by_hand: set[str] = set()
        self._last: tuple[str | None, bool] = (None, False)  # the last product's module, and whether a softmax followed

    @contextlib.contextmanager
    def during(self, modules: Iterable[nn.Module], wanted: Callable[[], bool]) -> Iterator[None]:
        """While it lasts, see the calls in forward passes of modules, where that is wanted as they begin."""
        modules = list(modules)
        try:
            with before_forward(modules, _Hook(self, modules, wanted)), after_forward(modules, _Hook(self, modules)):
                yield
        finally:
            self.close()

    def enter(self, watched: bool = True) -> None:
        """See calls, or none, from here on, until :meth:`leave`; in pairs, one in the other, each thread for itself."""
        self._thread.watched.append(watched)
        self._switch()

    def leave(self) -> None:
        """Go back to what was before the latest :meth:`enter` of this thread, which there need not have been."""
        if self._thread.watched:
            self._thread.watched.pop()
            self._switch()

    def close(self) -> None:
        """Leave all that this thread has entered: after an interrupt hooks that should leave may not have run."""
        self._thread.watched.clear()
        self._switch()

    def __enter__(self) -> AttentionCalls:
        self.enter()
        return self

    def __exit__(self, *exception: object) -> None:
        self.leave()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # a part of the model that is compiled by itself, or flex_attention
            return func(*args, **kwargs)
        self._thread.inside += 1
        try:
            result = func(*args, **kwargs)
        finally:
            self._thread.inside -= 1
        if func in READERS:
            self._last = None, False
            self._report(READERS[func], args, kwargs)
        elif func in _PRODUCTS:
            name, followed = self._current(), self._last[1]
            if followed and name is not None and name == self._last[0]:
                self.by_hand.add(name)
            self._last = name, False
        elif func in _SOFTMAXES:
            self._last = self._last[0], True
        return result

    def _switch(self) -> None:
        thread = self._thread
        on = bool(thread.watched) and thread.watched[-1]
        # While a function runs that the mode was asked about, torch keeps the mode off the stack, and puts it back.
        if on != thread.on and not thread.inside:
            thread.on = on
            _take_off(self)
            if on:
                _put_on(self)

    def _report(self, read: Callable[..., AttentionArguments], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if in_backward():
            return
        name = self._current()
        if name is None:
            return
        if not all(is_plain(each) for each in (*args, *kwargs.values()) if isinstance(each, Tensor)):
            self.skipped.add(name)
            return
        with aside():
            # Autocast is still the user's, for the projections. It keeps its copies of weights that require a
            # gradient, and those made here would have none to give.
            call = read(*map(_detach, args), **{key: _detach(each) for key, each in kwargs.items()})
            with torch.autocast(call.query.device.type, enabled=False):
                self._on_call(name, *call)


def check_attention() -> None:
    """Refuse what can't be done without torch's private functions for its stack of modes.

    Raises:
        RuntimeError: if one of them is gone.
    """
    need("attention=True", push_mode, pop_mode, modes_on, device_mode)


class _Hook(ModuleHook):
    """Enters where it is given what says whether that is wanted, and leaves where it is not."""

    def __init__(
        self, calls: AttentionCalls, modules: Iterable[nn.Module], wanted: Callable[[], bool] | None = None
    ) -> None:
        self._calls, self._wanted = calls, wanted
        self._modules = set(map(id, modules))

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if id(module) not in self._modules:
            return
        if self._wanted is None:
            self._calls.leave()
        else:
            self._calls.enter(self._wanted())


class _Thread(threading.local):
    """What one thread has entered, whether the mode is on its stack, and in how many calls of it the thread is."""

    def __init__(self) -> None:
        self.watched: list[bool] = []
        self.on = False
        self.inside = 0


def _detach(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _put_on(mode: TorchFunctionMode) -> None:
    """Put a mode below all that others have put on the stack.

    Whoever takes the topmost mode off, in the belief that it is his, then gets his own, in whatever order hooks run.
    A default device alone stands further below: torch insists on that.
    """
    others = [pop_mode() for _ in range(modes_on())]
    while others and isinstance(others[-1], device_mode):
        push_mode(others.pop())
    for each in (mode, *reversed(others)):
        push_mode(each)


def _take_off(mode: TorchFunctionMode) -> None:
    """Take a mode off the stack wherever it is, and leave the others as they are."""
    for each in reversed([pop_mode() for _ in range(modes_on())]):
        if each is not mode:
            push_mode(each)
