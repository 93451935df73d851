"""Steps that are made outside the train step: the warning names the handler's event."""

from __future__ import annotations

import logging

import pytest
import torch
from ignite.engine import Engine, Events

from ignite_monitor import GradMonitor, WeightUpdateHandler
from tests._helpers import make_batches, make_model, same

TEXT = "made a step outside the train step"


def train(event, monitored, caplog, every=1, handler=None):
    """Train steps that sum losses up, and a handler that makes the step with them, as in reinforcement learning."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []

    def update():
        if losses:
            optimizer.zero_grad()
            torch.stack(losses).sum().backward()
            optimizer.step()
            losses.clear()

    def train_step(engine, batch):
        losses.append(model(batch[0]).square().mean())
        if event is None:
            update()

    trainer = Engine(train_step)
    for monitor in (GradMonitor(model, optimizer), WeightUpdateHandler(model, optimizer)) if monitored else ():
        monitor.attach(trainer, Events.ITERATION_STARTED(every=every) if every > 1 else Events.ITERATION_STARTED)
    if event is not None:
        trainer.add_event_handler(event, update)
    if handler is not None:
        trainer.add_event_handler(Events.EPOCH_COMPLETED, handler)
    with caplog.at_level(logging.WARNING):
        trainer.run(make_batches(4), max_epochs=3)
    return dict(model.state_dict()), [each.getMessage() for each in caplog.records if TEXT in each.getMessage()]


@pytest.mark.parametrize("event", [Events.EPOCH_COMPLETED, Events.ITERATION_COMPLETED, Events.ITERATION_STARTED])
@pytest.mark.parametrize("every", [1, 3])
def test_the_event_is_named_once(event, every, caplog):
    plain, _ = train(event, False, caplog)
    weights, said = train(event, True, caplog, every)
    assert same(weights, plain)
    assert len(said) == 1
    assert f"in a handler of {event.name}:" in said[0]


@pytest.mark.parametrize("every", [1, 3])
def test_steps_in_the_train_step_are_none(every, caplog):
    assert train(None, True, caplog, every)[1] == []


def test_another_model_s_step_in_a_handler_is_none_of_theirs(caplog):
    other = make_model()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)

    def step():
        other(torch.ones(3, 6)).sum().backward()
        optimizer.step()

    assert train(None, True, caplog, handler=step)[1] == []


def test_a_training_in_a_handler_of_another_that_has_monitors_itself(caplog):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(engine, batch):
        optimizer.zero_grad()
        model(batch[0]).square().mean().backward()
        optimizer.step()

    outer, inner = Engine(lambda engine, batch: None), Engine(train_step)
    GradMonitor(model, optimizer, prefix="outer", flag="outer").attach(outer)
    GradMonitor(model, optimizer).attach(inner)
    outer.add_event_handler(Events.EPOCH_COMPLETED, lambda: inner.run(make_batches(2)))
    with caplog.at_level(logging.WARNING):
        outer.run([0])
    assert not any(TEXT in each.getMessage() for each in caplog.records)
