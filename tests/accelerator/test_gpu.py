"""Behaviour that needs a GPU: CUDA graphs, its own optimizers. All other code runs on the simulated device."""

from __future__ import annotations

import copy
import logging
import time

import pytest
import torch
from ignite.engine import Engine, Events
from torch import distributed
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from ignite_monitor import GradMonitor, WeightUpdateHandler
from ignite_monitor.monitor.transfer import DeferredFlag
from tests.accelerator._device import Device
from tests.accelerator._trainings import (
    Training,
    all_monitors,
    assert_alike,
    batches,
    transformer,
    without_machine,
)

pytestmark = pytest.mark.cuda

# What is known without seeing a step, a backward or a forward pass.
OF_WEIGHTS = ("spectral/", "step/parameter_norm", "step/lr/")


def replayed(training: Training, device: Device, batch):
    """A train step as a CUDA graph; elsewhere one that is made on a copy, so that no hook is called either."""
    if device.name != "cuda":
        other = Training(device, model=copy.deepcopy(training.model))

        def replay() -> None:
            other.trainer.run([batch])
            with torch.no_grad():
                for parameter, new in zip(training.model.parameters(), other.model.parameters(), strict=True):
                    parameter.copy_(new)

        return replay
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            training.loss(batch).backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.loss(batch).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
    return graph.replay


def test_of_a_step_that_is_replayed_only_the_weights_are_known(device, caplog):
    """No hook runs in it: what would need one is absent, with a warning, and what is published is right."""
    caplog.set_level(logging.WARNING)
    training = Training(device)
    (batch,) = batches(1, device.name)
    replay = replayed(training, device, batch)
    monitors = all_monitors(training)
    trainer, rows = Engine(lambda engine, _: replay()), []
    for monitor in monitors:
        monitor.attach(trainer)
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda: rows.append({name: value for monitor in monitors for name, value in monitor.on_host().items()}),
    )
    trainer.run([batch] * 3)
    for row in without_machine(rows):
        others = [name for name in row if not name.startswith(OF_WEIGHTS)]
        counts = [name for name in others if name.endswith("count")]
        assert all(row[name] == 0 for name in counts)
        assert [name for name in others if name not in counts] == []
    matrices = [item.detach().double().cpu() for item in training.model.parameters() if item.ndim == 2]
    norm = max(float(torch.linalg.matrix_norm(item, 2)) for item in matrices)
    assert rows[-1]["spectral/norm_max"] == pytest.approx(norm, rel=2e-3)
    assert rows[0]["spectral/norm_max"] != rows[-1]["spectral/norm_max"]
    assert any("none of 3 monitored iterations" in record.getMessage() for record in caplog.records)


# torch warns of the streams that make_graphed_callables() itself uses.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
def test_a_graphed_forward(device):
    """Gradients and steps are seen as ever, where forward and backward passes are graphs."""
    rows = []
    for graphed in (False, True):
        torch.manual_seed(0)
        model = transformer(records=False).to(device.name)
        training = Training(device, model=model)
        data = batches(4, device.name)
        monitors = [GradMonitor(model, training.optimizer), WeightUpdateHandler(model, training.optimizer)]
        if graphed and device.name == "cuda":
            training.model = torch.cuda.make_graphed_callables(model, (data[0][0],))
        rows.append(training.run(monitors, data, quiet=False))
    assert_alike(*rows, 1e-4)


def test_a_flag_is_seen_while_it_is_set_in_every_iteration(device):
    """Each copy is behind work that is not done when the next one starts."""
    if device.name != "cuda":
        pytest.skip("other devices' flags are read when the host waits")
    flag, large, seen = DeferredFlag(), torch.randn(4096, 4096, device="cuda"), 0
    for i in range(50):
        large = large @ large.sign() / 64
        flag.set(large.isnan().all() | (i == 3))
        seen += flag.take()
        if i % 10 == 0:
            time.sleep(0.01)
    seen += flag.take(wait=True)
    assert seen == 1
    flag.set(torch.tensor(True, device="cuda"))
    torch.cuda.synchronize()
    assert flag.take()
    assert not flag.take(wait=True)


def test_offloaded_parameters_with_nccl_alone(device):
    """Their gradients are on the CPU, where NCCL has no collectives."""
    if device.name != "cuda":
        pytest.skip("NCCL needs a GPU")
    distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = fully_shard(transformer(records=False), offload_policy=CPUOffloadPolicy())
        training, norms = Training(device, model=model, place=False), []
        gradients = lambda: [item.grad.to_local() for item in model.parameters()]  # noqa: E731
        training.optimizer.register_step_pre_hook(
            lambda *_: norms.append(torch.cat([item.double().flatten() for item in gradients()]).norm())
        )
        monitors = [GradMonitor(model, training.optimizer), WeightUpdateHandler(model, training.optimizer)]
        rows = training.run(monitors, batches(3, device.name), quiet=False)
        assert {norm.device.type for norm in norms} == {"cpu"}
        assert [row["grad/norm"] for row in rows] == pytest.approx([float(norm) for norm in norms], rel=1e-6)
    finally:
        distributed.destroy_process_group()
