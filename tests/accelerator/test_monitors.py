"""Every monitor on an accelerator: the numbers of the CPU, and no synchronization."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from ignite_monitor import CurvatureHandler, GradientNoiseScaleHandler, ReplayCheckHandler, SetupCheck
from tests.accelerator._device import Device
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
