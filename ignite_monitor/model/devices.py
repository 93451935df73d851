"""Where a model is, and moving small tensors without waiting for a device."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's first parameter that has data; the CPU if none has."""
    return next((each.device for each in model.parameters() if not each.is_meta), torch.device("cpu"))


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor from the CPU on a device, without waiting for it."""
    if device.type == "cpu":
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device, without waiting for its own or for that one."""
    if tensor.device.type == "cpu":
        return upload(tensor, device)
    return tensor.to(device, non_blocking=device.type != "cpu")


def move_like(tensor: Tensor, reference: Tensor) -> Tensor:
    """A tensor on another one's device and of its dtype, without waiting for either device."""
    return move(tensor.to(reference.dtype), reference.device)


@functools.cache
def wide_dtype(device: torch.device) -> torch.dtype:
    """The widest floating-point dtype of a device."""
    return torch.float32 if device.type == "mps" else torch.float64
