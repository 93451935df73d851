"""What a rank does for test_gpu.py: a DistributedDataParallel training on a GPU of its own, or on the CPU with gloo."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ignite_monitor import ActivationHandler, GradMonitor, RCCHandler, SpectralNormHandler, WeightUpdateHandler
from tests.accelerator._device import Device
from tests.accelerator._trainings import Training, Transformer, batches, without_machine
from tests.distributed._launch import run_scenarios

COUNT = 4


def monitored(training: Training) -> list[dict[str, float]]:
    model, optimizer = training.model, training.optimizer
    monitors = [
        GradMonitor(model, optimizer),
        WeightUpdateHandler(model, optimizer),
        ActivationHandler(model, activations=True, gradients=True),
        RCCHandler(model),
        SpectralNormHandler(model),
    ]
    return without_machine(training.run(monitors, training.data))


def ddp(rank: int) -> dict[str, Any]:
    nccl = os.environ.get("TEST_BACKEND") == "nccl"
    if nccl:
        torch.cuda.set_device(rank)
    device = Device("cuda" if nccl else "cpu")
    torch.manual_seed(0)
    model = DistributedDataParallel(Transformer().to(device.name))
    training = Training(device, model=model)
    training.data = [(tokens[rank::2], targets[rank::2], one) for tokens, targets, one in batches(COUNT, device.name)]
    return {"published": monitored(training)}


SCENARIOS = {"ddp": ddp}

if __name__ == "__main__":
    run_scenarios(SCENARIOS)
