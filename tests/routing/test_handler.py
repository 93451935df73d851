"""Shares of experts and margins are those counted by hand, whatever the train step does."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ignite_monitor import RoutingHandler
from ignite_monitor.model.isolation import isolated_pass
from ignite_monitor.routing.decisions import routing_sums, routing_values
from tests._helpers import in_turn, make_step, run_monitored, square_loss
from tests._models import Lambda

EXPERTS, K = 5, 2
DURING = ("evaluation", "reference")  # other passes than those of training


class Mixture(nn.Module):
    def __init__(self, k: int = K) -> None:
        super().__init__()
        self.k = k
        self.gate = nn.Linear(4, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(EXPERTS))
        self.chosen: list[torch.Tensor] = []

    def forward(self, x):
        weights, indices = self.gate(x).topk(self.k)
        self.chosen.append(indices)
        outputs = torch.stack([expert(x) for expert in self.experts], -2)
        return (
            weights.softmax(-1).unsqueeze(-1) * outputs.gather(-2, indices.unsqueeze(-1).expand(*indices.shape, 4))
        ).sum(-2)


class Model(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(Mixture(**options), nn.Tanh(), Mixture(**options))

    def forward(self, x):
        return self.blocks(x)


def router_class(name: str, forward) -> type[nn.Module]:
    """A class as transformers has them, which returns what is given."""
    return type(name, (nn.Module,), {"forward": forward, "__module__": "transformers.models.some"})


def train_step(model, parts=1, before=lambda batch: None):
    step = make_step(model, torch.optim.SGD(model.parameters(), lr=0.1), parts, loss_of=square_loss)
    return in_turn(lambda _, batch: before(batch), step)


def batches(count=3, rows=12):
    return list(torch.randn(count, rows, 3, 4, generator=torch.Generator().manual_seed(1)))


def counted(indices, logits):
    """The values of a layer in plain Python, from all its chosen experts and logits."""
    counts = [0] * logits.shape[1]
    margins = []
    for chosen, row in zip(indices.tolist(), logits.double().tolist(), strict=True):
        for i in chosen:
            counts[i] += 1
        others = [value for i, value in enumerate(row) if i not in chosen]
        if chosen and others:
            margins.append(min(row[i] for i in chosen) - max(others))
    shares = np.array(counts) / sum(counts)
    entropy = -sum(share * math.log(share) for share in shares if share)
    values = {"load_entropy": math.exp(entropy) / len(counts), "max_share": max(shares)}
    values |= {"dead_share": counts.count(0) / len(counts), "logit_max": float(logits.max())}
    return values | ({"margin": float(np.mean(margins))} if margins else {})


def of_layer(row, layer):
    return {name.split("/")[1]: value for name, value in row.items() if name.endswith(f"/{layer}")}


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_are_those_counted_by_hand(parts, dtype):
    model = Model().to(dtype)
    seen = {name: ([], module.chosen) for name, module in model.named_modules() if isinstance(module, Mixture)}
    for name, (logits, _) in seen.items():
        model.get_submodule(f"{name}.gate").register_forward_hook(lambda m, a, out, kept=logits: kept.append(out))
    expected = []

    def count():
        for name, (logits, chosen) in seen.items():
            expected.append((name, counted(torch.cat(chosen).flatten(0, 1), torch.cat(logits).detach().flatten(0, 1))))
            logits.clear(), chosen.clear()

    step = train_step(model, parts)
    rows = run_monitored(
        lambda engine, batch: (step(engine, batch.to(dtype)), count()),
        batches(),
        RoutingHandler(model, routers="gate$", top_k=K),
    )
    for place, (name, values) in enumerate(expected):
        assert of_layer(rows[place // 2], f"{name}.gate") == pytest.approx(values, rel=1e-12), name
    assert len(expected) == 6


def test_evaluation_passes_and_recomputations_are_not_counted():
    def published(passes):
        model = Model()
        handler = RoutingHandler(model, routers="gate$", top_k=K)

        def evaluate(batch):
            model.eval()
            model(batch + 1)
            model.train()

        def compare(batch):
            with isolated_pass(model, []):
                model(batch + 1)

        blocks = model.blocks
        options = {"use_reentrant": passes == "reentrant"}

        def forward(x):
            x = x.requires_grad_()
            first = blocks(x + 1) if passes in (None, *DURING) else checkpoint(blocks, x + 1, **options)
            return first + blocks(x)  # counted once too

        model.forward = forward
        if passes in DURING:
            before = evaluate if passes == "evaluation" else compare
            return run_monitored(train_step(model, before=before), batches(), handler)
        return run_monitored(train_step(model), batches(), handler)

    expected = published(None)
    assert len(expected[0]) == 10
    for passes in (*DURING, "reentrant", "not reentrant"):
        assert published(passes) == expected, passes


def test_compiled_models_are_measured():
    model, compiled = Model(), Model()
    expected = run_monitored(train_step(model), batches(), RoutingHandler(model, routers="gate$", top_k=K))
    wrapped = torch.compile(compiled, backend="eager")
    wrapped(batches()[0])
    result = run_monitored(train_step(wrapped), batches(), RoutingHandler(wrapped, routers="gate$", top_k=K))
    assert [row == pytest.approx(other) for row, other in zip(result, expected, strict=True)] == [True] * 3


def test_routers_of_transformers_report_the_experts_that_they_chose():
    """A bias for the choice alone, or groups of experts: the k largest logits are not what was chosen."""
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 4.0], [5.0, 1.0, 1.0, 0.0]])
    indices = torch.tensor([[0, 3], [3, 0], [0, 1]])
    weight = torch.ones(1)

    model = Lambda(
        lambda self, x: (self.top(self.scale), self.one(self.scale)) and x * self.scale,
        scale=nn.Parameter(torch.ones(())),
        top=router_class("SomeTopkRouter", lambda self, x: (x * logits, x, indices))(),
        one=router_class("SomeTop1Router", lambda self, x: (x * logits, x, indices))(),
    )
    (row,) = run_monitored(train_step(model), [weight], RoutingHandler(model))
    assert of_layer(row, "top") == pytest.approx(counted(indices, logits))
    assert row["routing/margin/top"] == pytest.approx((-2 - 2 + 0) / 3)
    assert not of_layer(row, "one")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probabilities_are_not_taken_for_logits(dtype):
    """Routers of transformers 5.2 return the softmax of their logits; a router of zeros returns logits."""

    def softmax(self, x):
        probabilities = (x * 40).softmax(-1).to(dtype)
        return probabilities, probabilities.topk(2).values, probabilities.topk(2).indices

    model = Lambda(
        lambda self, x: (self.some(x.flatten(0, 1) * self.scale), self.zeros(x.flatten(0, 1)), x * self.scale)[2],
        scale=nn.Parameter(torch.ones(())),
        some=router_class("SomeTopKRouter", softmax)(),
        zeros=router_class("ZeroTopKRouter", lambda self, x: (0 * x, x, (0 * x).topk(1).indices))(),
    )
    rows = run_monitored(train_step(model), batches(), RoutingHandler(model))
    for row in rows:
        assert of_layer(row, "some").keys() == {"load_entropy", "max_share", "dead_share"}
        assert row["routing/logit_max/zeros"] == row["routing/margin/zeros"] == 0.0


def test_all_experts_chosen_have_no_margin():
    handler = RoutingHandler(model := Model(k=EXPERTS), routers="gate$", top_k=EXPERTS)
    (row,) = run_monitored(train_step(model), batches(1), handler)
    assert of_layer(row, "blocks.0.gate").keys() == {"load_entropy", "max_share", "dead_share", "logit_max"}
    assert row["routing/load_entropy/blocks.0.gate"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("logits", "indices"),
    [
        ([3.0, 2.0, 1.0], [[0, 3]]),
        ([3.0, 2.0, 1.0], [[0, -1]]),
        ([3.0, 2.0, 1.0], [[1, 1]]),
        ([3.0, math.nan, 1.0], [[0, 2]]),
    ],
    ids=["too large", "negative", "twice", "NaN"],
)
def test_a_choice_that_is_not_known_has_no_values(logits, indices):
    logits = torch.tensor([logits])
    sums, largest = routing_sums(logits, torch.tensor(indices))
    expected = [math.nan] * 3 + [float(logits.max()), math.nan]
    assert routing_values(sums, largest).tolist() == pytest.approx(expected, nan_ok=True)


def test_modules_that_return_no_logits_are_not_reported(caplog):
    class Changing(nn.Linear):
        def forward(self, x):
            logits = super().forward(x)
            return logits if x.mean() > 0 else logits[..., :3]

    def tuple_of(choice):
        return router_class("TupleTopKRouter", lambda self, x: (x, x, choice))()

    model = Model()
    model.blocks[0].experts[0] = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 4))  # fewer than top_k
    model.blocks.extend([nn.LSTM(4, 4), router_class("TupleTopKRouter", lambda self, x: x[0])(), Changing(4, 6)])
    model.blocks.extend([tuple_of(None), tuple_of(torch.ones(9, 1)), tuple_of(torch.ones(2, 1, dtype=torch.long))])
    data = torch.randn(2, 1, 3, 4)
    model.blocks.forward = lambda x: (
        torch.cat([model.blocks[5](part)[..., :3] for part in (x.abs(), -x.abs())]),
        [model.blocks[i](x) for i in (6, 7, 8)],
        model.blocks[4](model.blocks[3](x.flatten(0, 1))),
        model.blocks[2](model.blocks[0](x)),
    )[3]
    handler = RoutingHandler(model, routers=r"^blocks\.0\.experts\.0\.0|^blocks\.[345678]|2.gate$", top_k=2)
    rows = run_monitored(train_step(model), data, handler)
    assert {name.split("/")[2] for row in rows for name in row} == {"blocks.2.gate"}
    assert caplog.messages == [
        "RoutingHandler (routing): iteration 1: nothing is reported of modules that do not return a plain tensor of "
        "logits over top_k or more experts: blocks.0.experts.0.0, blocks.3, blocks.4, blocks.5, blocks.6, blocks.7, "
        "blocks.8"
    ]
    caplog.clear()
    run_monitored(train_step(model), data, RoutingHandler(model, routers=r"^blocks\.3", top_k=1))
    assert len(caplog.messages) == 1


def test_an_iteration_without_a_router_is_reported_once(caplog):
    model = Model()
    run_monitored(lambda engine, batch: None, batches(), RoutingHandler(model, routers="gate$", top_k=K))
    assert caplog.messages == ["RoutingHandler (routing): iteration 1: no tokens were routed in training mode"]


def test_a_model_without_routers_is_refused():
    with pytest.raises(ValueError, match="Argument routers matched no router"):
        RoutingHandler(Model())
    own = type("OwnTopKRouter", (nn.Linear,), {})(4, 4)
    with pytest.raises(ValueError, match="Argument routers matched no router"):
        RoutingHandler(nn.Sequential(own))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"routers": "door", "top_k": 1}, ValueError, "given 'door'"),
        ({"routers": "(", "top_k": 1}, ValueError, "routers should be a regular expression"),
        ({"routers": 3, "top_k": 1}, TypeError, "routers should be a regular expression"),
        ({"routers": "gate"}, ValueError, "routers and top_k should be given together"),
        ({"routers": "gate", "top_k": 0}, ValueError, "top_k should be at least 1"),
    ],
)
def test_arguments(options, error, text):
    with pytest.raises(error, match=text):
        RoutingHandler(Model(), **options)
