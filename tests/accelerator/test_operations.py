"""How many operations monitors launch, and that few large ones give the numbers of many small ones."""

from __future__ import annotations

import pytest
import torch

from ignite_monitor.activation import statistics
from tests.accelerator._operations import MONITORS, added

pytestmark = pytest.mark.cuda

# What runs in hooks on modules, one after the other, in which no dispatch mode is on: each output is copied.
LAUNCHED = {
    "ActivationHandler": 160,
    "ActivationHandler, attention": 440,
    "ActivationHandler, gradients and parameters": 680,
    "RCCHandler": 840,
}


@pytest.mark.parametrize("name", MONITORS)
def test_operations_of_a_monitored_iteration(name, device):
    limit, make = MONITORS[name]
    found = added(device, make)
    assert found.seen <= limit
    assert found.launched <= LAUNCHED.get(name, limit + 10)


def test_those_of_grad_monitor_do_not_grow_with_the_model(device):
    make = MONITORS["GradMonitor"][1]
    assert added(device, make, blocks=6).seen == added(device, make, blocks=1).seen


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5,), (), (2, 3, 4, 5), (7, 1), (1, 4), (3, 4), (6, 2, 4), (0, 4)]
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    found = [
        (torch.randn(2, *shape, generator=generator) + offset).to(dtype)
        for shape in shapes
        for dtype in dtypes
        for offset in (0.0, 100.0)
        if 0 not in shape
    ]
    for place, value in ((1, torch.nan), (5, torch.inf), (9, -torch.inf)):
        found[place].view(-1)[0] = value
    return found


@pytest.mark.parametrize("piece", [statistics._LARGER_PIECE, 20, 0])
def test_sums_of_many_tensors_at_once(piece, device, monkeypatch):
    monkeypatch.setattr(statistics, "_LARGER_PIECE", piece)
    if not piece:
        monkeypatch.setattr(statistics, "_pieces", lambda each: [each])
    of_units = [(each, statistics.unit_dimension(each.shape[1:])) for each in tensors()]
    stacks = [*of_units, *((each, None) for each in tensors())]
    expected, units = statistics.sum_up(stacks)
    found, found_units = statistics.sum_up([(each.to(device.name), unit) for each, unit in stacks])
    bad = expected[:, 5] > 0
    assert bad.sum() == 6
    torch.testing.assert_close(found[~bad].cpu(), expected[~bad], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found[:, [0, 1, 5]].cpu(), expected[:, [0, 1, 5]])
    for each, other in zip(found_units, units, strict=True):
        torch.testing.assert_close(each.cpu(), other, check_dtype=False, equal_nan=True)
