"""Seeing the attention calls of a model's forward without editing the model."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _len_torch_function_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext

from ignite_monitor.capture.aside import aside, is_plain


class AttentionCalls(TorchFunctionMode):
    """Hands every attention call of a forward, detached, to a function.

    Seen are ``torch.nn.functional.scaled_dot_product_attention``, by whatever name it is called, that is also
    transformers' models with ``attn_implementation="sdpa"``, and ``torch.nn.functional.multi_head_attention_forward``,
    that is ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer``. Not seen are attention that a module computes
    by itself from products and a softmax (transformers' ``"eager"``), ``torch.nn.attention.flex_attention``, kernels of
    other packages (``flash_attn``, xFormers), and attention inside scripted modules.

    It is a mode and not a replacement of the functions in their module: a mode sees a function that was imported by
    name as well, it is of one thread alone, and compiled code that guards on those functions stays valid. As long as
    a mode is on, ``nn.MultiheadAttention`` and ``nn.TransformerEncoder`` don't take their fast path, which rounds
    otherwise and is for eval mode; so the mode is off while a module in eval mode runs.

    What the function raises is raised where the model calls attention. Calls repeated in backward, by activation
    checkpointing, are not handed on.

    Args:
        current: gives the name of the module that is running, None if its calls don't count.
        on_call: is called with that name, ``query``, ``key``, ``value``, ``mask``, ``is_causal``, ``scale`` and
            ``enable_gqa``, as in ``scaled_dot_product_attention``, under ``no_grad`` and without autocast. Of
            ``multi_head_attention_forward``, where they are not at hand, they are projected once more from its
            arguments: what is not asked of is at most three matrix products, without the attention itself. Both are
            held as they are given: a method of the owner would close a cycle.

    Attributes:
        skipped: names of modules with calls on tensors that have no values of their own here: DTensors, nested tensors,
            tensors under ``vmap``.

    Examples:
        .. code-block:: python

            names = []
            calls = AttentionCalls(lambda: names[-1], on_call)

            def before(module, args):  # a forward pre-hook of every module
                names.append(name_of[module])
                calls.enter(module.training)

            def after(module, args, output):  # a forward hook, with always_call=True
                calls.leave()
                names.pop()
    """

    def __init__(self, current: Callable[[], str | None], on_call: Callable[..., None]) -> None:
        super().__init__()
        self._current = current
        self._on_call = on_call
        self._thread = _Thread()
        self.skipped: set[str] = set()

    def enter(self, watched: bool = True) -> None:
        """Watch from here on, until :meth:`leave`; in pairs, one in the other, each thread for itself.

        Args:
            watched: whether to watch, False for a module in eval mode.
        """
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
        self._thread.inside += 1
        try:
            result = func(*args, **kwargs)
        finally:
            self._thread.inside -= 1
        if func in _READERS:
            self._report(_READERS[func], args, kwargs)
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

    def _report(self, read: Callable[..., _Call], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch._C._current_graph_task_id() != -1:  # in backward
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
    others = [_pop_mode() for _ in range(_len_torch_function_stack())]
    while others and isinstance(others[-1], DeviceContext):
        _push_mode(others.pop())
    for each in (mode, *reversed(others)):
        _push_mode(each)


def _take_off(mode: TorchFunctionMode) -> None:
    """Take a mode off the stack wherever it is, and leave the others as they are."""
    for each in reversed([_pop_mode() for _ in range(_len_torch_function_stack())]):
        if each is not mode:
            _push_mode(each)


class _Call(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float | None
    enable_gqa: bool


def _read_scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> _Call:
    return _Call(query, key, value, attn_mask, is_causal, scale, enable_gqa)


_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)


def _read_multi_head(*args: Any, **kwargs: Any) -> _Call:
    bound = _MULTI_HEAD.bind(*args, **kwargs)
    bound.apply_defaults()
    call = SimpleNamespace(**bound.arguments)
    if call.query.ndim == 2:
        call.query, call.key, call.value = (each.unsqueeze(1) for each in (call.query, call.key, call.value))
        call.key_padding_mask = None if call.key_padding_mask is None else call.key_padding_mask.unsqueeze(0)
    query, key, value = _project(call)
    # The hint stands for the mask where torch hands it on to the kernel, which is there alone.
    is_causal = call.is_causal and call.key_padding_mask is None and not call.need_weights
    mask = None if is_causal else _merge_masks(call, key.shape[-2])
    return _Call(query, key, value, mask, is_causal, None, False)


def _project(call: SimpleNamespace) -> list[Tensor]:
    """Query, key and value of each head, of shape (batch, heads, L or S, E)."""
    separate = (call.q_proj_weight, call.k_proj_weight, call.v_proj_weight)
    weights = separate if call.use_separate_proj_weight else call.in_proj_weight.chunk(3)
    biases = (None,) * 3 if call.in_proj_bias is None else call.in_proj_bias.chunk(3)
    projected = []
    for inputs, weight, bias, row, given in zip(
        (call.query, call.key, call.value),
        weights,
        biases,
        (None, call.bias_k, call.bias_v),
        (None, call.static_k, call.static_v),
        strict=True,
    ):
        if given is not None:
            heads = given.unflatten(0, (-1, call.num_heads))
        else:
            sequence = F.linear(inputs, weight, bias)
            if row is not None:
                sequence = torch.cat([sequence, row.expand(1, *sequence.shape[1:])])
            heads = sequence.unflatten(-1, (call.num_heads, -1)).permute(1, 2, 0, 3)
        if call.add_zero_attn and inputs is not call.query:
            heads = F.pad(heads, (0, 0, 0, 1))
        projected.append(heads)
    return projected


def _merge_masks(call: SimpleNamespace, keys: int) -> Tensor | None:
    """The two masks, in which True is left out, as one in which True takes part, or one to add."""
    masks = []
    if call.attn_mask is not None:
        three = call.attn_mask.ndim == 3
        masks.append(call.attn_mask.unflatten(0, (-1, call.num_heads)) if three else call.attn_mask[None, None])
    if call.key_padding_mask is not None:
        masks.append(call.key_padding_mask[:, None, None])
    masks = [F.pad(mask, (0, keys - mask.shape[-1])) for mask in masks]  # what was appended to the keys takes part
    if all(mask.dtype == torch.bool for mask in masks):
        merged = ~masks[0] if masks else None
        return merged if len(masks) < 2 else merged & ~masks[1]
    return sum(mask if mask.is_floating_point() else torch.where(mask, -torch.inf, 0.0) for mask in masks)


_READERS: dict[Callable[..., Any], Callable[..., _Call]] = {
    F.scaled_dot_product_attention: _read_scaled_dot_product,
    F.multi_head_attention_forward: _read_multi_head,
}
