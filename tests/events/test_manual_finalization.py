"""Train steps that finalize the reduction of gradients themselves, as torch 2.15 allows.

The wrappers of earlier versions reduce in ``backward()`` all the same; what monitors do is tested here.
"""

from __future__ import annotations

import pytest
import torch
from ignite.engine import Engine
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ignite_monitor import GradMonitor, MonitorEvents
from tests._helpers import grad_norm, make_batches, make_step
from tests._models import make_model
from tests._ranks import SHARDS

pytestmark = pytest.mark.usefixtures("one_rank")


def replicated():
    model = DistributedDataParallel(make_model())
    model.require_manual_backward_finalization = True
    return model


def sharded():
    model = make_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    if hasattr(model, "set_manual_backward_finalization"):
        model.set_manual_backward_finalization(True)
    else:
        model._get_fsdp_state()._state_ctx.manual_backward_finalization = True
    return model


WRAPS = [replicated, sharded] if SHARDS else [replicated]


def finalize(model):
    if hasattr(model, "finalize_backward"):
        model.finalize_backward()


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_are_measured_when_the_step_starts(wrap, accumulation):
    model = wrap()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    norms, events = [], []

    def after_backward(engine):
        assert engine.state.grad_norm is None
        finalize(model)

    keep = {"before_step": lambda engine: norms.append(grad_norm(model))}
    trainer = Engine(make_step(model, optimizer, every=accumulation, after_backward=after_backward, **keep))
    monitor = GradMonitor(model, optimizer)
    monitor.attach(trainer)
    for event in (MonitorEvents.GRADIENTS_READY, MonitorEvents.OPTIMIZER_STEP_STARTED):
        trainer.add_event_handler(event, lambda _, name: events.append(name), event.value)
    published = []
    trainer.add_event_handler(
        MonitorEvents.TRAIN_STEP_COMPLETED, lambda engine: published.append(engine.state.metrics.get("grad/norm"))
    )
    trainer.run(make_batches(4))
    assert events == ["optimizer_step_started"] * (4 // accumulation)
    assert [norm for norm in published if norm is not None] == pytest.approx(norms, rel=1e-6)
    assert [norm is None for norm in published] == [number % accumulation != 0 for number in range(1, 5)]


def test_gradient_hooks_that_are_called_outside_of_a_backward():
    """FSDP2 calls them in ``finalize_backward()``, on gradients that it has just reduced."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    norms, published = [], []

    def call_hooks(engine):
        for parameter in model.parameters():
            for hook in (parameter._post_accumulate_grad_hooks or {}).values():
                hook(parameter)
        norms.append(grad_norm(model))

    trainer = Engine(make_step(model, optimizer, by_hand=True, after_backward=call_hooks))
    GradMonitor(model, optimizer).attach(trainer)
    trainer.add_event_handler(
        MonitorEvents.TRAIN_STEP_COMPLETED, lambda engine: published.append(engine.state.metrics["grad/norm"])
    )
    trainer.run(make_batches(3))
    assert published == pytest.approx(norms, rel=1e-6)
