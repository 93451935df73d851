"""Detection of the attention calls in a model's forward."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ignite_monitor.activation.attention import AttentionArguments, HeadEntropy, attention_entropy
from ignite_monitor.model._torch import in_backward
from ignite_monitor.model.forward import after_forward, before_forward
from ignite_monitor.model.modes import full_precision, has_local_data, hidden_from_user_modes


class Reason(NamedTuple):
    """Reason for not measuring something: the kind of the report, and its text."""

    kind: str
    text: str


NOT_PLAIN = Reason(
    "no_local_data", "nested, sparse and meta tensors, tensors of other classes and in torch.func are not measured"
)

_WITH_FAST_PATH = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)

_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)


class AttentionCalls(TorchFunctionMode):
    """Reports every attention call, detached, to a function, under ``no_grad`` and without autocast.

    A mode also detects functions that were imported by name, belongs to one thread, and invalidates no compiled code.

    Args:
        current: returns what is reported with a call made now, None if the call is not reported.
        report: is called with it, and the entropy or the reason why it is not known.
    """

    def __init__(self, current: Callable[[], Any], report: Callable[[Any, HeadEntropy | Reason], None]) -> None:
        super().__init__()
        self._current = current
        self._report = report
        self._thread: Any = threading.local()

    @contextlib.contextmanager
    def during(self, model: nn.Module) -> Iterator[None]:
        """Detect calls in the forward passes of a model."""
        try:
            with before_forward([model], self.enter), after_forward([model], self.leave, first=True, always=True):
                yield
        finally:
            self._set_depth(0)  # torch runs no hook after a KeyboardInterrupt

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # Calls in backward are recomputations by activation checkpointing; compiled parts of the model are only traced.
        if func in _READERS and not in_backward() and not torch.compiler.is_compiling():
            current = self._current()
            if current is not None:
                self._report_call(current, _READERS[func], args, kwargs)
        return result

    def _report_call(self, current: Any, read: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        with hidden_from_user_modes():
            # Other classes may decide what functions take as a tensor's elements.
            if not all(type(value) in (Tensor, nn.Parameter) and has_local_data(value) for value in tensors):
                self._report(current, NOT_PLAIN)
                return
            # The projections run in the user's autocast. It caches copies of weights that require gradients, and those
            # made here would have none, so arguments are detached.
            try:
                call = read(*map(_detached, args), **{name: _detached(value) for name, value in kwargs.items()})
                with full_precision(tensors[0].device):
                    result = call if isinstance(call, Reason) else attention_entropy(call)
            except Exception as error:  # noqa: BLE001 - training continues
                text = f"its attention can't be measured: {type(error).__name__}: {error}"
                result = Reason("failed_attention", text)
            self._report(current, result)

    def enter(self, *_: Any) -> None:
        """Detect calls of this thread until :meth:`leave`; pairs may be nested."""
        if not in_backward():  # where checkpointing leaves modules half-way
            self._set_depth(self._depth + 1)

    def leave(self, *_: Any) -> None:
        """Return to what was before the latest :meth:`enter`."""
        if not in_backward():
            self._set_depth(max(self._depth - 1, 0))

    @property
    def _depth(self) -> int:
        return int(vars(self._thread).get("depth", 0))  # of this thread

    def _set_depth(self, depth: int) -> None:
        before, self._thread.depth = self._depth, depth
        mode: Any = self  # whose methods have no types
        if depth and not before:
            mode.__enter__()
        elif before and not depth:
            mode.__exit__(None, None, None)


def may_use_fast_path(model: nn.Module) -> bool:
    """Return True for transformer modules of torch in evaluation mode, whose fast path a mode would disable."""
    return any(isinstance(module, _WITH_FAST_PATH) and not module.training for module in model.modules())


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _read_multi_head(*args: Any, **kwargs: Any) -> AttentionArguments | Reason:
    """Project queries and keys once more; return the reason if the arguments are not supported."""
    bound = _MULTI_HEAD.bind(*args, **kwargs)
    bound.apply_defaults()
    call = SimpleNamespace(**bound.arguments)
    added = (call.bias_k, call.bias_v, call.static_k, call.static_v)
    if call.add_zero_attn or any(item is not None for item in added) or call.query.ndim == 2:
        text = "attention with bias_k, bias_v, static_k, static_v or add_zero_attn, or without a batch, is not measured"
        return Reason("attention_arguments", text)
    weights = (call.q_proj_weight, call.k_proj_weight)
    if not call.use_separate_proj_weight:
        weights = call.in_proj_weight.chunk(3)[:2]
    biases = (None, None) if call.in_proj_bias is None else call.in_proj_bias.chunk(3)[:2]
    query, key = (
        _split_heads(F.linear(inputs, weight, bias), call.num_heads)
        for inputs, weight, bias in zip((call.query, call.key), weights, biases, strict=True)
    )
    # With both torch uses the hint is_causal in place of the mask; otherwise the hint only describes the mask.
    is_causal = call.is_causal and call.key_padding_mask is None and not call.need_weights
    return AttentionArguments(query, key, None, None if is_causal else _merged_mask(call), is_causal=is_causal)


def _split_heads(sequence: Tensor, heads: int) -> Tensor:
    """Reshape (sequence, batch, heads * E) to (batch, heads, sequence, E)."""
    length, batch, width = sequence.shape
    return sequence.reshape(length, batch, heads, width // heads).permute(1, 2, 0, 3)


def _merged_mask(call: SimpleNamespace) -> Tensor | None:
    """The two masks, in which True excludes a key, as one to add."""
    masks: list[Tensor] = []
    if call.attn_mask is not None:
        per_head = call.attn_mask.ndim == 3
        masks.append(call.attn_mask.unflatten(0, (-1, call.num_heads)) if per_head else call.attn_mask[None, None])
    if call.key_padding_mask is not None:
        masks.append(call.key_padding_mask[:, None, None])
    added = [torch.where(mask, -torch.inf, 0.0) if mask.dtype == torch.bool else mask for mask in masks]
    return functools.reduce(torch.add, added) if added else None


_READERS: dict[Callable[..., Any], Callable[..., AttentionArguments | Reason]] = {
    F.scaled_dot_product_attention: AttentionArguments,
    F.multi_head_attention_forward: _read_multi_head,
}
