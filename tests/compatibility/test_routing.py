"""Shares of experts are those of the indices that the experts themselves are called with."""

from __future__ import annotations

import math

import pytest
import torch
from ignite.engine import Engine

from ignite_monitor import RoutingHandler
from tests._helpers import assert_same
from tests.compatibility._cases import CASES, MIXTURES

pytestmark = [pytest.mark.compatibility, pytest.mark.filterwarnings("ignore")]


def train(name, watched):
    """Train one iteration of three micro-batches; return weights, published values and counts per layer."""
    case = CASES[f"transformers {name}"]
    torch.manual_seed(0)
    model = case.make().train()
    for tensor in (*model.parameters(), *(b for key, b in model.named_buffers() if key.endswith("correction_bias"))):
        torch.nn.init.normal_(tensor, std=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    counts = {}

    def count(key):
        def hook(module, args, kwargs):
            chosen = kwargs.get("top_k_index", args[1] if len(args) > 1 else None)
            experts = module.num_experts
            if name == "SwitchTransformers":
                own = chosen.reshape(-1, experts).sum(0).tolist()
            else:
                own = [chosen.flatten().tolist().count(i) for i in range(experts)]
            counts[key] = [a + b for a, b in zip(own, counts.get(key, [0] * experts), strict=True)]

        return hook

    for key, module in model.named_modules():
        if key.endswith(".experts"):
            module.register_forward_pre_hook(count(key), with_kwargs=True)

    def train_step(engine, parts):
        optimizer.zero_grad()
        for part in parts:
            case.loss(model(**part)).backward()
        optimizer.step()

    engine = Engine(train_step)
    handler = RoutingHandler(model)
    if watched:
        handler.attach(engine)
    engine.run([[case.batch() for _ in range(3)]], max_epochs=1)
    return dict(model.state_dict()), dict(handler.metrics), counts


@pytest.mark.parametrize("name", MIXTURES)
def test_load_of_experts(name):
    pytest.importorskip("transformers")
    weights, published, counts = train(name, watched=True)
    assert_same(weights, train(name, watched=False)[0])
    assert counts
    assert len(published) == 5 * len(counts)
    for key, own in counts.items():
        shares = [count / sum(own) for count in own]
        place = key.removesuffix("experts")
        (router,) = [name for name in (f"{place}gate", f"{place}router") if f"routing/margin/{name}" in published]
        entropy = -sum(share * math.log(share) for share in shares if share)
        expected = {"load_entropy": math.exp(entropy) / len(own), "max_share": max(shares)}
        expected["dead_share"] = own.count(0) / len(own)
        assert {kind: published[f"routing/{kind}/{router}"] for kind in expected} == pytest.approx(expected, rel=1e-12)
