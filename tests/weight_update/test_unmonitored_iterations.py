"""Frozen is said of no parameter that moves only where nobody looks: in iterations that are not monitored."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import nn

from ignite_monitor import WeightUpdateHandler

SIZE = 2000  # elements, more than are sampled


class Tasks(nn.Module):
    """A table for each task, of a dtype, and one that no loss depends on."""

    def __init__(self, dtype=torch.float32, size=6):
        super().__init__()
        random = torch.Generator().manual_seed(3)
        for name in ("even", "odd", "unused"):
            values = torch.randn(size, 2, dtype=torch.float64, generator=random)
            setattr(self, name, nn.Parameter(torch.view_as_complex(values) if dtype.is_complex else values.to(dtype)))


def one_optimizer(model):
    return [torch.optim.SGD(model.parameters(), lr=0.25)]


def two_optimizers(model):
    first, second = torch.optim.SGD([model.even, model.unused], lr=0.25), torch.optim.SGD([model.odd], lr=0.125)
    return [first, second]


class Training:
    """In every iteration all optimizers step; the tables whose turn it is not have gradients of 0."""

    def __init__(self, model, optimizers, every, sparse=False, steps_of_odd=lambda iteration: True, **options):
        self.model, self.optimizers, self.engine = model, optimizers, Engine(self.step)
        self.every, self.sparse, self.steps_of_odd, self.seen = every, sparse, steps_of_odd, []
        self.handler = WeightUpdateHandler(model, **options)
        self.handler.attach(self.engine, Events.ITERATION_STARTED(every=every))
        self.engine.add_event_handler(Events.ITERATION_COMPLETED(every=every), self.see)

    def step(self, engine, batch):
        turn = engine.state.iteration % self.every == 0
        for name, active in (("even", turn), ("odd", not turn and self.steps_of_odd(engine.state.iteration))):
            table = getattr(self.model, name)
            table.grad = torch.zeros_like(table)
            if active and self.sparse:  # 12 of its rows
                table.grad = None
                F.embedding(batch % len(table), table, sparse=True).sum().backward()
            elif active:
                table.grad += 1
        self.model.unused.grad = torch.zeros_like(self.model.unused)
        for optimizer in self.optimizers:
            optimizer.step()

    def see(self, engine):
        frozen = {name for name, item in self.handler.diagnostics.items() if item.is_frozen}
        assert engine.state.metrics["monitor/frozen_count"] == len(frozen)
        self.seen.append(frozen)

    def run(self, iterations):
        self.engine.run(torch.randint(SIZE, (100, 12)), max_epochs=1, epoch_length=iterations)
        return self


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("make", [one_optimizer, two_optimizers])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64], ids=str
)
@pytest.mark.parametrize("size", [6, SIZE])
def test_a_table_that_moves_between_monitored_iterations_is_not_frozen(every, make, dtype, size, caplog):
    model = Tasks(dtype, size)
    caplog.set_level(logging.INFO, "ignite_monitor")
    run = Training(model, make(model), every, frozen_patience_steps=2).run(6 * every)
    (message,) = caplog.messages
    assert message.endswith(": unused")
    late = int(size == SIZE)  # no sample is enough
    assert run.seen == [set()] * (1 + late) + [{"unused"}] * (5 - late)


@pytest.mark.parametrize("every", [2, 3])
def test_sparse_gradients_of_few_rows_in_unmonitored_iterations(every):
    model = Tasks(size=SIZE)
    run = Training(model, one_optimizer(model), every, sparse=True).run(8 * every)
    assert run.seen[-1] == {"unused"}
    assert not any("odd" in frozen for frozen in run.seen)


@pytest.mark.parametrize("size", [6, SIZE])
def test_one_unit_in_the_last_place_of_one_element_is_a_move(size):
    """Also one that no optimizer makes, as in a target network, and after which the norm in float32 is the same."""
    model = Tasks(size=size)
    run = Training(model, one_optimizer(model), 2, frozen_patience_steps=2, steps_of_odd=lambda _: False)

    @run.engine.on(Events.ITERATION_COMPLETED(every=5))
    @torch.no_grad()
    def change(_):
        element = model.odd.view(-1)[-1:]
        element.copy_(element.nextafter(torch.tensor(9.0)))

    run.run(20)
    late = int(size == SIZE)
    # Monitored are 2, 4, 6 …; moved after 5, 10, 15 and 20.
    moved_before = [False, False, True, False, False, True, False, True, False, False]
    count, expected = 0, []
    for number, moved in enumerate(moved_before):
        count = 0 if number < late else count * (not moved) + 1
        expected.append(count >= 2)
    assert ["odd" in frozen for frozen in run.seen] == expected


def test_moves_beside_monitored_iterations_without_a_step_count():
    """Iteration 6 is monitored, and has neither a step nor a gradient: it takes no part."""
    model = Tasks()
    run = Training(model, one_optimizer(model), 2, frozen_patience_steps=2)
    step = run.engine._process_function
    run.engine._process_function = lambda engine, batch: None if engine.state.iteration == 6 else step(engine, batch)
    run.engine.remove_event_handler(run.see, Events.ITERATION_COMPLETED)
    frozen = []
    run.engine.add_event_handler(
        Events.ITERATION_COMPLETED(every=2), lambda _: frozen.append(run.handler.diagnostics["odd"].is_frozen)
    )
    run.run(12)
    assert frozen == [False] * 6


@pytest.mark.parametrize("moves", [True, False])
def test_a_resumed_run_counts_on_unless_the_parameter_has_moved(moves):
    """A run to iteration 5, of which 2 and 4 are monitored, and its continuation in 6."""
    model = Tasks()
    still = lambda iteration: moves and iteration == 5  # noqa: E731
    first = Training(model, one_optimizer(model), 2, steps_of_odd=still).run(5)
    other = Tasks()
    other.load_state_dict(model.state_dict())
    second = Training(other, one_optimizer(other), 2, steps_of_odd=still)
    second.handler.load_state_dict(first.handler.state_dict())
    second.engine.load_state_dict({"iteration": 5, "max_epochs": 1, "epoch_length": 6})
    second.engine.run(torch.randint(SIZE, (100, 12)))
    assert second.seen == [{"unused"} if moves else {"odd", "unused"}]


def test_between_two_runs_weights_may_move():
    model = Tasks()
    run = Training(model, one_optimizer(model), 1, frozen_patience_steps=3).run(2)
    with torch.no_grad():
        model.odd[0, 0] += 1
    run.engine.state.epoch = 0
    run.run(2)
    assert run.seen[-1] == {"unused"}


def test_with_a_threshold_the_steps_between_count_together():
    """Steps of a 10,000th of the norm in each iteration, of which one of 2 or 20 is monitored."""

    def frozen(every):
        model = nn.ParameterDict({"slow": nn.Parameter(torch.ones(4, dtype=torch.float64)), "fast": torch.ones(4)})
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

        def step(engine, batch):
            model["slow"].grad, model["fast"].grad = torch.ones(4).double(), 1e4 * torch.ones(4)
            optimizer.step()

        engine = Engine(step)
        handler = WeightUpdateHandler(model, frozen_update_ratio_threshold=1e-3)
        handler.attach(engine, Events.ITERATION_STARTED(every=every))
        engine.run(range(4 * every))
        return {name for name, item in handler.diagnostics.items() if item.is_frozen}

    assert (frozen(2), frozen(20)) == ({"slow"}, set())


def test_an_optimizer_without_parameters_for_a_while_ends_neither_training_nor_measuring():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    head, body = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)

    def train_step(engine, batch):
        if engine.state.iteration in (4, 5):  # without a backward
            return
        model.zero_grad()
        model(batch).square().mean().backward()
        body.step()
        head.step()

    trainer, handler = Engine(train_step), WeightUpdateHandler(model, head)
    handler.attach(trainer)
    group, frozen = head.param_groups[0], []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED(once=5), lambda: frozen.append(group["params"]) or group.update(params=[])
    )
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=8), lambda: group.update(params=frozen[0]))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: handler.state_dict() and None)
    trainer.run(torch.randn(12, 4, 3))
    assert trainer.state.iteration == 12
    assert not handler.reports
    assert trainer.state.metrics["monitor/frozen_count"] == 0
