"""Parameters in no optimizer, or without a gradient, are named; few names whatever the model."""

from __future__ import annotations

import pytest
import torch
from ignite.engine import Engine, Events
from torch import nn

from ignite_monitor import WeightUpdateHandler


class Net(nn.Module):
    """Blocks, the last of which is called when ``deep`` is set."""

    def __init__(self, blocks=3):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh()) for _ in range(blocks))
        self.head, self.spare = nn.Linear(4, 2), nn.Linear(4, 2)
        self.deep = True

    def forward(self, x):
        for block in self.blocks if self.deep else self.blocks[:-1]:
            x = block(x)
        return self.head(x)


def named(metrics):
    kinds = ("not_optimized", "no_gradient")
    return {key.removeprefix("monitor/"): value for key, value in metrics.items() if key.split("/")[1] in kinds}


def train(model, *optimizers, given=None, iterations=4, before=lambda iteration: None, state=None, start=0, **kwargs):
    """What is published in each iteration, and the handler."""

    def train_step(engine, batch):
        before(start + engine.state.iteration)
        model.zero_grad()
        model(batch).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    engine, published = Engine(train_step), []
    handler = WeightUpdateHandler(model, given, **kwargs)
    if state is not None:
        handler.load_state_dict(state)
    handler.attach(engine)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda _: published.append(named(engine.state.metrics)))
    engine.run([torch.randn(3, 4, generator=torch.Generator().manual_seed(0))] * iterations)
    return published, handler


def sgd(*modules):
    return torch.optim.SGD([each for module in modules for each in module.parameters()], lr=0.1)


def test_a_model_that_trains_whole_names_nothing():
    model = Net()
    del model.spare
    assert train(model, sgd(model))[0] == [{}] * 4


@pytest.mark.parametrize("given", [False, True])
def test_what_no_optimizer_holds_and_what_gets_no_gradient(given):
    model = Net()
    model.blocks[0].requires_grad_(False)
    optimizer = sgd(model.blocks[0], model.blocks[2], model.head, model.spare)
    published, _ = train(model, optimizer, given=optimizer if given else None)
    assert published[:2] == [{}, {}]
    expected = {
        **{f"not_optimized/blocks.1.{name}": 1.0 for name in ("0.weight", "0.bias", "1.weight", "1.bias")},
        **dict.fromkeys(("no_gradient/blocks.0.0", "no_gradient/blocks.0.1"), 2.0),
    }
    # Six have none: more than five names, so modules stand for them, each as deep as five allow.
    assert published[2:] == [expected | {"no_gradient/spare.weight": 1.0, "no_gradient/spare.bias": 1.0}] * 2


def test_few_names_whatever_the_model():
    model = Net(blocks=40)
    optimizer = sgd(model.head)
    published, _ = train(model, optimizer, top_k=2)
    assert published[-1] == {"not_optimized/blocks": 160.0, "not_optimized/spare": 2.0}
    assert train(model, optimizer, top_k=1)[0][-1] == {"not_optimized/blocks": 160.0}
    assert train(model, optimizer, top_k=0)[0][-1] == {}


def test_two_optimizers_are_both_seen_whichever_is_given():
    model = Net()
    del model.spare
    first, second = sgd(model.blocks), sgd(model.head)
    for given in (None, first, second):
        assert train(model, first, second, given=given)[0][-1] == {}


def test_one_gradient_is_enough():
    model = Net()
    del model.spare
    model.deep = False

    def before(iteration):
        model.deep = iteration == 4

    published, _ = train(model, sgd(model), iterations=6, before=before)
    assert [len(each) for each in published] == [0, 0, 4, 0, 0, 0]


def test_unfreezing_and_adding_to_the_optimizer():
    model = Net()
    del model.spare
    optimizer = sgd(model.head)

    def before(iteration):
        if iteration == 5:
            optimizer.add_param_group({"params": list(model.blocks.parameters())})

    published, _ = train(model, optimizer, given=optimizer, iterations=6, before=before)
    assert [sum(each.values()) for each in published] == [0, 0, 12, 12, 0, 0]


def test_a_resumed_run_names_what_the_whole_one_does():
    def before(iteration):
        model.deep = iteration == 1

    model = Net()
    whole, _ = train(model, sgd(model), iterations=6, before=before)
    model = Net()
    first, handler = train(model, sgd(model), iterations=2, before=before)
    second, _ = train(model, sgd(model), iterations=4, before=before, state=handler.state_dict(), start=2)
    assert first + second == whole
    assert whole[-1] == {"no_gradient/spare.weight": 1.0, "no_gradient/spare.bias": 1.0}


def test_a_checkpoint_from_before_still_loads():
    _, handler = train(Net(), sgd(model := Net()), iterations=1)
    state = handler.state_dict()
    del state["untrained"]
    WeightUpdateHandler(model).load_state_dict(state)
    with pytest.raises(TypeError, match="untrained"):
        handler.load_state_dict(state | {"untrained": {"steps": 1}})
