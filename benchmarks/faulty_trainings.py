"""Small trainings of six kinds, with places where a fault can be planted."""

from __future__ import annotations

import copy
import functools
import math
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ignite.engine import Engine, Events
from torch import Tensor, nn
from torch.nn import functional as F

from ignite_monitor import HDF5Logger, attach_monitors

TinyGPT: Any = runpy.run_path(str(Path(__file__).resolve().parent.parent / "examples" / "demo.py"))["TinyGPT"]
EVERY = 20
RATES = {"mlp": 2e-3, "cnn": 0.05, "gpt": 2e-3, "lstm": 3e-3, "gan": 1e-3, "rl": 1e-3}
SIZES = {"mlp": (20, 64, 64, 10), "generator": (8, 32, 32, 2), "discriminator": (2, 32, 32, 1), "rl": (2, 32, 32, 2)}


@dataclass
class Plan:
    """A training, with the places where a fault can be planted; ``i`` counts iterations from 1."""

    kind: str
    rate: float = 1.0  # factor of the learning rate
    rates: tuple[float, float] = (1.0, 1.0)  # of discriminator and generator
    schedule: Callable[[int], float] | None = None  # factor of the learning rate in an optimizer step
    optimizer: Any = None  # (parameters, lr) -> optimizer
    before: Callable[[nn.Module], Any] = lambda m: None  # changes the model before the optimizer is made
    after: Callable[[nn.Module], Any] = lambda m: None
    members: Callable[[nn.Module], Any] = lambda m: list(m.parameters())
    batch: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]] = lambda i, x, y: (x, y)
    batches: int = 0  # that repeat; 0 for new ones
    loss: Callable[[int, Tensor, Tensor, Tensor], Tensor] = lambda i, loss, out, y: loss
    each: Callable[[int, nn.Module], Any] = lambda i, m: None  # iteration
    mode: bool = True  # of model.train()
    zero: bool = True
    step: bool = True
    clip: float = 0.0
    accumulate: int = 1
    scaler: Any = None
    given: bool = True  # to attach_monitors
    autocast: Any = None
    reward: float = 1.0
    buffer: int = 60  # iterations in which a replay buffer fills
    held_out: bool = False


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.drop, self.head = nn.LSTM(4, 32, batch_first=True), nn.Dropout(0.1), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(self.lstm(x)[0][:, -1]))
        return out


def make_model(kind: str) -> nn.Module:
    if kind in ("gpt", "lstm"):
        return TinyGPT() if kind == "gpt" else LSTM()
    if kind == "cnn":
        stages = [nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16)]
        return nn.Sequential(*stages, nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10))
    a, b, c, d = SIZES[kind]
    return nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, c), nn.ReLU(), nn.Linear(c, d))


def make_batch(kind: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs and targets; the targets are those of a fixed teacher."""
    fixed = torch.Generator().manual_seed(5)
    if kind == "gpt":
        table, tokens = torch.randperm(128, generator=fixed), torch.randint(128, (8, 1), generator=generator)
        for _ in range(32):
            noise = torch.rand(8, generator=generator) < 0.1
            other = torch.randint(128, (8,), generator=generator)
            tokens = torch.cat([tokens, torch.where(noise, other, table[tokens[:, -1]])[:, None]], 1)
        return tokens[:, :-1], tokens[:, 1:]
    if kind == "lstm":
        x = torch.randn(16, 12, 4, generator=generator)
        return x, x[:, -4:, :2].sum((1, 2))[:, None] / 2
    if kind == "cnn":
        y, images = torch.randint(10, (32,), generator=generator), torch.randn(10, 1, 8, 8, generator=fixed)
        return images[y] + 0.8 * torch.randn(32, 1, 8, 8, generator=generator), y
    x = torch.randn(32, 20, generator=generator)
    return x, (x @ torch.randn(20, 10, generator=fixed)).argmax(1)


def make_optimizer(plan: Plan, model: nn.Module) -> Any:
    sgd = functools.partial(torch.optim.SGD, momentum=0.9, weight_decay=5e-4)
    make = plan.optimizer or (sgd if plan.kind == "cnn" else torch.optim.AdamW)
    return make(plan.members(model), lr=plan.rate * RATES[plan.kind])


def supervised(plan: Plan, seed: int, iterations: int, logger: HDF5Logger) -> None:
    """A classifier, a regression or a language model."""
    generator = torch.Generator().manual_seed(100 + seed)
    model = make_model(plan.kind)
    model = plan.before(model) or model
    optimizer = make_optimizer(plan, model)
    model = plan.after(model) or model
    batches = [make_batch(plan.kind, generator) for _ in range(plan.batches or iterations)]
    others = [make_batch(plan.kind, generator) for _ in range(4)]
    scheduler = plan.schedule and torch.optim.lr_scheduler.LambdaLR(optimizer, plan.schedule)

    def loss_of(i: int, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", plan.autocast, enabled=plan.autocast is not None):
            out = model(x).float()
        loss = F.mse_loss(out, y) if y.is_floating_point() else F.cross_entropy(out.flatten(0, -2), y.flatten())
        return plan.loss(i, loss, out, y)

    def train_step(engine: Engine, batch: tuple[Tensor, Tensor]) -> dict[str, float]:
        i = engine.state.iteration
        model.train(plan.mode)
        plan.each(i, model)
        loss = loss_of(i, *batch)
        (plan.scaler.scale(loss) if plan.scaler else loss / plan.accumulate).backward()
        if i % plan.accumulate == 0:
            if plan.clip:
                nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
            if plan.scaler:
                plan.scaler.step(optimizer)
                plan.scaler.update()
            elif plan.step:
                optimizer.step()
            if scheduler:
                scheduler.step()
            if plan.zero:
                optimizer.zero_grad()
        return {"loss": loss.item()}

    model.train(plan.mode)
    trainer = Engine(train_step)
    scaler = plan.scaler if plan.given else None
    attach_monitors(trainer, model, optimizer, loggers=logger, every=EVERY, scaler=scaler)
    if plan.held_out:

        @trainer.on(Events.ITERATION_COMPLETED(every=EVERY))
        @torch.no_grad()
        def evaluate(engine: Engine) -> None:
            model.eval()
            engine.state.metrics["loss"] = sum(loss_of(0, *batch).item() for batch in others) / len(others)

        logger.attach_output_handler(trainer, Events.ITERATION_COMPLETED(every=EVERY), "val", metric_names=["loss"])
    copies = ([part.clone() for part in batches[i % len(batches)]] for i in range(iterations))
    trainer.run((plan.batch(i, *batch) for i, batch in enumerate(copies, 1)), epoch_length=iterations)


def gan(plan: Plan, seed: int, iterations: int, logger: HDF5Logger) -> None:
    """A GAN on eight clusters."""
    discriminator, generator = models = [make_model("discriminator"), make_model("generator")]
    rates, scores = [RATES["gan"] * factor for factor in plan.rates], F.binary_cross_entropy_with_logits
    optimizers = [torch.optim.Adam(m.parameters(), lr=r, betas=(0.5, 0.9)) for m, r in zip(models, rates, strict=True)]

    def train_step(engine: Engine, batch: tuple[Tensor, Tensor]) -> dict[str, float]:
        real, noise = batch
        ones, zeros, fake = torch.ones(len(real), 1), torch.zeros(len(real), 1), generator(noise)
        optimizers[0].zero_grad()
        loss_d = scores(discriminator(real), ones) + scores(discriminator(fake.detach()), zeros)
        loss_d.backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        loss_g = scores(discriminator(fake), ones)
        loss_g.backward()
        optimizers[1].step()
        return {"loss_d": loss_d.item(), "loss_g": loss_g.item()}

    trainer, data = Engine(train_step), torch.Generator().manual_seed(seed)
    for model, optimizer, name in zip(models, optimizers, ("discriminator", "generator"), strict=True):
        attach_monitors(trainer, model, optimizer, loggers=logger, every=EVERY, prefix=name)
    angles = (torch.randint(8, (32,), generator=data) * math.pi / 4 for _ in range(iterations))
    reals = (torch.stack([a.cos(), a.sin()], 1) + 0.05 * torch.randn(32, 2, generator=data) for a in angles)
    trainer.run(((real, torch.randn(32, 8, generator=data)) for real in reals), epoch_length=iterations)


def reinforce(plan: Plan, seed: int, iterations: int, logger: HDF5Logger) -> None:
    """A DQN: two actions push a point that is rewarded near 0; at first the buffer fills, without a step."""
    data, model = torch.Generator().manual_seed(seed), make_model("rl")
    optimizer = make_optimizer(plan, model)
    target, state, buffer = copy.deepcopy(model), torch.zeros(8, 2), list[Any]()

    def train_step(engine: Engine, _: Any) -> dict[str, float]:
        nonlocal state
        i = engine.state.iteration
        with torch.no_grad():
            action = model(state).argmax(1)
        explores = torch.rand(8, generator=data) < max(0.1, 1 - i / 200)
        action = torch.where(explores, torch.randint(2, (8,), generator=data), action)
        speed = state[:, 1] + 0.2 * (2 * action - 1) + 0.05 * torch.randn(8, generator=data)
        place = state[:, 0] + 0.2 * speed
        ended = (place.abs() > 2) | (torch.rand(8, generator=data) < 0.05)
        buffer.append((state, action, plan.reward * (-place.square()).exp(), torch.stack([place, speed], 1), ended))
        state = torch.where(ended[:, None], 0.5 * torch.randn(8, 2, generator=data), torch.stack([place, speed], 1))
        if i <= plan.buffer:
            return {"loss": 0.0}
        picks = torch.randint(len(buffer), (8,), generator=data).tolist()
        x, a, r, following, end = (torch.cat(parts) for parts in zip(*(buffer[p] for p in picks), strict=True))
        x, r = plan.batch(i, x, r)
        with torch.no_grad():
            goal = r + 0.95 * target(following).max(1).values * ~end
        loss = F.smooth_l1_loss(model(x).gather(1, a[:, None])[:, 0], goal)
        if plan.zero:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 25 == 0:
            target.load_state_dict(model.state_dict())
        return {"loss": loss.item()}

    trainer = Engine(train_step)
    attach_monitors(trainer, model, optimizer, loggers=logger, every=EVERY)
    trainer.run(range(iterations))


def train(plan: Plan, seed: int, iterations: int, logger: HDF5Logger) -> None:
    torch.manual_seed(seed)
    {"gan": gan, "rl": reinforce}.get(plan.kind, supervised)(plan, seed, iterations, logger)
