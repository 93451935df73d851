"""Trainers of other packages, and train steps as in the examples of Ignite: as without monitors, and right numbers."""

from __future__ import annotations

import copy
import csv
import io
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import EMAHandler, PiecewiseLinear
from ignite.metrics import Accuracy, Loss, RunningAverage
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ignite_monitor import attach_monitors
from tests._helpers import assert_same
from tests.stress._truth import norm, wide

pytestmark = [pytest.mark.compatibility, pytest.mark.filterwarnings("ignore")]

EPOCHS, LENGTH, SIZE = 2, 4, 6


class Problem:
    """What a train step has to do with.

    Attributes:
        trainer: the engine.
        watched: prefix -> model and optimizer.
        run: runs the training.
        norms: prefix -> iteration -> the norms of the gradients that its steps were made with.
        notes: what else the training says, which has to be the same.
    """

    def __init__(self) -> None:
        self.trainer: Engine
        self.watched: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}
        self.run: Callable[[], Any] = lambda: self.trainer.run(batches(), max_epochs=EPOCHS)
        self.notes: list[Any] = []

    def record(self) -> None:
        """Keep what is true of each step, from hooks of torch's own."""
        self.norms: dict[str, dict[int, list[float]]] = {prefix: {} for prefix in self.watched}
        self.moved: dict[str, dict[int, float]] = {prefix: {} for prefix in self.watched}
        for prefix, (model, optimizer) in self.watched.items():
            held = [item for group in optimizer.param_groups for item in group["params"]]

            def before(*_: Any, prefix: str = prefix, held: list[Tensor] = held) -> None:
                gradients = [item.grad for item in held if item.grad is not None]
                if gradients:
                    self.norms[prefix].setdefault(self.trainer.state.iteration, []).append(norm(gradients))

            getattr(optimizer, "optimizer", optimizer).register_step_pre_hook(before)
            kept: list[Tensor] = []

            def start(_: Engine, kept: list[Tensor] = kept, model: nn.Module = model) -> None:
                kept[:] = [item.detach().clone() for item in model.parameters()]

            def end(engine: Engine, prefix: str = prefix, kept: Any = kept, model: nn.Module = model) -> None:
                ratios = [
                    norm([wide(now) - wide(then)]) / (norm([then]) + 1e-12)
                    for now, then in zip(model.parameters(), kept, strict=True)
                ]
                self.moved[prefix][engine.state.iteration] = max(ratios)

            self.trainer.add_event_handler(Events.ITERATION_STARTED, start)
            self.trainer.add_event_handler(Events.ITERATION_COMPLETED, end)

    def outcome(self) -> list[Any]:
        return [
            [dict(model.state_dict()), optimizer.state_dict(), [item.grad for item in model.parameters()]]
            for model, optimizer in self.watched.values()
        ] + [torch.get_rng_state(), self.notes]


def mlp(out: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(SIZE, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, out))


def batches(seed: int = 1, count: int = LENGTH) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(8, SIZE, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(count)
    ]


def adam(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=lr)


def monai_supervised(problem: Problem) -> None:
    from monai.engines import SupervisedTrainer
    from monai.handlers import StatsHandler

    model = mlp()
    optimizer = adam(model)
    data = [{"image": x, "label": y} for batch in batches() for x, y in zip(*batch, strict=True)]
    problem.trainer = SupervisedTrainer(
        torch.device("cpu"),
        EPOCHS,
        DataLoader(data, batch_size=8),
        model,
        optimizer,
        F.cross_entropy,
        train_handlers=[StatsHandler(output_transform=lambda x: x[0]["loss"])],
    )
    problem.watched = {"": (model, optimizer)}
    problem.run = problem.trainer.run


def monai_gan(problem: Problem) -> None:
    from monai.engines import GanTrainer

    generator, discriminator = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, SIZE)), mlp(1)
    of_generator, of_discriminator = adam(generator), adam(discriminator)

    def discriminate(fake: Tensor, real: Tensor) -> Tensor:
        return discriminator(fake.detach()).square().mean() + (discriminator(real) - 1).square().mean()

    problem.trainer = GanTrainer(
        torch.device("cpu"),
        EPOCHS,
        DataLoader(torch.cat([x for x, _ in batches()]), batch_size=8),
        generator,
        of_generator,
        lambda fake: (discriminator(fake) - 1).square().mean(),
        discriminator,
        of_discriminator,
        discriminate,
        latent_shape=5,
        d_prepare_batch=lambda batch, *_, **__: batch,
        decollate=False,
    )
    problem.watched = {"generator": (generator, of_generator), "discriminator": (discriminator, of_discriminator)}
    problem.run = problem.trainer.run


def accelerate_accumulating(problem: Problem) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = mlp()
    model, optimizer = accelerator.prepare(model, adam(model))

    def train_step(engine: Engine, batch: Any) -> float:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(batch[0]), batch[1])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    problem.trainer = Engine(train_step)
    problem.watched = {"": (model, optimizer)}


def supervised_with_evaluators(problem: Problem) -> None:
    model = mlp()
    optimizer = adam(model)
    problem.trainer = trainer = create_supervised_trainer(model, optimizer, F.cross_entropy)
    metrics = {"accuracy": Accuracy(), "loss": Loss(F.cross_entropy)}
    evaluators = [create_supervised_evaluator(model, metrics=copy.deepcopy(metrics)) for _ in range(2)]
    EMAHandler(model, momentum=0.1).attach(trainer, event=Events.ITERATION_COMPLETED)
    trainer.add_event_handler(
        Events.ITERATION_STARTED, PiecewiseLinear(optimizer, "lr", [(0, 1e-2), (EPOCHS * LENGTH, 1e-3)])
    )

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate() -> None:
        for evaluator, seed in zip(evaluators, (1, 2), strict=True):
            problem.notes.append(dict(evaluator.run(batches(seed)).metrics))

    problem.watched = {"": (model, optimizer)}


def supervised_accumulating(problem: Problem) -> None:
    model = mlp()
    optimizer = adam(model)
    problem.trainer = create_supervised_trainer(model, optimizer, F.cross_entropy, gradient_accumulation_steps=2)
    problem.watched = {"": (model, optimizer)}


def dcgan(problem: Problem) -> None:
    generator, discriminator = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, SIZE)), mlp(1)
    of_generator, of_discriminator = adam(generator), adam(discriminator)
    ones = torch.ones(8, 1)

    def train_step(engine: Engine, batch: Any) -> dict[str, float]:
        discriminator.zero_grad()
        real = F.binary_cross_entropy_with_logits(discriminator(batch[0]), ones)
        real.backward()
        made = generator(torch.randn(8, 5))
        fake = F.binary_cross_entropy_with_logits(discriminator(made.detach()), 0 * ones)
        fake.backward()
        of_discriminator.step()
        generator.zero_grad()
        loss = F.binary_cross_entropy_with_logits(discriminator(made), ones)
        loss.backward()
        of_generator.step()
        return {"real": real.item(), "fake": fake.item(), "loss": loss.item()}

    problem.trainer = trainer = Engine(train_step)
    for name in ("real", "fake", "loss"):
        RunningAverage(output_transform=lambda output, name=name: output[name]).attach(trainer, name)
    table = io.StringIO()

    @trainer.on(Events.ITERATION_COMPLETED(every=3))
    def log(engine: Engine) -> None:
        metrics = engine.state.metrics
        csv.writer(table, delimiter="\t").writerow(
            [engine.state.iteration, *(round(item, 5) for item in metrics.values())]
        )
        assert json.loads(json.dumps(metrics)) == metrics
        problem.notes.append({name: metrics[name] for name in ("real", "fake", "loss")})

    problem.watched = {"generator": (generator, of_generator), "discriminator": (discriminator, of_discriminator)}


STEPS = {
    "MONAI's SupervisedTrainer": monai_supervised,
    "MONAI's GanTrainer": monai_gan,
    "accelerate with accumulation": accelerate_accumulating,
    "create_supervised_trainer with evaluators": supervised_with_evaluators,
    "create_supervised_trainer with accumulation": supervised_accumulating,
    "a GAN whose metrics are rounded and written as JSON": dcgan,
}


def made(build: Callable[[Problem], None]) -> Problem:
    torch.manual_seed(0)
    problem = Problem()
    build(problem)
    return problem


def trained(problem: Problem) -> list[Any]:
    torch.manual_seed(1)
    problem.run()
    return problem.outcome()


@pytest.mark.parametrize("name", STEPS)
def test_train_step(name, record_property):
    monitored, recorded = made(STEPS[name]), made(STEPS[name])
    handles = []
    for prefix, (model, optimizer) in monitored.watched.items():
        handle = attach_monitors(monitored.trainer, model, optimizer, prefix=prefix, every=1)
        handle.monitors["update"].sample_size = None
        handles.append(handle)
    published: dict[int, dict[str, float]] = {}
    monitored.trainer.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda engine: published.update({engine.state.iteration: dict(engine.state.metrics)}),
    )
    recorded.record()
    assert_same(trained(monitored), trained(recorded))
    assert all(handle.monitors["setup"].findings == [] for handle in handles)
    checked = 0
    for prefix in recorded.watched:
        start = f"{prefix}/" if prefix else ""
        assert recorded.norms[prefix]
        for iteration, values in published.items():
            norms = recorded.norms[prefix].get(iteration)
            assert values[f"{start}grad/stepped"] == bool(norms)
            if norms:
                assert values[f"{start}grad/norm"] == pytest.approx(norms[-1], rel=1e-5)
                moved = recorded.moved[prefix][iteration]
                assert values[f"{start}monitor/update_ratio_max"] == pytest.approx(moved, rel=1e-5)
                checked += 1
    assert checked >= LENGTH * EPOCHS // 4
    record_property("step", name)


def test_actor_critic(caplog, record_property):
    """The step is made in a handler, of which nothing can be seen: a warning names it."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.actor, self.critic = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = torch.relu(self.body(x))
            return self.actor(hidden).softmax(-1), self.critic(hidden)

    def build(problem: Problem) -> None:
        policy = Policy()
        optimizer, saved = adam(policy), []

        def train_step(engine: Engine, _: Any) -> None:
            probabilities, value = policy(torch.randn(4))
            drawn = torch.distributions.Categorical(probabilities)
            saved.append((drawn.log_prob(drawn.sample()), value))

        problem.trainer = Engine(train_step)

        @problem.trainer.on(Events.EPOCH_COMPLETED)
        def finish_episode() -> None:
            optimizer.zero_grad()
            torch.stack([-log * (1 - value.item()) + (1 - value).square() for log, value in saved]).sum().backward()
            optimizer.step()
            saved.clear()

        problem.watched = {"": (policy, optimizer)}

    monitored, plain = made(build), made(build)
    attach_monitors(monitored.trainer, *monitored.watched[""], every=1)
    with caplog.at_level(logging.WARNING):
        assert_same(trained(monitored), trained(plain))
    assert caplog.text.count("backward() is called in an event handler") == 1
    assert "grad/norm" not in monitored.trainer.state.metrics
    record_property("step", "an actor-critic whose step is in a handler, which a warning says")
