"""Recordings of small training runs with planted faults whose harm is measured, and of healthy runs.

Every ``EVERY`` iterations one batch or gradient is faulty. The recorded run skips that step; a copy of its state takes
it, and both continue with the same batches. The mean rise of the copy's loss over the next ``AFTER`` batches is the
harm of the fault. At a ``control`` nothing is faulty and the copy skips the step: its harm is what a false alarm costs.

Healthy throughout are both sides of a GAN, and runs of 700 iterations whose gradients fall steeply at first.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from functools import partial
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW
from trainings import Training, batches, digits, loss_of, make_model, spoil

EVERY, AFTER, FIRST, ITERATIONS = 55, 50, 150, 1500
KINDS = (
    *("random_labels", "one_tensor_x10", "shifted_labels", "constant_input", "control", "loss_x3"),
    *("half_random_labels", "one_tensor_x10", "loss_x10", "one_bad_input", "one_tensor_x30"),
)
TRAININGS = (
    Training("gpt_adamw", 40, 2, 6, partial(AdamW, lr=2e-3, weight_decay=0.1), 50, "cosine"),
    Training("gpt_momentum", 32, 2, 12, partial(SGD, lr=0.2, momentum=0.9), 50, "linear"),
    Training("gpt_deep", 24, 4, 8, partial(Adam, lr=3e-3), 200),
    Training("cnn", 12, 2, 24, partial(AdamW, lr=2e-3)),
    Training("cnn_sgd", 16, 2, 48, partial(SGD, lr=0.1, momentum=0.9), 0, "cosine"),
    Training("mlp_adam", 80, 2, 24, partial(Adam, lr=2e-3), 0, "rsqrt"),
    Training("mlp_sgd", 48, 3, 16, partial(SGD, lr=0.1)),
)
FALLS = (
    Training("fall_regression", 64, 2, 32, partial(SGD, lr=1e-3)),
    Training("fall_adam", 128, 2, 16, partial(Adam, lr=3e-3)),
    Training("fall_momentum", 32, 3, 64, partial(SGD, lr=3e-4, momentum=0.9)),
    Training("gpt_fall", 32, 2, 8, partial(AdamW, lr=1e-2), 0, "cosine"),
)


class Recording:
    """One run: losses, gradient norms and norms of single tensors by iteration; iteration -> kind and harm."""

    def __init__(self, model: nn.Module) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.tensors: list[Tensor] = []
        self.names = tuple(name for name, _ in model.named_parameters())
        self.events: dict[int, tuple[str, float]] = {}

    def add(self, loss: Tensor, model: nn.Module) -> None:
        norms = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).double()
        self.losses.append(loss.item())
        self.norms.append(norms.norm().item())
        self.tensors.append(norms)


def gradients(model: nn.Module, inputs: Tensor, labels: Tensor, factor: float = 1.0) -> Tensor:
    """Run one backward pass of ``factor * loss`` and return the loss."""
    model.zero_grad()
    loss = loss_of(model(inputs), labels)
    (factor * loss).backward()
    return loss.detach()


def record(training: Training, seed: int, iterations: int) -> Recording:
    """Train the run and, after each fault, a copy of it."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model, draw = make_model(training), batches(training, generator)
    is_healthy = training in FALLS
    optimizer, parameters = training.optimizer(model.parameters()), list(model.parameters())
    recording = Recording(model)
    counterpart: tuple[nn.Module, torch.optim.Optimizer] | None = None
    rise: list[float] = []
    for iteration in range(iterations):
        inputs, labels = draw()
        since = (iteration - FIRST) % EVERY if iteration >= FIRST and not is_healthy else -1
        kind = KINDS[(iteration - FIRST) // EVERY % len(KINDS)] if since == 0 else ""
        training.set_lr(optimizer, iteration, iterations)
        if kind and iteration + AFTER >= iterations:  # too late to measure its harm
            break
        if kind:
            inputs, labels = spoil(kind, inputs, labels, generator)
        loss = gradients(model, inputs, labels, {"loss_x3": 3.0, "loss_x10": 10.0}.get(kind, 1.0))
        if kind.startswith("one_tensor"):
            gradient = parameters[int(torch.randint(len(parameters), (), generator=generator))].grad
            assert gradient is not None
            gradient.mul_(30.0 if kind.endswith("x30") else 10.0)
        recording.add(loss, model)
        if counterpart is not None:
            training.set_lr(counterpart[1], iteration, iterations)
            rise.append(gradients(counterpart[0], inputs, labels).item() - loss.item())
            counterpart[1].step()
            if since == AFTER:
                harm = fmean(rise)  # not a number: the largest possible
                fault = recording.events[iteration - AFTER][0]
                recording.events[iteration - AFTER] = fault, min(harm, 1.0) if harm == harm else 1.0
                counterpart = None
        if not kind:
            optimizer.step()
            continue
        # The counterpart has the state before the step; one of the two takes it.
        counterpart, rise = copy.deepcopy((model, optimizer)), []
        for parameter, own in zip(counterpart[0].parameters(), parameters, strict=True):
            parameter.grad = None if own.grad is None else own.grad.clone()
        (optimizer if kind == "control" else counterpart[1]).step()
        recording.events[iteration] = kind, math.nan
    return recording


def record_gan(seed: int, iterations: int, lr: float = 1e-3, width: int = 64) -> list[Recording]:
    """Generator and discriminator of a small GAN on the digits."""
    torch.manual_seed(seed)
    images = digits(8.0)[0] - 1.0
    generator = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 64), nn.Tanh())
    discriminator = nn.Sequential(nn.Linear(64, width), nn.LeakyReLU(0.2), nn.Linear(width, 1))
    optimizers = [torch.optim.Adam(m.parameters(), lr=lr, betas=(0.5, 0.999)) for m in (generator, discriminator)]
    recordings = [Recording(generator), Recording(discriminator)]
    for _ in range(iterations):
        real, made = images[torch.randint(len(images), (32,))], generator(torch.randn(32, 16))
        discriminator.zero_grad()
        loss = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(made.detach())).mean()
        loss.backward()
        recordings[1].add(loss.detach(), discriminator)
        optimizers[1].step()
        generator.zero_grad()
        loss = F.softplus(-discriminator(made)).mean()
        loss.backward()
        recordings[0].add(loss.detach(), generator)
        optimizers[0].step()
    return recordings


def record_all(seed: int, is_quick: bool) -> Iterator[Recording]:
    """Every run with a seed; quickly, two of them for two faults."""
    iterations = FIRST + 2 * EVERY if is_quick else ITERATIONS
    for training in TRAININGS[-1:] if is_quick else TRAININGS + FALLS:
        yield record(training, seed, 700 if training in FALLS else iterations)
    yield from record_gan(seed, iterations)
