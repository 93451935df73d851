"""The device of a model, and transfers of small tensors that do not synchronize host and device."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's first parameter that has data; the CPU if none has."""
    return next((item.device for item in model.parameters() if not item.is_meta), torch.device("cpu"))


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from any device to another."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        tensor = tensor.contiguous().pin_memory()
    return tensor.to(device, non_blocking=device.type != "cpu")


def move_like(tensor: Tensor, reference: Tensor) -> Tensor:
    """Copy a tensor to the device and dtype of another one."""
    return move(tensor.to(reference.dtype), reference.device)


def wide_dtype(device: torch.device) -> torch.dtype:
    """The widest floating-point dtype of a device."""
    return torch.float32 if device.type == "mps" else torch.float64
