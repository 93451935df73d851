"""Number of operations that monitors launch, and equality of moments on a device and on the CPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from ignite_monitor.activation import statistics
from ignite_monitor.spectral.norm import measure
from tests.accelerator._operations import MONITORS, added

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("name", MONITORS)
def test_operations_of_a_monitored_iteration(name, device):
    seen, launched, make = MONITORS[name]
    result = added(device, make)
    assert result.seen <= seen
    assert result.launched <= launched


def test_those_of_grad_monitor_do_not_grow_with_the_model(device):
    make = MONITORS["GradMonitor"][-1]
    assert added(device, make, blocks=6).seen == added(device, make, blocks=1).seen


SHAPES = [(3, 4), (5,), (), (2, 3, 4, 5), (7, 1), (6, 2, 4)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
VALUES = [(0.0, 0.0), (100.0, 0.0), (0.0, torch.nan), (100.0, torch.inf), (0.0, -torch.inf)]


@pytest.mark.parametrize("piece", [statistics.PIECE, 20])
def test_moments_are_those_of_the_cpu(piece, device, monkeypatch):
    for name in ("PIECE", "_PIECE_ON_ACCELERATOR"):
        monkeypatch.setattr(statistics, name, piece)
    for shape, dtype, (offset, value) in itertools.product(SHAPES, DTYPES, VALUES):
        tensor = offset + torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
        tensor.view(-1)[0] += value
        tensor = tensor.to(dtype)
        for unit in (None, 1, tensor.ndim - 1) if tensor.ndim > 1 else (None,):
            parts = (statistics.partial_sums(["a", "b"], item, unit) for item in (tensor, tensor.to(device.name)))
            expected, result = (statistics.table_of([part]).values for part in parts)
            # Of non-finite elements the number alone is reported.
            result, expected = (item.nan_to_num(torch.nan, torch.nan, torch.nan) for item in (result.cpu(), expected))
            torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("shape", [(8, 600, 700), (1, 1030, 1100)], ids=["powers", "Lanczos"])
def test_spectral_norms_of_large_matrices_are_those_of_the_cpu_without_synchronization(shape, device):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    on_device = matrices.to(device.name)
    with device.no_synchronization():
        result = measure(on_device, "power", 0)
    expected = torch.linalg.matrix_norm(matrices.double(), 2)
    assert ((result.norms.cpu() / expected - 1).abs() <= result.errors.cpu()).all()
    assert result.errors.max() < 1e-3
