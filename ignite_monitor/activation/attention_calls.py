"""Detection of the attention calls in a model's forward."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ignite_monitor.activation.attention import AttentionArguments
from ignite_monitor.model._torch import device_mode, function_modes, need, pop_mode, push_mode
from ignite_monitor.model.forward import after_forward, before_forward
from ignite_monitor.model.modes import has_local_data, hidden_from_user_modes, in_backward

NOT_PLAIN = "DTensors, nested, sparse and meta tensors, and tensors in torch.func transforms, are not measured"

_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)


class AttentionCalls(TorchFunctionMode):
    """Reports every attention call, detached, to a function, under ``no_grad`` and without autocast.

    Detected are ``torch.nn.functional.scaled_dot_product_attention``, by whatever name it is called, and
    ``torch.nn.functional.multi_head_attention_forward``, that is ``nn.MultiheadAttention`` in training mode. Not
    detected are products and a softmax, ``flex_attention``, kernels of other packages, and scripted modules. A mode
    also detects functions that were imported by name, belongs to one thread, and invalidates no compiled code.

    Args:
        current: returns what is reported with a call made now, None if the call is not reported.
        report: is called with it and the arguments, or the reason why these are not available.
    """

    def __init__(self, current: Callable[[], Any], report: Callable[[Any, AttentionArguments | str], None]) -> None:
        super().__init__()
        self._current = current
        self._report = report
        self._thread = threading.local()

    @contextlib.contextmanager
    def during(self, hookable: Iterable[nn.Module]) -> Iterator[None]:
        """Detect calls in forward passes, except where a mode would take torch's modules off their fast path.

        These are the modules that are not hookable, and those around them.
        """
        modules = list(hookable)
        known = set(map(id, modules))
        apart = {id(module) for module in modules if any(id(inner) not in known for inner in module.modules())}

        def before(module: nn.Module, *_: Any) -> None:
            if not in_backward():  # where checkpointing leaves modules half-way
                has_fast_path = isinstance(module, (nn.TransformerEncoder, nn.MultiheadAttention))
                self.enter(id(module) not in apart and not (has_fast_path and not module.training))

        def after(*_: Any) -> None:
            if not in_backward():
                self.leave()

        try:
            with before_forward(modules, before), after_forward(modules, after):
                yield
        finally:  # after an interrupt hooks may not have run
            while len(self._states) > 1:
                self.leave()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # Calls in backward are recomputations by activation checkpointing; compiled parts of the model are only traced.
        if func in _READERS and not in_backward() and not torch.compiler.is_compiling():
            current = self._current()
            if current is not None:
                self._report_call(current, func, args, kwargs)
        return result

    def _report_call(
        self, current: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not all(has_local_data(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor)):
            self._report(current, NOT_PLAIN)
            return
        with hidden_from_user_modes():
            # The projections run in the user's autocast. It caches copies of weights that require gradients, and those
            # made here would have none, so arguments are detached.
            call = _READERS[func](*map(_detached, args), **{name: _detached(value) for name, value in kwargs.items()})
            device = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)).device
            with torch.autocast(device.type, enabled=False):
                self._report(current, call)

    def enter(self, enabled: bool) -> None:
        """Turn detection on or off until :meth:`leave`, for this thread; pairs may be nested."""
        self._states.append(enabled)
        self._switch(*self._states[-2:])

    def leave(self) -> None:
        """Return to what was before the latest :meth:`enter`."""
        if len(self._states) > 1:
            self._switch(self._states.pop(), self._states[-1])

    @property
    def _states(self) -> list[bool]:
        """States of detection, at first and after every open :meth:`enter`: True if enabled."""
        states: list[bool] = vars(self._thread).setdefault("states", [False])
        return states

    def _switch(self, before: bool, enabled: bool) -> None:
        if before == enabled:
            return
        modes = [mode for mode in [pop_mode() for _ in range(function_modes())][::-1] if mode is not self]
        if enabled:
            # Below the others, so that whoever pops a mode pops his own; torch requires a default device to be first.
            modes.insert(bool(modes) and isinstance(modes[0], device_mode), self)
        for mode in modes:
            push_mode(mode)


def check_attention() -> None:
    """Raise a RuntimeError if a private function of torch for its stack of modes is gone."""
    need("attention=True", push_mode, pop_mode, function_modes, device_mode)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _read_multi_head(*args: Any, **kwargs: Any) -> AttentionArguments | str:
    """Project the inputs of ``multi_head_attention_forward`` once more; return the reason if that is not supported."""
    bound = _MULTI_HEAD.bind(*args, **kwargs)
    bound.apply_defaults()
    call = SimpleNamespace(**bound.arguments)
    added = (call.bias_k, call.bias_v, call.static_k, call.static_v)
    if call.add_zero_attn or any(item is not None for item in added) or call.query.ndim == 2:
        return "attention with bias_k, bias_v, static_k, static_v or add_zero_attn, or without a batch, is not measured"
    weights = (call.q_proj_weight, call.k_proj_weight, call.v_proj_weight)
    if not call.use_separate_proj_weight:
        weights = call.in_proj_weight.chunk(3)
    biases = (None,) * 3 if call.in_proj_bias is None else call.in_proj_bias.chunk(3)
    query, key, value = (
        _split_heads(F.linear(inputs, weight, bias), call.num_heads)
        for inputs, weight, bias in zip((call.query, call.key, call.value), weights, biases, strict=True)
    )
    # With both torch uses the hint is_causal in place of the mask; otherwise the hint only describes the mask.
    is_causal = call.is_causal and call.key_padding_mask is None and not call.need_weights
    return AttentionArguments(query, key, value, None if is_causal else _merged_mask(call), is_causal=is_causal)


def _split_heads(sequence: Tensor, heads: int) -> Tensor:
    """Reshape (sequence, batch, heads * E) to (batch, heads, sequence, E)."""
    length, batch, width = sequence.shape
    return sequence.reshape(length, batch, heads, width // heads).permute(1, 2, 0, 3)


def _merged_mask(call: SimpleNamespace) -> Tensor | None:
    """The two masks, in which True excludes a key, as one in which True includes it, or one to add."""
    masks: list[Tensor] = []
    if call.attn_mask is not None:
        per_head = call.attn_mask.ndim == 3
        masks.append(call.attn_mask.unflatten(0, (-1, call.num_heads)) if per_head else call.attn_mask[None, None])
    if call.key_padding_mask is not None:
        masks.append(call.key_padding_mask[:, None, None])
    if not masks:
        return None
    if all(mask.dtype == torch.bool for mask in masks):
        return ~functools.reduce(torch.logical_or, masks)
    zero = torch.zeros((), device=masks[0].device)
    return functools.reduce(
        torch.add, (torch.where(mask, -torch.inf, zero) if mask.dtype == torch.bool else mask for mask in masks)
    )


_READERS: dict[Callable[..., Any], Callable[..., AttentionArguments | str]] = {
    F.scaled_dot_product_attention: AttentionArguments,
    F.multi_head_attention_forward: _read_multi_head,
}
