"""Counting the floating-point operations of what runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ignite_monitor.capture.eager import eager


class FlopCount:
    """While it lasts, counts the floating-point operations of matrix products, convolutions and attention.

    A multiplication and an addition are two operations. What it counts it does not change; compiled code runs eagerly.

    Attributes:
        total: how many there were, when it has ended.
        dtype: the dtype that most of them were made in; None if there were none.
    """

    def __init__(self) -> None:
        self.total = 0
        self.dtype: torch.dtype | None = None
        self._around = ExitStack()

    def __enter__(self) -> FlopCount:
        self._counter = self._around.enter_context(FlopCounterMode(display=False))
        self._dtypes = self._around.enter_context(_Dtypes(self._counter.flop_registry))
        self._around.enter_context(eager())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._around.close()
        if kind is None:
            self.total = self._counter.get_total_flops()
            most = self._dtypes.counts.most_common(1)
            self.dtype = most[0][0] if most else None
        del self._counter, self._dtypes


class _Dtypes(TorchDispatchMode):
    """Counts operations by the dtype of their first tensor."""

    def __init__(self, formulas: dict[Any, Callable[..., int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[torch.dtype] = Counter()
        self._formulas = formulas

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = self._formulas.get(func._overloadpacket)
        dtype = next((each.dtype for each in args if isinstance(each, Tensor)), None)
        if formula is not None and dtype is not None:
            self.counts[dtype] += formula(*args, **kwargs, out_val=result)
        return result
