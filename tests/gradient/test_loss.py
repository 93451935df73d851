"""GradMonitor(loss=...): a step is a spike too where its loss is one."""

from __future__ import annotations

import copy
import logging
import math
from types import SimpleNamespace

import pytest
import torch
from ignite.engine import Engine, Events
from torch import nn

from ignite_monitor import (
    GradMonitor,
    MonitorEvents,
    StaticThreshold,
)
from ignite_monitor.gradient.loss import LossCollector
from tests._helpers import assert_same, make_step, mlp_batches, train, training_state
from tests._models import make_mlp
from tests._oracle import spikes_in_losses


def batches_of(count, spikes=(), seed=0):
    return mlp_batches(count, spikes, 20, seed=seed)


class Training:
    """A training that knows its losses."""

    def __init__(self, returns=lambda loss: loss, every=1, leaves_out=False, **arguments):
        self.model = make_mlp()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.every, self.losses = every, []
        arguments = {"threshold": StaticThreshold(1e9), "loss": lambda engine: returns(self.loss)} | arguments
        self.monitor = GradMonitor(self.model, self.optimizer, **arguments)

        self.step = make_step(
            self.model,
            self.optimizer,
            every=every,
            loss_of=self.part_of_loss,
            leave_out=lambda engine: leaves_out and engine.state.unhealthy_spike,
        )

    def part_of_loss(self, model, batch):
        self.loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        self.losses.append(float(self.loss.detach().double()))
        return self.loss / self.every


def expected(losses):
    """Return whether each step is a spike."""
    return [float(spike) for spike in spikes_in_losses(losses)[0]]


@pytest.mark.parametrize("returns", [lambda loss: loss, lambda loss: float(loss.detach())], ids=["tensor", "number"])
def test_a_loss_that_is_a_spike_makes_the_step_one(returns):
    training = Training(returns)
    recorder = train(training.step, batches_of(50, spikes=(30, 41, 42)), training.monitor)
    truth = expected(training.losses)
    assert [i for i, spike in enumerate(truth, 1) if spike] == [30, 41, 42]
    assert recorder.of("grad/loss_spike") == recorder.of("grad/spike") == truth
    assert recorder.flags == [bool(spike) for spike in truth]
    assert recorder.of("grad/spike_count") == [sum(truth[: i + 1]) for i in range(50)]
    assert float(training.monitor.state_dict()["detector"]["rule"]["count"]) == 50  # the norms were within their limit


def test_a_spike_of_the_loss_alone_names_the_loss(caplog):
    reported = []
    for threshold in (StaticThreshold(1e9), StaticThreshold(5.0)):
        training = Training(per_parameter=True, threshold=threshold)
        trainer = Engine(training.step)
        training.monitor.attach(trainer)
        trainer.add_event_handler(MonitorEvents.SPIKE_DETECTED, lambda engine: reported.append(engine.state.spike))
        with caplog.at_level(logging.WARNING):
            trainer.run(batches_of(30, spikes=(30,)))
        of_loss = torch.tensor(training.losses[29]).item()
        if threshold.value > 5:
            [spike] = reported
            assert (spike.name, spike.value) == ("grad/loss", pytest.approx(of_loss, rel=1e-6))
            assert max(training.losses[:29]) < spike.threshold < of_loss
            [record] = caplog.records
            text = f"loss {of_loss:.3g}, {of_loss / spike.threshold:.3g} x its threshold"
            assert record.getMessage().startswith(f"GradMonitor (grad): iteration 30: {text}")
        else:
            assert reported[-1].name == "grad/norm"


def test_the_mean_of_accumulated_micro_batches_is_compared_once_per_step():
    training = Training(every=3)
    recorder = train(training.step, batches_of(120, spikes=(91,)), training.monitor)
    means = [sum(training.losses[i : i + 3]) / 3 for i in range(0, 120, 3)]
    truth = expected(means)
    assert [i for i, spike in enumerate(truth) if spike] == [30]
    published = [value for i, value in enumerate(recorder.of("grad/loss_spike"), 1) if i % 3 == 0]
    assert published == truth


def test_the_losses_of_a_skipped_step_are_not_those_of_the_next():
    training = Training(leaves_out=True)
    recorder = train(training.step, batches_of(50, spikes=(30, 40)), training.monitor)
    assert recorder.of("grad/loss_spike") == expected(training.losses)
    rule = training.monitor.state_dict()["loss"]["rule"]
    assert float(rule["count"]) == 50


@pytest.mark.parametrize("spikes", [(101,), (101, 104)])
def test_iterations_that_are_not_monitored_end_an_accumulation(spikes):
    reported = []
    training = Training(every=2, on_spike=lambda *_: reported.append(training.losses[-1]))
    event = Events.ITERATION_STARTED(event_filter=lambda engine, i: i % 4 < 2)
    recorder = train(training.step, batches_of(110, spikes), training.monitor, event=event)
    assert [i for i, flag in enumerate(recorder.flags, 1) if flag] == [*spikes]
    assert reported == [training.losses[i - 1] for i in spikes]


def test_norm_and_loss_each_count():
    training = Training(threshold=StaticThreshold(5.0))
    recorder = train(training.step, batches_of(40, spikes=(5, 30)), training.monitor)
    # The loss is not compared yet at the first, a spike of the norm.
    assert [i for i, spike in enumerate(recorder.of("grad/spike"), 1) if spike] == [5, 30]
    assert recorder.of("grad/spike_count")[-1] == 2
    assert recorder.of("grad/loss_spike")[4] == 0


@pytest.mark.parametrize("on_spike", ["skip", "clip"])
def test_on_spike(on_spike):
    training, batches = Training(on_spike=on_spike), batches_of(40, spikes=(30,))
    recorder = train(training.step, batches, training.monitor)
    other = Training()
    train(other.step, [batch for i, batch in enumerate(batches, 1) if on_spike == "clip" or i != 30])
    # The norm is within its threshold: there is nothing to scale down to.
    assert_same(training_state(training.model, training.optimizer), training_state(other.model, other.optimizer))
    assert recorder.of("grad/skipped_count")[-1] == (on_spike == "skip")


def compared(monitor):
    """What the monitor compares of the losses, from now on."""
    values, detect = [], monitor._detector.detect

    def note(*arguments):
        detection = detect(*arguments)
        values.append(float(detection.loss.value.exp()))
        return detection

    monitor._detector.detect = note
    return values


def test_a_loss_that_no_backward_uses_is_none_of_the_step():
    training, used = Training(on_spike="skip"), []
    values = compared(training.monitor)

    def step(engine, batch):
        training.optimizer.zero_grad()
        loss = training.part_of_loss(training.model, batch)
        if engine.state.iteration == 30:
            training.loss = torch.tensor(math.inf)
            return
        loss.backward()
        used.append(training.losses[-1])
        training.optimizer.step()

    recorder = train(step, batches_of(50), training.monitor)
    assert values == pytest.approx(used, rel=1e-6)
    assert recorder.of("grad/spike_count")[-1] == 0


def test_the_loss_of_a_shared_backward_counts_for_the_model_that_steps():
    generator, discriminator, criterion = nn.Linear(2, 4), nn.Linear(4, 1), nn.BCEWithLogitsLoss()
    adversarial = [torch.optim.SGD(model.parameters(), lr=1e-2) for model in (generator, discriminator)]
    losses = {"generator": [], "discriminator": []}

    def step(engine, real):
        noise = torch.ones(3, 2) * engine.state.iteration
        for name, label in (("discriminator", 0.0), ("generator", 1.0)):
            for optimizer in adversarial:
                optimizer.zero_grad()
            made = generator(noise)
            logits = discriminator(made.detach() if name == "discriminator" else made)
            loss = criterion(logits, torch.full((3, 1), label))
            if name == "discriminator":
                loss = loss + criterion(discriminator(real), torch.ones(3, 1))
            engine.state.loss = loss.detach()
            loss.backward()
            losses[name].append(float(loss.detach().double()))
            adversarial[name == "discriminator"].step()

    engine = Engine(step)
    values = []
    for model, optimizer, name in zip((generator, discriminator), adversarial, losses, strict=True):
        monitor = GradMonitor(model, optimizer, loss=lambda engine: engine.state.loss, prefix=name, flag=name)
        values.append(compared(monitor))
        monitor.attach(engine)
    engine.run([torch.ones(3, 4) * i for i in range(4)], max_epochs=1)
    assert values[0] == pytest.approx(losses["generator"], rel=1e-6)
    assert values[1] == pytest.approx(losses["discriminator"], rel=1e-6)


@pytest.mark.parametrize("given", [False, True])
def test_a_loss_that_is_never_given_is_reported_once_and_not_published(given, caplog):
    training = Training(loss=lambda engine: 1.0 if given else None)
    with caplog.at_level(logging.WARNING):
        recorder = train(training.step, batches_of(50), training.monitor)
    assert recorder.of("grad/loss_spike") == [0.0 if given else None] * 50
    assert len([text for text in caplog.messages if "given as loss returned None" in text]) == (not given)


def test_a_rank_without_a_loss_of_its_own_misses_none():
    """The loss of the last stage counts for all."""
    ranks = SimpleNamespace(size=2, all_present=True, sum=lambda both: both + 2.0)
    losses = LossCollector(lambda engine: None, ranks)
    for _ in range(30):
        losses.backward_ended(None, shared=False)
        assert float(losses.mean(torch.device("cpu"))) == 1.0
        assert not losses.is_missing()


@pytest.mark.parametrize("part", ["detector", "loss", "per_parameter"])
def test_a_state_that_fails_to_load_changes_nothing(part):
    one, other = (Training(per_parameter=True) for _ in range(2))
    train(one.step, batches_of(30), one.monitor)
    train(other.step, batches_of(40, seed=1), other.monitor)
    before, state = copy.deepcopy(other.monitor.state_dict()), copy.deepcopy(one.monitor.state_dict())
    del state[part]["rule"]["mean"]
    with pytest.raises(ValueError, match="was it saved with another threshold rule"):
        other.monitor.load_state_dict(state)
    assert_same(other.monitor.state_dict(), before)
