"""How many operations monitors launch, and that few large ones give the numbers of many small ones."""

from __future__ import annotations

import pytest
import torch

from ignite_monitor.activation import statistics
from tests.accelerator._operations import MONITORS, added

pytestmark = pytest.mark.cuda

# What runs in hooks on modules, one after the other, in which no dispatch mode is on: each output is copied.
LAUNCHED = {
    "GradMonitor, per_parameter": 130,
    "ActivationHandler": 240,
    "ActivationHandler, attention": 530,
    "ActivationHandler, gradients and parameters": 1340,
    "RCCHandler": 1120,
}


@pytest.mark.parametrize("name", MONITORS)
def test_operations_of_a_monitored_iteration(name, device):
    limit, make = MONITORS[name]
    result = added(device, make)
    assert result.seen <= limit
    assert result.launched <= max(LAUNCHED.get(name, 0), limit + 10)


def test_those_of_grad_monitor_do_not_grow_with_the_model(device):
    make = MONITORS["GradMonitor"][1]
    assert added(device, make, blocks=6).seen == added(device, make, blocks=1).seen


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5,), (), (2, 3, 4, 5), (7, 1), (1, 4), (3, 4), (6, 2, 4), (0, 4)]
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    result = [
        (torch.randn(2, *shape, generator=generator) + offset).to(dtype)
        for shape in shapes
        for dtype in dtypes
        for offset in (0.0, 100.0)
        if 0 not in shape
    ]
    for place, value in ((1, torch.nan), (5, torch.inf), (9, -torch.inf)):
        result[place].view(-1)[0] = value
    return result


@pytest.mark.parametrize("piece", [statistics.PIECE, 20])
def test_moments_are_those_of_the_cpu(piece, device, monkeypatch):
    for name in ("PIECE", "_PIECE_ON_ACCELERATOR"):
        monkeypatch.setattr(statistics, name, piece)
    for tensor in tensors():
        for unit in (None, 1, tensor.ndim - 1) if tensor.ndim > 1 else (None,):
            both = tensor, tensor.to(device.name)
            expected, result = (statistics.moments(item, unit) for item in both)
            # Of non-finite elements the number alone is reported.
            result, expected = (item.nan_to_num(torch.nan, torch.nan, torch.nan) for item in (result.cpu(), expected))
            torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-9, equal_nan=True)
