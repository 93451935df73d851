"""Training runs with all that Ignite offers around them, and with all monitors, some, or none."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from ignite.handlers import (
    Checkpoint,
    CosineAnnealingScheduler,
    DiskSaver,
    EMAHandler,
    ProgressBar,
    global_step_from_engine,
)
from ignite.metrics import Accuracy, Loss
from torch import Tensor, nn

from ignite_monitor import (
    ActivationHandler,
    GradMonitor,
    MeanStdThreshold,
    OptimizerStateHandler,
    RCCHandler,
    SpectralNormHandler,
    StepStatsHandler,
    WeightUpdateHandler,
)
from ignite_monitor.scaling import AlignmentHandler
from tests._helpers import Batch, make_step
from tests._models import ResNet

LENGTH = 5  # iterations of an epoch
EPOCHS = 3
SPIKE = 10  # the iteration whose batch is damaged


# Data


def images_of(count: int, seed: int = 0, size: int = 16) -> list[Batch]:
    """Batches of images, each of the class of its brightest place among ten."""
    generator = torch.Generator().manual_seed(seed)
    images = [torch.rand(size, 1, 8, 8, generator=generator) for _ in range(count)]
    return [(item, item.flatten(1)[:, :10].argmax(1)) for item in images]


# Monitors

# name -> (model, optimizer) -> monitor
MONITORS: dict[str, Callable[..., Any]] = {
    "grad": lambda model, optimizer: GradMonitor(
        model, optimizer, on_spike="skip", threshold=MeanStdThreshold(k=20.0, warmup=2)
    ),
    "update": lambda model, optimizer: WeightUpdateHandler(model, optimizer, sample_size=64),
    "activation": lambda model, optimizer: ActivationHandler(
        model,
        activations=True,
        gradients=True,
        parameters={"mean_abs": torch.abs},
        activation_differences={"l2_norm": True, "cosine": lambda x, y: F.cosine_similarity(x, y, -1)},
        parameter_differences={"max_abs": True},
        reference="init",
        attention=True,
    ),
    "moments": lambda model, optimizer: OptimizerStateHandler(model, optimizer),
    "rcc": lambda model, optimizer: RCCHandler(model),
    "spectral": lambda model, optimizer: SpectralNormHandler(model, updates=True, per_parameter=True),
    "stats": StepStatsHandler,
    "alignment": lambda model, optimizer: AlignmentHandler(model),
}


# A training


class Training:
    """A model and all that trains it; nothing is attached to it yet but its evaluation.

    Args:
        skips: iterations whose optimizer step the train step skips itself.
        accumulate: iterations from one optimizer step to the next.
        damaged: the iteration whose loss is multiplied.
    """

    def __init__(self, skips: Iterable[int] = (), accumulate: int = 1, damaged: int = SPIKE) -> None:
        torch.manual_seed(0)
        self.model = ResNet(10, attention=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
        self.batches = images_of(LENGTH)
        self.disturb: Callable[[str], None] = lambda place: None
        self.gradients: list[list[Tensor]] = []
        self.evaluations: list[Any] = []
        self.published: dict[int, dict[str, float]] = {}
        train_step = make_step(
            self.model,
            self.optimizer,
            every=accumulate,
            loss_of=self.loss_of,
            factor=lambda engine: 1e4 if engine.state.iteration == damaged else 1.0,
            after_backward=self.after_backward,
            after_step=lambda engine: self.disturb("step"),
            leave_out=lambda engine: engine.state.iteration in skips and self.restore_buffers(),
        )
        self.trainer = Engine(train_step)
        self.evaluator = Engine(self.evaluate)
        self.ema = EMAHandler(self.model, momentum=0.1)
        self.scheduler = CosineAnnealingScheduler(
            self.optimizer, "lr", self.optimizer.defaults["lr"], 1e-4, LENGTH * EPOCHS
        )
        Accuracy().attach(self.evaluator, "accuracy")
        Loss(F.cross_entropy).attach(self.evaluator, "loss")
        valid = images_of(2, seed=1)

        def validate() -> None:
            state = self.evaluator.run(valid)
            self.evaluations.append(dict(state.metrics))

        self.validate = validate

    def loss_of(self, model: nn.Module, batch: Batch) -> Tensor:
        model.train()
        self.buffers = [buffer.clone() for buffer in model.buffers()]
        loss = F.cross_entropy(model(batch[0]), batch[1])
        self.disturb("forward")
        return loss

    def restore_buffers(self) -> bool:
        """Leave no trace of the batch in running statistics either, as a step that a monitor skips."""
        for buffer, before in zip(self.model.buffers(), self.buffers, strict=True):
            buffer.copy_(before)
        return True

    def after_backward(self, engine: Engine) -> None:
        self.gradients.append([parameter.grad.clone() for parameter in self.model.parameters()])
        self.disturb("backward")

    @torch.no_grad()
    def evaluate(self, engine: Engine, batch: Batch) -> tuple[Tensor, Tensor]:
        self.model.eval()
        output = self.model(batch[0])
        self.evaluations.append(output.clone())
        return output, batch[1]

    def surroundings(self, folder: Path, **to_save: Any) -> dict[str, Callable[[], Any]]:
        """Ignite's own handlers: name -> function that attaches it."""
        trainer = self.trainer
        saved = {"model": self.model, "optimizer": self.optimizer, "trainer": trainer, **to_save}
        save = Checkpoint(
            saved,
            DiskSaver(folder, create_dir=True, require_empty=False),
            n_saved=None,
            global_step_transform=global_step_from_engine(trainer, Events.ITERATION_COMPLETED),
        )
        return {
            "scheduler": lambda: trainer.add_event_handler(Events.ITERATION_STARTED, self.scheduler),
            "ema": lambda: self.ema.attach(trainer, event=Events.ITERATION_COMPLETED),
            "checkpoint": lambda: trainer.add_event_handler(Events.EPOCH_COMPLETED, save),
            "evaluator": lambda: trainer.add_event_handler(Events.EPOCH_COMPLETED, self.validate),
            "progress": lambda: ProgressBar(disable=True).attach(trainer, output_transform=lambda x: {"loss": x}),
        }

    def note(self) -> None:
        """Keep what is published in each iteration; to be attached after the loggers."""

        @self.trainer.on(Events.ITERATION_COMPLETED)
        def look(engine: Engine) -> None:
            self.published[engine.state.iteration] = {
                name: float(value) for name, value in engine.state.metrics.items() if "/" in name
            }

    def run(self, **kwargs: Any) -> None:
        seed_all(1)
        self.trainer.run(self.batches, **{"max_epochs": EPOCHS, **kwargs})

    def outcome(self) -> dict[str, Any]:
        """All that monitors must not touch."""
        return {
            "model": dict(self.model.state_dict()),
            "modes": [module.training for module in self.model.modules()],
            "versions": [(item.requires_grad, item._version) for item in self.model.parameters()],
            "left": [parameter.grad for parameter in self.model.parameters()],
            "gradients": self.gradients,
            "optimizer": self.optimizer.state_dict(),
            "ema": dict(self.ema.ema_model.state_dict()),
            "scheduler": self.scheduler.state_dict(),
            "evaluations": self.evaluations,
            "random": [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()],
            "engine": [dict(self.trainer.state_dict()), self.trainer.state.ema_momentum, self.trainer.state.output],
        }


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
