"""Every monitor on an accelerator: the numbers of the CPU, no synchronization, and how many operations it launches."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from ignite_monitor import CurvatureHandler, GradientNoiseScaleHandler, ReplayCheckHandler, SetupCheck
from ignite_monitor.activation import statistics
from ignite_monitor.spectral.norm import measure
from tests.accelerator._device import Device
from tests.accelerator._operations import LIMITS, added
from tests.accelerator._trainings import MONITORS, Training, assert_alike, batches, without_machine

pytestmark = pytest.mark.cuda

KINDS = ("plain", "accumulated", "scaled")
# To the others it makes no difference what a step is.
OF_STEPS = ("GradMonitor", "WeightUpdate", "ActivationHandler of weights", "SpectralNormHandler", "OptimizerState")
CASES = [(name, kind) for name in MONITORS for kind in (KINDS if name.startswith(OF_STEPS) else KINDS[:1])]


def tolerance_of(name: str, device: Device) -> float:
    if name.startswith("SpectralNormHandler"):
        return 2e-3 if "ns5" not in name else 0.6  # which starts from random vectors and has no bound
    return 2e-3 if device.name == "cuda" else 2e-4


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_numbers_of_the_cpu_without_synchronization(name, kind, device):
    rows = []
    for item in (Device("cpu"), device):
        training = Training(item, kind)
        monitor = MONITORS[name](training.model, training.optimizer, training.scaler)
        rows.append(training.run([monitor], batches(7, item.name, spikes=[5])))
    actual, expected = map(without_machine, rows)
    assert any(actual)
    assert_alike(expected, actual, tolerance_of(name, device))


@pytest.mark.parametrize("kind", ["plain", "accumulated"])
def test_the_check_of_the_setup_synchronizes_once(device, kind):
    training = Training(device, kind)
    check = SetupCheck(training.model, training.optimizer)
    check.attach(training.trainer)
    synchronizations = training.synchronizations(batches(6, device.name))
    assert check.findings == []
    assert len(synchronizations) == 1, synchronizations


@pytest.mark.parametrize("kind", KINDS)
def test_the_replay_check_synchronizes_once_per_pair_of_passes(device, kind):
    training = Training(device, kind)
    check = ReplayCheckHandler(training.model, loss=token_loss)
    check.attach(training.trainer)
    synchronizations = training.synchronizations(batches(6, device.name))
    assert check.on_host()["replay/reproducible"] == 1
    assert len(synchronizations) <= 6, synchronizations


def token_loss(model, batch):
    tokens, targets, factor = batch
    return factor * F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def noise_scale(training):
    return GradientNoiseScaleHandler(training.model, training.optimizer, micro_batches=2)


def curvature(training):
    return CurvatureHandler(training.model, training.optimizer, loss=token_loss, lanczos_steps=4)


@pytest.mark.parametrize(
    ("make", "kind", "count", "name"),
    [(noise_scale, "accumulated", 44, "noise_scale/value"), (curvature, "plain", 2, "curvature/along_gradient")],
)
def test_the_numbers_of_noise_scale_and_curvature(make, kind, count, name, device):
    rows = []
    for item in (Device("cpu"), device):
        training = Training(item, kind, lr=0.0)
        data = [(tokens, torch.zeros_like(targets), factor) for tokens, targets, factor in batches(count, item.name)]
        rows.append(training.run([make(training)], data))
    assert name in rows[0][-1]
    assert_alike(*rows, tolerance_of(name, device))


# Operations


@pytest.mark.parametrize("name", LIMITS)
def test_operations_of_a_monitored_iteration(name, device):
    seen, launched, make = LIMITS[name]
    result = added(device, make)
    assert result.seen <= seen
    assert result.launched <= launched


def test_those_of_grad_monitor_do_not_grow_with_the_model(device):
    make = LIMITS["GradMonitor"][-1]
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
