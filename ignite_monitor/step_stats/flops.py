"""Counting the floating-point operations of what runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import flop_counter

from ignite_monitor.model._torch import DispatchMode, cpu_attention, is_fake
from ignite_monitor.model.norms import any_sharded


class FlopCount(DispatchMode):
    """While it lasts, counts this rank's floating-point operations of matrix products, convolutions and attention.

    By the formulas of ``torch.utils.flop_counter``, in which a multiplication and an addition are two operations. Its
    FlopCounterMode would put hooks on all modules, of which compiled ones warn, and does not know the CPU's attention.

    Attributes:
        counts: dtype of the first factor -> how many.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[torch.dtype] = Counter()
        self._formulas = _CPU | flop_counter.flop_registry

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled can be compiled while this mode is on, and is not counted."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in args if isinstance(each, Tensor)]
        if any_sharded(tensors):
            return NotImplemented  # DTensor goes first, and comes back with what this rank makes of it
        result = func(*args, **kwargs)
        formula = self._formulas.get(getattr(func, "overloadpacket", func))
        # With fake tensors DTensor finds out shapes.
        if formula is not None and tensors and not any(is_fake(each) for each in tensors):
            self.counts[tensors[0].dtype] += formula(*args, **kwargs, out_val=result)
        return result


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return int(flop_counter.sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return int(flop_counter.sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape))


_CPU: dict[Any, Callable[..., int]] = dict(zip(cpu_attention(), (_attention, _attention_backward), strict=True))
