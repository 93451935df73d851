"""RCCHandler on models whose own code goes beside the modules' calls: functions that they keep, hooks, lent weights."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ignite_monitor import RCCHandler
from ignite_monitor.scaling import AlignmentHandler
from tests._helpers import assert_same, make_step, same, square_loss
from tests._models import FrozenEncoder, Lambda
from tests._truth import rcc
from tests.rcc._runs import measure, perturb

# Weights that are lent for a call


def make_hyper():
    """The weights of one layer are made by another one."""

    def forward(self, x):
        weight = self.make(self.z).view(16, 8)
        return self.head(functional_call(self.base, {"weight": weight}, (x,)))

    layers = {"make": nn.Linear(4, 128), "base": nn.Linear(8, 16), "head": nn.Linear(16, 2)}
    return Lambda(forward, **layers, z=nn.Parameter(torch.randn(4)))


@pytest.mark.parametrize("size", [0.0, 0.1])
@pytest.mark.parametrize("monitor", [RCCHandler, AlignmentHandler])
def test_a_layer_whose_weights_are_lent_is_skipped(monitor, size, caplog):
    torch.manual_seed(0)
    model, x = make_hyper(), torch.randn(6, 8)
    handler = monitor(model)
    start = copy.deepcopy(model).double()
    if size:
        perturb(model, size)
    result = measure(handler, [x, x])
    assert not [name for name in result if "/base" in name]
    assert [record.getMessage().partition("iteration 1: ")[2] for record in caplog.records] == [
        "base is not compared: its weights are given in its call, as torch.func.functional_call does it"
    ]
    if monitor is RCCHandler:
        moved = copy.deepcopy(model).double()
        with torch.no_grad():
            x0, x1 = (F.linear(x.double(), m.make(m.z).view(16, 8), m.base.bias) for m in (start, moved))
        drift = F.linear(x1 - x0, start.head.weight).norm(dim=-1).mean()
        assert result["rcc/input_drift/head"] == pytest.approx(float(drift.detach()), rel=1e-4, abs=1e-7)
        assert result["rcc/weight_update_max"] == pytest.approx(
            max(value for name, value in result.items() if name.startswith("rcc/weight_update/"))
        )


def test_the_whole_model_may_be_called_with_lent_weights(caplog):
    """They are the model's of that pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    x, other = torch.randn(4, 6), copy.deepcopy(model)
    perturb(other)
    handler = RCCHandler(model)
    result = {}
    engine = Engine(lambda *_: functional_call(model, dict(other.named_parameters()), (x,)))
    handler.attach(engine)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda e: result.update(e.state.metrics))
    engine.run([0])
    expected = rcc(other, model, [x])
    assert {name: float(value) for name, value in result.items()} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert caplog.records == []


# Hooks of the user's


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 3))


def in_place(module, args, output):
    output.mul_(2)


def in_place_before(module, args):
    args[0].add_(1)


CHANGING = {
    "output": lambda module: module.register_forward_hook(lambda m, args, output: 2 * output),
    "output in place": lambda module: module.register_forward_hook(in_place),
    "input": lambda module: module.register_forward_pre_hook(lambda m, args: (args[0] + 1,)),
    "input alone": lambda module: module.register_forward_pre_hook(lambda m, args: args[0] + 1),
    "input in place": lambda module: module.register_forward_pre_hook(in_place_before),
    "keywords": lambda module: module.register_forward_pre_hook(
        lambda m, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True
    ),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("hook", CHANGING)
@pytest.mark.parametrize("make", [RCCHandler, AlignmentHandler])
def test_with_hooks_that_a_copy_is_without_all_is_absent(make, hook, when, caplog):
    model, x = net(), torch.randn(7, 6)
    counterpart = copy.deepcopy(model)
    if when == "before":
        CHANGING[hook](model[2])
    handler = make(model)
    if when == "after":
        CHANGING[hook](model[2])
    CHANGING[hook](counterpart[2])
    perturb(model)
    perturb(counterpart)
    assert measure(handler, [x, x]) == {}
    assert_same(model(x), counterpart(x))
    reported = [record.getMessage() for record in caplog.records if "is without it" in record.getMessage()]
    assert len(reported) == 1
    assert "2 has a forward hook, and the reference, a copy of the model, is without it" in reported[0]
    assert [len(item._forward_hooks) + len(item._forward_pre_hooks) for item in model] == [0, 0, 1, 0]


@pytest.mark.parametrize("hook", CHANGING)
def test_a_reference_with_the_same_hooks_is_right(hook):
    """Only the layer itself counts, without its hooks."""
    model, x = net(), torch.randn(7, 6)
    reference = copy.deepcopy(model)
    perturb(model)
    handler = RCCHandler(model, reference=reference)
    actual, references = copy.deepcopy(model).double(), copy.deepcopy(reference).double()
    for item in (model, reference, actual, references):
        CHANGING[hook](item[2])
    result = measure(handler, [x])
    inputs = {}
    for which, item in (("now", actual), ("then", references)):
        item[3].register_forward_pre_hook(lambda m, args, which=which: inputs.__setitem__(which, args[0].detach()))
        item(x.double())
    drift = F.linear(inputs["now"] - inputs["then"], references[3].weight).norm(dim=-1).mean()
    update = (
        F.linear(inputs["now"], actual[3].weight - references[3].weight) + actual[3].bias - references[3].bias
    ).norm(dim=-1)
    assert result["rcc/input_drift/3"] == pytest.approx(float(drift.detach()), rel=1e-4)
    assert result["rcc/weight_update/3"] == pytest.approx(float(update.mean().detach()), rel=1e-4)


# Layers that are not compared


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_frozen_encoder_keeps_its_fast_path(caplog):
    outcomes = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = FrozenEncoder(8, torch.arange(5).expand(4, 5) > 2).train()
        optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)

        engine, losses = Engine(make_step(model, optimizer, loss_of=square_loss)), []
        if watched:
            handler = RCCHandler(model)
            handler.attach(engine)
        engine.add_event_handler(Events.ITERATION_COMPLETED, lambda e, losses=losses: losses.append(e.state.output))
        engine.run([torch.randn(4, 5, 8) for _ in range(3)])
        outcomes.append([losses, dict(model.state_dict())])
    assert same(*outcomes)
    assert {name.split("/")[2] for name in handler.metrics if name.count("/") > 1} == {"head"}
    assert caplog.text.count("in a frozen nn.TransformerEncoderLayer") == 1


class Routed(nn.Module):
    """An expert gets the rows that a router chooses."""

    def __init__(self):
        super().__init__()
        self.router, self.expert, self.head = nn.Linear(8, 1), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        rows = (self.router(x) > 0).flatten()
        return self.head(x.index_put((rows.nonzero().flatten(),), self.expert(x[rows])))


def test_a_routed_expert_is_warned_of_once(caplog):
    torch.manual_seed(0)
    model = Routed()
    handler = RCCHandler(model)
    for seed in range(20):
        perturb(model, 0.3, seed)
        result = measure(handler, [torch.randn(32, 8)])
    assert not [name for name in result if name.endswith("/expert")]
    assert "rcc/weight_update/head" in result
    assert len(caplog.records) == 1
    assert "expert is not compared: its tensors are" in caplog.text


def test_a_layer_is_not_compared_with_one_of_another_shape():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    handler = RCCHandler(model)
    model[1] = nn.Linear(4, 3)
    layers = {name.split("/")[-1] for name in measure(handler, [torch.randn(2, 4)])}
    assert "0" in layers
    assert "1" not in layers


def selective():
    """Contexts of a checkpoint that keeps every result, in the order of the operations."""
    return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_SAVE)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("options", [{}, {"context_fn": selective}])
def test_a_checkpoint_does_not_see_the_reference(options, whole):
    rerun = functools.partial(checkpoint, use_reentrant=False, **options)
    block = Lambda(
        lambda self, x: self.attention(self.linear(x), x, x)[0],
        linear=nn.Linear(4, 4),
        attention=nn.MultiheadAttention(4, 2),
    )
    model = Lambda(
        lambda self, x: self.block(x) if whole else rerun(self.block, self.first(x)), first=nn.Linear(4, 4), block=block
    )
    initial, states = copy.deepcopy(model.state_dict()), []
    for monitored in (False, True):
        model.load_state_dict(initial)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        call = functools.partial(rerun, model) if whole else model
        engine = Engine(make_step(model, optimizer, loss_of=lambda _, x, call=call: square_loss(call, x)))
        if monitored:
            RCCHandler(model).attach(engine)
        engine.run([torch.full((5, 3, 4), value) for value in (1.0, 2.0, 3.0)])
        states.append(dict(model.state_dict()))
    assert same(*states)
    assert [name for name in engine.state.metrics if "/block.linear" in name]
