"""Trainers of other packages and of Ignite: training unchanged, numbers correct."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import EMAHandler, PiecewiseLinear
from ignite.metrics import Accuracy, Loss
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ignite_monitor import attach_monitors
from tests._helpers import assert_same
from tests._models import make_model
from tests._truth import norm, update_ratio

OF_PACKAGES = [pytest.mark.compatibility, pytest.mark.filterwarnings("ignore")]

EPOCHS, LENGTH, SIZE = 2, 4, 6
CPU = torch.device("cpu")


class Problem:
    """A training run.

    Attributes:
        trainer: the engine.
        watched: prefix -> model and optimizer.
        run: runs the training.
        notes: other results of the training, which have to be the same.
        norms: prefix -> iteration -> norm of the gradients of its last step.
        moved: prefix -> iteration -> largest update ratio of a parameter.
    """

    def __init__(self) -> None:
        self.trainer: Engine
        self.watched: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}
        self.run: Callable[[], Any] = lambda: self.trainer.run(batches(), max_epochs=EPOCHS)
        self.notes: list[Any] = []
        self.norms: dict[str, dict[int, float]] = {}
        self.moved: dict[str, dict[int, float]] = {}

    def record(self, prefix: str, model: nn.Module, optimizer: Any) -> None:
        """Record steps by torch's own hooks."""
        norms, moved = self.norms.setdefault(prefix, {}), self.moved.setdefault(prefix, {})
        kept: list[Tensor] = []

        def before(*_: Any) -> None:
            gradients = [item.grad for item in model.parameters() if item.grad is not None]
            if gradients:
                norms[self.trainer.state.iteration] = norm(gradients)

        def start() -> None:
            kept[:] = [item.detach().clone() for item in model.parameters()]

        def end() -> None:
            moved[self.trainer.state.iteration] = max(map(update_ratio, kept, model.parameters()))

        getattr(optimizer, "optimizer", optimizer).register_step_pre_hook(before)
        self.trainer.add_event_handler(Events.ITERATION_STARTED, start)
        self.trainer.add_event_handler(Events.ITERATION_COMPLETED, end)

    def outcome(self) -> list[Any]:
        torch.manual_seed(1)
        self.run()
        return [
            [dict(model.state_dict()), optimizer.state_dict(), [item.grad for item in model.parameters()]]
            for model, optimizer in self.watched.values()
        ] + [torch.get_rng_state(), self.notes]


def gan(problem: Problem) -> list[Any]:
    """Return a generator, its optimizer, a discriminator and its optimizer, which are watched."""
    generator, discriminator = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, SIZE)), make_model(outputs=1)
    problem.watched = {"generator": (generator, adam(generator)), "discriminator": (discriminator, adam(discriminator))}
    return [item for pair in problem.watched.values() for item in pair]


def batches(seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(8, SIZE, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(LENGTH)
    ]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def monai_supervised(problem: Problem) -> None:
    from monai.engines import SupervisedTrainer
    from monai.handlers import StatsHandler

    model = make_model()
    optimizer = adam(model)
    data = [{"image": x, "label": y} for batch in batches() for x, y in zip(*batch, strict=True)]
    handlers = [StatsHandler(output_transform=lambda x: x[0]["loss"])]
    loader = DataLoader(data, batch_size=8)
    problem.trainer = SupervisedTrainer(CPU, EPOCHS, loader, model, optimizer, F.cross_entropy, train_handlers=handlers)
    problem.watched = {"": (model, optimizer)}
    problem.run = problem.trainer.run


def monai_gan(problem: Problem) -> None:
    from monai.engines import GanTrainer

    generator, of_generator, discriminator, of_discriminator = gan(problem)

    def deceive(fake: Tensor) -> Tensor:
        return (discriminator(fake) - 1).square().mean()

    def discriminate(fake: Tensor, real: Tensor) -> Tensor:
        return discriminator(fake.detach()).square().mean() + (discriminator(real) - 1).square().mean()

    loader = DataLoader(torch.cat([x for x, _ in batches()]), batch_size=8)
    problem.trainer = GanTrainer(
        CPU, EPOCHS, loader, generator, of_generator, deceive, discriminator, of_discriminator, discriminate,
        latent_shape=5, d_prepare_batch=lambda batch, *_, **__: batch, decollate=False,
    )  # fmt: skip
    problem.run = problem.trainer.run


def accelerate_accumulating(problem: Problem) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = make_model()
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


def supervised(problem: Problem, parts: int = 1) -> None:
    model = make_model()
    optimizer = adam(model)
    problem.trainer = trainer = create_supervised_trainer(
        model, optimizer, F.cross_entropy, gradient_accumulation_steps=parts
    )
    metrics = {"accuracy": Accuracy(), "loss": Loss(F.cross_entropy)}
    evaluators = [create_supervised_evaluator(model, metrics=copy.deepcopy(metrics)) for _ in range(2)]
    EMAHandler(model, momentum=0.1).attach(trainer, event=Events.ITERATION_COMPLETED)
    trainer.add_event_handler(
        Events.ITERATION_STARTED, PiecewiseLinear(optimizer, "lr", [(0, 1e-2), (EPOCHS * LENGTH, 1e-3)])
    )

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate() -> None:
        for seed, evaluator in enumerate(evaluators, 1):
            problem.notes.append(dict(evaluator.run(batches(seed)).metrics))

    problem.watched = {"": (model, optimizer)}


STEPS = {
    "MONAI's SupervisedTrainer": monai_supervised,
    "MONAI's GanTrainer": monai_gan,
    "accelerate with accumulation": accelerate_accumulating,
    "create_supervised_trainer with evaluators": supervised,
    "create_supervised_trainer with evaluators and accumulation": lambda problem: supervised(problem, 2),
}


def made(build: Callable[[Problem], None]) -> Problem:
    torch.manual_seed(0)
    problem = Problem()
    build(problem)
    return problem


@pytest.mark.parametrize(
    "name", [name if "create" in name else pytest.param(name, marks=OF_PACKAGES) for name in STEPS]
)
def test_train_step(name, record_property):
    monitored, recorded = made(STEPS[name]), made(STEPS[name])
    handles, published = [], {}
    for prefix, (model, optimizer) in monitored.watched.items():
        handles.append(attach_monitors(monitored.trainer, model, optimizer, prefix=prefix, every=1))
        handles[-1].monitors["update"].sample_size = None
        recorded.record(prefix, *recorded.watched[prefix])

    @monitored.trainer.on(Events.ITERATION_COMPLETED)
    def publish(engine: Engine) -> None:
        published[engine.state.iteration] = dict(engine.state.metrics)

    assert_same(monitored.outcome(), recorded.outcome())
    assert all(handle.monitors["setup"].findings == [] for handle in handles)
    for prefix, norms in recorded.norms.items():
        start = f"{prefix}/" if prefix else ""
        assert len(norms) >= LENGTH * EPOCHS // 2
        for iteration, values in published.items():
            assert values[f"{start}grad/stepped"] == (iteration in norms)
            if iteration in norms:
                assert values[f"{start}grad/norm"] == pytest.approx(norms[iteration], rel=1e-5)
                moved = recorded.moved[prefix][iteration]
                assert values[f"{start}monitor/update_ratio_max"] == pytest.approx(moved, rel=1e-5)
    record_property("step", name)
