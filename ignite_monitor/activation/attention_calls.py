"""Detection of the attention calls in a model's forward."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ignite_monitor.activation.attention_arguments import READERS, AttentionArguments, NotReadableError
from ignite_monitor.model._torch import device_mode, function_modes, need, pop_mode, push_mode
from ignite_monitor.model.forward import ModuleHook, after_forward, before_forward
from ignite_monitor.model.modes import aside, in_backward, is_plain

NOT_PLAIN = "DTensors, nested, sparse and meta tensors, and tensors in torch.func transforms, are not measured"


class AttentionCalls(TorchFunctionMode):
    """Reports every attention call, detached, to a function, under ``no_grad`` and without autocast.

    Detected are ``torch.nn.functional.scaled_dot_product_attention``, by whatever name it is called, and
    ``torch.nn.functional.multi_head_attention_forward``, that is ``nn.MultiheadAttention`` in training mode. Not
    detected are products and a softmax, ``flex_attention``, kernels of other packages, and scripted modules. A mode
    also detects functions that were imported by name, belongs to one thread, and invalidates no compiled code.

    Args:
        current: returns what is reported with a call made now, None if the call is not reported.
        report: is called with it and the arguments, or the reason why these are not available. Neither function may
            hold the owner of this object, which would close a reference cycle.
    """

    def __init__(self, current: Callable[[], Any], report: Callable[[Any, AttentionArguments | str], None]) -> None:
        check_attention()
        super().__init__()
        self._current = current
        self._report = report
        self._states = _States()

    @contextlib.contextmanager
    def during(self, hookable: Iterable[nn.Module]) -> Iterator[None]:
        """Detect calls in forward passes, except where a mode would take torch's modules off their fast path.

        Args:
            hookable: the modules on which hooks do not change what the model computes. In the forward of modules that
                contain others, calls are not detected.
        """
        modules = list(hookable)
        known = set(map(id, modules))
        apart = {id(each) for each in modules if any(id(inner) not in known for inner in each.modules())}
        try:
            with before_forward(modules, _Enter(self, known, apart)), after_forward(modules, _Leave(self, known)):
                yield
        finally:  # after an interrupt hooks may not have run
            self._states.entered.clear()
            self._enable(False)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # Calls in backward are recomputations by activation checkpointing; compiled parts of the model are only traced.
        if func in READERS and not in_backward() and not torch.compiler.is_compiling():
            reported = self._current()
            if reported is not None:
                self._read(reported, READERS[func], args, kwargs)
        return result

    def _read(
        self,
        reported: Any,
        read: Callable[..., AttentionArguments],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        if not all(is_plain(each) for each in (*args, *kwargs.values()) if isinstance(each, Tensor)):
            self._report(reported, NOT_PLAIN)
            return
        with aside():
            try:
                # The projections run in the user's autocast. It caches copies of weights that require gradients, and
                # those made here would have none, so arguments are detached.
                call = read(*map(_detached, args), **{name: _detached(each) for name, each in kwargs.items()})
            except NotReadableError as error:
                self._report(reported, str(error))
                return
            with torch.autocast(call.query.device.type, enabled=False):
                self._report(reported, call)

    def enter(self, enabled: bool) -> None:
        """Turn detection on or off until :meth:`leave`, for this thread; pairs may be nested."""
        self._states.entered.append(self._states.enabled)
        self._enable(enabled)

    def leave(self) -> None:
        """Return to what was before the latest :meth:`enter`."""
        if self._states.entered:
            self._enable(self._states.entered.pop())

    def _enable(self, enabled: bool) -> None:
        if enabled == self._states.enabled:
            return
        self._states.enabled = enabled
        modes = [mode for mode in [pop_mode() for _ in range(function_modes())][::-1] if mode is not self]
        if enabled:
            # Below the others, so that whoever pops a mode pops his own; torch requires a default device to be first.
            modes.insert(bool(modes) and isinstance(modes[0], device_mode), self)
        for mode in modes:
            push_mode(mode)


def check_attention() -> None:
    """Refuse what needs torch's private functions for its stack of modes.

    Raises:
        RuntimeError: if one of them is gone.
    """
    need("attention=True", push_mode, pop_mode, function_modes, device_mode)


class _States(threading.local):
    """Whether detection is enabled in a thread, and was before each module that is running."""

    def __init__(self) -> None:
        self.enabled = False
        self.entered: list[bool] = []


class _Enter(ModuleHook):
    def __init__(self, calls: AttentionCalls, modules: set[int], apart: set[int]) -> None:
        self._calls, self._modules, self._apart = calls, modules, apart

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if id(module) in self._modules and not in_backward():  # where checkpointing leaves modules half-way
            has_fast_path = isinstance(module, (nn.TransformerEncoder, nn.MultiheadAttention)) and not module.training
            self._calls.enter(not has_fast_path and id(module) not in self._apart)


class _Leave(ModuleHook):
    def __init__(self, calls: AttentionCalls, modules: set[int]) -> None:
        self._calls, self._modules = calls, modules

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if id(module) in self._modules and not in_backward():
            self._calls.leave()


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
