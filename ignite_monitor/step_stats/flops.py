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

    is_infra_mode = ignore_compile_internals  # what torch asks that does not know the other

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


# Dense matrix products by dtype, in 1e12 operations a second, from the makers' data sheets ("NVIDIA H100 Tensor Core
# GPU", "H200", "A100", "V100", "T4", "L4", "L40S", "A10", and the Ada and Ampere GA102 architecture white papers, with
# float32 accumulation). They print some with sparsity, which is twice as many. By what the names that CUDA reports
# start with.
_HALF = {
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA H200": 989.4,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA A100": 312.0,
    "NVIDIA L40S": 362.05,
    "NVIDIA L4": 121.0,
    "NVIDIA A10": 125.0,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 3090": 71.0,
    "Tesla V100-SXM2": 125.0,
    "Tesla V100-PCIE": 112.0,
    "Tesla T4": 65.0,
}
_TF32 = {
    "NVIDIA H200 NVL": 417.5,
    "NVIDIA H200": 494.7,
    "NVIDIA H100 80GB HBM3": 494.7,
    "NVIDIA H100 NVL": 417.5,
    "NVIDIA H100 PCIe": 378.0,
    "NVIDIA A100": 156.0,
    "NVIDIA L40S": 183.0,
    "NVIDIA L4": 60.0,
    "NVIDIA A10": 62.5,
    "NVIDIA GeForce RTX 4090": 82.6,
    "NVIDIA GeForce RTX 3090": 35.6,
}
_FLOAT32 = {
    "NVIDIA H200 NVL": 60.0,
    "NVIDIA H200": 66.9,
    "NVIDIA H100 80GB HBM3": 66.9,
    "NVIDIA H100 NVL": 60.0,
    "NVIDIA H100 PCIe": 51.2,
    "NVIDIA A100": 19.5,
    "NVIDIA L40S": 91.6,
    "NVIDIA L4": 30.3,
    "NVIDIA A10": 31.2,
    "NVIDIA GeForce RTX 4090": 82.6,
    "NVIDIA GeForce RTX 3090": 35.6,
    "Tesla V100-SXM2": 15.7,
    "Tesla V100-PCIE": 14.0,
    "Tesla T4": 8.1,
}
# Names that start like others, of devices with other peaks.
_OTHERS = ("NVIDIA L40", "NVIDIA A10G", "NVIDIA A100X", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 3090 Ti")
_NO_BFLOAT16 = ("Tesla V100", "Tesla T4")


def peak_flops(name: str, dtype: torch.dtype, allow_tf32: bool) -> float | None:
    """How many operations a second a device makes at most, in dense matrix products; None if it is not known.

    Args:
        name: what CUDA calls the device.
        allow_tf32: whether products of float32 may be made in TF32.
    """
    if dtype in (torch.bfloat16, torch.float16):
        table = {} if dtype == torch.bfloat16 and name.startswith(_NO_BFLOAT16) else _HALF
    elif dtype == torch.float32:
        table = _FLOAT32 | (_TF32 if allow_tf32 else {})
    else:
        table = {}
    if name.startswith(_OTHERS) and not name.startswith("NVIDIA L40S"):
        return None
    return next((1e12 * peak for start, peak in table.items() if name.startswith(start)), None)
