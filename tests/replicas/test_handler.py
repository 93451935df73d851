"""What is compared between ranks, and what a check costs."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ignite.engine import Engine
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ignite_monitor import ReplicaCheckHandler
from ignite_monitor.replicas import handler
from ignite_monitor.replicas.items import items_of
from tests._models import make_model


@pytest.mark.parametrize("name", ["norm", "group_norm"])
def test_the_optimizer_s_own_values_are_compared_by_name(name):
    """Tensors, numbers, strings, and containers of these, whatever the parameter is called."""
    model = nn.Sequential()
    model.add_module(name, nn.GroupNorm(1, 4))
    optimizer = torch.optim.NAdam(model.parameters(), betas=(0.8, 0.9))
    for parameter in model.parameters():
        optimizer.state[parameter] |= {
            "count": 1,
            "mean": torch.ones(2),
            "owner": object(),
            "old": [{"a": torch.ones(1)}],
        }
    optimizer.param_groups[0]["scorer"] = lambda: 1
    items = items_of(model, optimizer, set())
    own = {item.partition(" of ")[::2]: value for item, value in items.items() if " of " in item}
    parameters = [f"{name}.weight in the optimizer", f"{name}.bias in the optimizer"]
    state = {(key, owner) for key in ("count", "mean") for owner in parameters}
    assert state == {pair for pair in own if pair[1] in parameters}
    assert {("a", f"0 of old of {owner}") for owner in parameters} <= own.keys()
    of_group = {pair[0]: value for pair, value in own.items() if pair[1] == "group 0 of the optimizer"}
    numbers = {key: value for key, value in optimizer.defaults.items() if value is not None}
    assert numbers.pop("betas") == tuple(own[str(i), "betas of group 0 of the optimizer"] for i in range(2))
    assert of_group == numbers


@pytest.mark.parametrize("shape", [None, (-1, 2)], ids=["plain", "hybrid"])
def test_collectives_and_python_do_not_grow_with_the_ranks(shape, monkeypatch):
    """The check with a difference in it, which is named; one rank of a process group that transfers nothing."""

    def counted(world):
        names = ("all_reduce", "broadcast_object_list", "all_gather_object")
        collectives, calls = dict.fromkeys(names, 0), 0

        def count(name, *_, **__):
            collectives[name] += 1

        def profile(frame, event, _):
            nonlocal calls
            calls += event == "call" and "ignite_monitor" in frame.f_code.co_filename

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        try:
            model = make_model()
            group = dist.group.WORLD
            if shape is not None:
                mesh = group = init_device_mesh("cpu", (world // 2, 2))
                for layer in (model[0], model[4]):
                    whole = DTensor.from_local(layer.weight.detach(), mesh, [Replicate(), Shard(0)], run_check=False)
                    layer.weight = nn.Parameter(whole)
            check = ReplicaCheckHandler(model, torch.optim.SGD(model.parameters(), lr=0.1), group=group)
            engine = Engine(lambda *_: None)
            check.attach(engine)
            with monkeypatch.context() as patch:
                for name in names:
                    patch.setattr(dist, name, partial(count, name))
                # As if the other ranks had another hash.
                real = handler.all_reduce
                patch.setattr(handler, "all_reduce", lambda values, **options: real(values, **options) + 1)
                patch.setattr(check.ranks, "gather", lambda value: [value])
                sys.setprofile(profile)
                try:
                    engine.run(range(3))
                finally:
                    sys.setprofile(None)
            assert engine.state.metrics == {"replicas/in_sync": 0.0}
        finally:
            dist.destroy_process_group()
        return collectives, calls

    (collectives, calls), other = counted(4), counted(16_384)
    assert other == (collectives, calls)
    assert collectives["all_reduce"] == 3 * (2 if shape is None else 4)
    assert calls < 20_000
