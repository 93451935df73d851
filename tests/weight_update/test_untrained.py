"""One warning names parameters in no optimizer, or without a gradient."""

from __future__ import annotations

import pytest
import torch
from ignite.engine import Engine
from torch import nn

from ignite_monitor import WeightUpdateHandler
from tests._helpers import in_turn, make_step, square_loss
from tests._models import Lambda


def make_net(blocks=2, spare=True):
    """Blocks, the last of which may be skipped, and a layer that is not used."""

    def forward(self, x):
        for block in self.blocks if self.deep else self.blocks[:-1]:
            x = block(x)
        return self.head(x)

    layers = {"blocks": nn.ModuleList(nn.Linear(4, 4) for _ in range(blocks)), "head": nn.Linear(4, 2)}
    return Lambda(forward, deep=True, **layers, **({"spare": nn.Linear(4, 2, bias=False)} if spare else {}))


def warnings(caplog, model, *optimizers, given=None, iterations=5, deep=lambda iteration: True, patience=3):
    """The warnings, and the iteration in which the first came."""
    caplog.clear()
    first = []

    def start(engine, batch):
        model.deep = deep(engine.state.iteration)
        if not first and caplog.messages:
            first.append(engine.state.iteration - 1)

    engine = Engine(in_turn(start, make_step(model, optimizers, loss_of=square_loss)))
    with WeightUpdateHandler(model, given, frozen_patience_steps=patience).attach(engine):
        engine.run([torch.randn(3, 4)] * iterations)
    return [text for text in caplog.messages if "do not learn" in text], first


def sgd(*modules):
    return torch.optim.SGD([item for module in modules for item in module.parameters()], lr=0.1)


def test_a_model_that_trains_whole_is_not_reported(caplog):
    model = make_net(spare=False)
    first, second = sgd(model.blocks), sgd(model.head)
    for given in (None, first, second):
        assert warnings(caplog, model, first, second, given=given) == ([], [])


@pytest.mark.parametrize("patience", [1, 3])
@pytest.mark.parametrize("given", [False, True])
def test_one_warning_names_both_kinds(caplog, given, patience):
    model = make_net()
    model.blocks[0].requires_grad_(False)  # on purpose
    optimizer = sgd(model.blocks[0], model.head, model.spare)
    given = optimizer if given else None
    texts, first = warnings(caplog, model, optimizer, given=given, patience=patience)
    assert len(texts) == 1
    assert first == [patience]
    assert "in no optimizer that has made a step: blocks.1.weight, blocks.1.bias;" in texts[0]
    assert texts[0].endswith("without a gradient so far: spare.weight")


def test_long_lists_are_cut(caplog):
    model = make_net(blocks=40, spare=False)
    (text,), _ = warnings(caplog, model, sgd(model.head))
    assert text.count("blocks.") == 10
    assert text.endswith("and 70 more")


def test_one_gradient_is_enough(caplog):
    model = make_net(spare=False)
    assert warnings(caplog, model, sgd(model), deep=lambda iteration: iteration == 2) == ([], [])
    assert len(warnings(caplog, model, sgd(model), deep=lambda iteration: iteration == 4)[0]) == 1
