"""Plant faults in small trainings, and compare the first finding of ``ignite-monitor summary`` with the cause.

Limits were chosen on seed 0; seed 1 is reported. ``--page`` writes the table into docs/diagnosis.md.
"""

from __future__ import annotations

import argparse
import copy
import logging
import math
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from ignite.engine import Engine, Events
from torch import Tensor, nn
from torch.nn import functional as F

from ignite_monitor import HDF5Logger, attach_monitors
from ignite_monitor.demo import TinyGPT

ITERATIONS, EVERY = 300, 20
MARK = "<!-- written by benchmarks/diagnosis.py --page -->"
PAGE = Path(__file__).parents[1] / "docs" / "diagnosis.md"


class Fault(NamedTuple):
    """A fault, or a healthy variant, and the kinds of findings that name its cause."""

    name: str
    trainings: str
    kinds: str = ""  # any of them; none of a healthy run
    changes: dict[str, Any] = {}
    words: str = ""  # that the first finding's text has to match too


@dataclass
class Plan:
    """A training, with the places where a fault can be planted; ``i`` counts iterations from 1."""

    kind: str
    seed: int
    rate: float = 1.0  # factor of the learning rate
    rates: tuple[float, float] = (1.0, 1.0)  # of discriminator and generator
    schedule: Callable[[int], float] | None = None  # factor of the learning rate in an optimizer step
    optimizer: Any = None  # (parameters, lr) -> optimizer
    before: Callable[[nn.Module], Any] = lambda m: None
    after: Callable[[nn.Module], Any] = lambda m: None
    members: Callable[[nn.Module], Any] = lambda m: list(m.parameters())
    batch: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]] = lambda i, x, y: (x, y)
    same: bool = False  # one batch again and again
    size: int = 0  # of a batch
    loss: Callable[[int, Tensor, Tensor, Tensor], Tensor] = lambda i, loss, out, y: loss
    each: Callable[[int, nn.Module, Any], Any] = lambda i, m, o: None
    zero: Callable[[int], bool] = lambda i: True
    step: bool = True
    mode: bool = True  # of model.train()
    clip: float = 0.0
    accumulate: int = 1
    divide: bool = True
    scaler: Any = None
    given: bool = True  # to attach_monitors
    autocast: Any = None
    wait: float = 0.0  # seconds of the loader
    reward: float = 1.0
    buffer: int = 60  # iterations in which a replay buffer fills
    held_out: bool = False
    train_size: int = 0  # number of batches that repeat; 0 for new ones
    extras: dict[str, Any] = field(default_factory=dict)


class LSTM(nn.Module):
    """Regression on a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.drop, self.head = nn.LSTM(4, 32, batch_first=True), nn.Dropout(0.1), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, 1) for (batch, time, 4)."""
        out: Tensor = self.head(self.drop(self.lstm(x)[0][:, -1]))
        return out


def make_model(kind: str) -> nn.Module:
    """Return the untrained model of a training."""
    if kind == "gpt":
        return TinyGPT()
    if kind == "lstm":
        return LSTM()
    if kind == "cnn":
        stages = [nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16)]
        return nn.Sequential(*stages, nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10))
    sizes = {
        "mlp": (20, 64, 64, 10),
        "generator": (8, 32, 32, 2),
        "discriminator": (2, 32, 32, 1),
        "rl": (2, 32, 32, 2),
    }
    a, b, c, d = sizes[kind]
    return nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, c), nn.ReLU(), nn.Linear(c, d))


def make_batch(kind: str, i: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return inputs and targets; a teacher of fixed weights makes the targets."""
    fixed = torch.Generator().manual_seed(5)
    if kind == "gpt":
        table = torch.randperm(128, generator=fixed)
        tokens = torch.randint(128, (size or 8, 1), generator=generator)
        for _ in range(32):
            noise = torch.rand(len(tokens), generator=generator) < 0.1
            other = torch.randint(128, (len(tokens),), generator=generator)
            tokens = torch.cat([tokens, torch.where(noise, other, table[tokens[:, -1]])[:, None]], 1)
        return tokens[:, :-1], tokens[:, 1:]
    if kind == "lstm":
        x = torch.randn(size or 16, 12, 4, generator=generator)
        return x, x[:, -4:, :2].sum((1, 2))[:, None] / 2
    if kind == "cnn":
        y = torch.randint(10, (size or 32,), generator=generator)
        images = torch.randn(10, 1, 8, 8, generator=fixed)
        return images[y] + 0.8 * torch.randn(len(y), 1, 8, 8, generator=generator), y
    x = torch.randn(size or 32, 20, generator=generator)
    return x, (x @ torch.randn(20, 10, generator=fixed)).argmax(1)


RATES = {"mlp": 2e-3, "cnn": 0.05, "gpt": 2e-3, "lstm": 3e-3, "gan": 1e-3, "rl": 1e-3}


def make_optimizer(plan: Plan, parameters: Any, rate: float) -> Any:
    """Return the optimizer that is usual for a training."""
    if plan.optimizer is not None:
        return plan.optimizer(parameters, rate)
    if plan.kind == "cnn":
        return torch.optim.SGD(parameters, lr=rate, momentum=0.9, weight_decay=5e-4)
    return torch.optim.AdamW(parameters, lr=rate)


def supervised(plan: Plan, iterations: int, logger: HDF5Logger) -> None:
    """Train a classifier, a regression or a language model."""
    generator = torch.Generator().manual_seed(100 + plan.seed)
    model = make_model(plan.kind)
    model = plan.before(model) or model
    optimizer = make_optimizer(plan, plan.members(model), plan.rate * RATES[plan.kind])
    model = plan.after(model) or model
    count = 1 if plan.same else plan.train_size or iterations
    batches = [make_batch(plan.kind, i, plan.size, generator) for i in range(count)]
    others = [make_batch(plan.kind, i, plan.size, generator) for i in range(4)]
    scheduler = plan.schedule and torch.optim.lr_scheduler.LambdaLR(optimizer, plan.schedule)

    def loss_of(i: int, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", plan.autocast, enabled=plan.autocast is not None):
            out = model(x)
        if y.is_floating_point():
            loss = F.mse_loss(out.float(), y)
        else:
            loss = F.cross_entropy(out.float().flatten(0, -2), y.flatten())
        return plan.loss(i, loss, out, y)

    def train_step(engine: Engine, batch: tuple[Tensor, Tensor]) -> dict[str, float]:
        i = engine.state.iteration
        model.train(plan.mode)
        plan.each(i, model, optimizer)
        loss = loss_of(i, *batch)
        scaled = loss / (plan.accumulate if plan.divide else 1)
        (scaled if plan.scaler is None else plan.scaler.scale(scaled)).backward()
        if i % plan.accumulate == 0:
            if plan.clip:
                nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
            if plan.scaler is not None:
                plan.scaler.step(optimizer)
                plan.scaler.update()
            elif plan.step:
                optimizer.step()
            if scheduler:
                scheduler.step()
            if plan.zero(i):
                optimizer.zero_grad()
        return {"loss": loss.item()}

    trainer = Engine(train_step)
    scaler = {"scaler": plan.scaler} if plan.given else {}
    attach_monitors(trainer, model, optimizer, loggers=logger, every=EVERY, **scaler, **plan.extras)
    if plan.held_out:

        @trainer.on(Events.ITERATION_COMPLETED(every=EVERY))
        def evaluate(engine: Engine) -> None:
            with torch.no_grad():
                model.eval()
                engine.state.metrics["loss"] = sum(loss_of(0, *batch).item() for batch in others) / 4

        logger.attach_output_handler(trainer, Events.ITERATION_COMPLETED(every=EVERY), "val", metric_names=["loss"])

    def loader() -> Any:
        for i in range(1, iterations + 1):
            if plan.wait:
                time.sleep(plan.wait)
            x, y = batches[(i - 1) % count]
            yield plan.batch(i, x.clone(), y.clone())

    model.train(plan.mode)
    trainer.run(loader(), epoch_length=iterations)


def gan(plan: Plan, iterations: int, logger: HDF5Logger) -> None:
    """Train a GAN on eight clusters."""
    models = [make_model("discriminator"), make_model("generator")]
    lr = plan.rate * RATES["gan"]
    optimizers = [
        torch.optim.Adam(plan.members(m), lr=lr * f, betas=(0.5, 0.9)) for m, f in zip(models, plan.rates, strict=True)
    ]
    discriminator, generator = models
    plan.after(generator)

    def train_step(engine: Engine, batch: tuple[Tensor, Tensor]) -> dict[str, float]:
        i, (real, noise) = engine.state.iteration, batch
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = generator(noise)
        optimizers[0].zero_grad()
        scores = F.binary_cross_entropy_with_logits
        loss_d = scores(discriminator(real), ones) + scores(discriminator(fake.detach()), zeros)
        plan.loss(i, loss_d, fake, zeros).backward()
        optimizers[0].step()
        if plan.zero(i):
            optimizers[1].zero_grad()
        loss_g = scores(discriminator(fake), ones)
        loss_g.backward()
        optimizers[1].step()
        return {"loss_d": loss_d.item(), "loss_g": loss_g.item()}

    trainer = Engine(train_step)
    for model, optimizer, name in zip(models, optimizers, ("discriminator", "generator"), strict=True):
        attach_monitors(trainer, model, optimizer, loggers=logger, every=EVERY, prefix=name)
    data = torch.Generator().manual_seed(plan.seed)

    def loader() -> Any:
        for i in range(1, iterations + 1):
            angle = torch.randint(8, (32,), generator=data) * math.pi / 4
            real = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(32, 2, generator=data)
            yield plan.batch(i, real, torch.randn(32, 8, generator=data))

    trainer.run(loader(), epoch_length=iterations)


def reinforce(plan: Plan, iterations: int, logger: HDF5Logger) -> None:
    """Train a DQN: two actions push a point that is rewarded near 0; at first the buffer fills, without a step."""
    data = torch.Generator().manual_seed(plan.seed)
    model = make_model("rl")
    optimizer = make_optimizer(plan, plan.members(model), plan.rate * RATES["rl"])
    plan.after(model)
    target, state, steps = copy.deepcopy(model), torch.zeros(8, 2), 0
    buffer: list[Any] = []

    def train_step(engine: Engine, _: Any) -> dict[str, float]:
        nonlocal state, steps
        i = engine.state.iteration
        plan.each(i, model, optimizer)
        with torch.no_grad():
            action = model(state).argmax(1)
        random = torch.rand(8, generator=data) < max(0.1, 1 - i / 200)
        action = torch.where(random, torch.randint(2, (8,), generator=data), action)
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
        loss = plan.loss(i, F.smooth_l1_loss(model(x).gather(1, a[:, None])[:, 0], goal), x, goal)
        if plan.zero(i):
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 25 == 0:
            target.load_state_dict(model.state_dict())
        return {"loss": loss.item()}

    trainer = Engine(train_step)
    attach_monitors(trainer, model, optimizer, loggers=logger, every=EVERY, **plan.extras)
    trainer.run(range(iterations))


def set_(name: str, value: Any) -> Callable[[nn.Module], Any]:
    """Return a function that sets (or multiplies, given a string) the parameters whose names match."""

    def change(model: nn.Module) -> None:
        for key, parameter in model.named_parameters():
            if re.search(name, key):
                with torch.no_grad():
                    parameter.mul_(float(value)) if isinstance(value, str) else parameter.fill_(value)

    return change


def frozen(pattern: str) -> Callable[[nn.Module], Any]:
    """Return a function that freezes the parameters whose names match."""
    return lambda m: [p.requires_grad_(False) for n, p in m.named_parameters() if re.search(pattern, n)] and None


def without(pattern: str) -> Callable[[nn.Module], Any]:
    """Return a function that leaves the parameters whose names match out."""
    return lambda m: [p for n, p in m.named_parameters() if not re.search(pattern, n)]


def deep(activation: type[nn.Module], depth: int) -> Callable[[nn.Module], nn.Module]:
    """Return a function that makes an MLP of many layers."""
    layers = [part for _ in range(depth) for part in (nn.Linear(64, 64), activation())]
    return lambda _: nn.Sequential(nn.Linear(20, 64), activation(), *layers, nn.Linear(64, 10))


def added(module: nn.Module) -> Callable[[nn.Module], nn.Module]:
    """Return a function that puts a module behind the model."""
    return lambda m: nn.Sequential(*m, module)


class Cut(nn.Module):
    """detach() by mistake."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the input without its graph."""
        return x.detach()


class Aside(nn.Module):
    """A layer whose output is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        """Compute and drop the layer's output."""
        self.layer(x)
        return x


def inserted(module: Callable[[], nn.Module], at: int) -> Callable[[nn.Module], nn.Module]:
    """Return a function that inserts a module."""
    return lambda m: nn.Sequential(*[*m][:at], module(), *[*m][at:])


def noise_labels(i: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Shuffle the targets."""
    return x, y[torch.randperm(len(y))]


def nan_row(i: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return one sample of NaN in iteration 170."""
    if i == 170:
        x[3] = math.nan
    return x, y


def log_zero(i: int, loss: Tensor, out: Tensor, y: Tensor) -> Tensor:
    """Return a loss with log(0) from iteration 150 on."""
    if i < 150:
        return loss
    return loss - 1e-3 * (out.float() * 1e3).softmax(-1).min(-1).values.log().mean()


def at_step(n: int, change: Callable[[nn.Module], Any]) -> Callable[[int, nn.Module, Any], Any]:
    """Return a function that changes the model in one iteration."""
    return lambda i, m, o: change(m) if i == n else None


def sgd(parameters: Any, lr: float) -> Any:
    """Return SGD with a rate that suits it."""
    return torch.optim.SGD(parameters, lr=25 * lr)


def adam(**options: Any) -> Callable[[Any, float], Any]:
    """Return a function that makes AdamW with some options."""
    return lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, **options)


def new_head(m: nn.Module) -> None:
    """Replace the last layer."""
    name, layer = list(m.named_children())[-1]
    setattr(m, name, copy.deepcopy(layer))


def two_groups(m: nn.Module) -> Any:
    """Return three groups, of which one has a rate that is 300 times too large."""
    thirds = [list(m.parameters())[i::3] for i in range(3)]
    return [{"params": thirds[0], "lr": 0.6}, {"params": thirds[1]}, {"params": thirds[2]}]


def spoiled(factor: float, which: Callable[[int], bool]) -> Callable[[int, Tensor, Tensor], Any]:
    """Return a function that multiplies the inputs, or the targets of tokens, of some iterations."""

    def batch(i: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if not which(i):
            return x, y
        if not x.is_floating_point():
            return torch.full_like(x, 7), torch.randint_like(y, 128)
        x[: len(x) // 2] *= factor
        return x, factor * y if y.is_floating_point() else y

    return batch


LEARNING_RATE, SETUP = "large_updates", "setup"
FAULTS = (
    Fault("a layer in no optimizer", "mlp cnn gpt", "not_in_optimizer", {"members": without(r"^2|mlp|^3")}),
    Fault("zero_grad forgotten", "mlp gpt lstm rl", "gradients_not_zeroed", {"zero": lambda i: False}),
    Fault("evaluation mode", "cnn lstm", "evaluation_mode", {"mode": False}),
    Fault("the same batch again and again", "mlp gpt", "batch_repeats", {"same": True}),
    Fault("frozen by mistake", "cnn gpt", "requires_grad_false", {"after": frozen(r"^0|^3|blocks\.1")}),
    Fault(
        "GradScaler not given",
        "mlp cnn",
        "scaler_not_given",
        {"scaler": torch.amp.GradScaler("cpu", init_scale=2.0**14), "given": False},
    ),
    Fault("head replaced after the optimizer was made", "mlp lstm", "stale_optimizer", {"after": new_head}),
    Fault("learning rate 0", "lstm mlp", "zero_learning_rate", {"rate": 0.0}),
    Fault("detach() by mistake", "mlp", "unused_parameters", {"before": inserted(Cut, 3)}),
    Fault("a layer whose output is unused", "mlp", "unused_parameters", {"before": inserted(Aside, 2)}),
    Fault(
        "bfloat16 weights, small rate",
        "mlp",
        "lost_updates",
        {"after": lambda m: m.bfloat16(), "batch": lambda i, x, y: (x.bfloat16(), y), "rate": 0.05},
    ),
    Fault("step() forgotten", "mlp cnn", "no_step", {"step": False}),
    Fault("learning rate × 300", "mlp cnn gpt lstm rl", LEARNING_RATE, {"rate": 300.0}),
    Fault("discriminator's rate × 500", "gan", LEARNING_RATE, {"rates": (500.0, 1.0)}, "discriminator"),
    Fault(
        "warm-up to a rate × 300",
        "mlp gpt cnn",
        "rate_rose",
        {"rate": 300.0, "schedule": lambda s: 10 ** min(0.0, s / 50 - 3)},
    ),
    Fault("loss summed, not averaged", "cnn", LEARNING_RATE, {"loss": lambda i, loss, out, y: loss * y.numel()}),
    Fault("accumulation without division", "cnn", LEARNING_RATE, {"accumulate": 16, "divide": False, "rate": 3.0}),
    Fault("learning rate × 1e-5", "mlp gpt lstm", "small_updates", {"rate": 1e-5}),
    Fault("rate decayed to 0 too early", "mlp gpt", "rate_vanished", {"schedule": lambda s: max(0.0, 1 - s / 60)}),
    Fault("scheduler stepped per batch", "cnn lstm", "rate_vanished", {"schedule": lambda s: 0.1 ** (s // 15)}),
    Fault("one parameter group's rate × 300", "mlp lstm", "group_rate", {"members": two_groups}),
    Fault("gradient clipped to 1e-7", "cnn lstm", "clipped_away", {"clip": 1e-7}),
    Fault("one batch × 1e3", "mlp cnn gpt lstm rl", "bad_batches", {"batch": spoiled(1e3, lambda i: i == 170)}),
    Fault(
        "every 10th batch bad",
        "mlp lstm",
        "periodic_spikes",
        {"batch": spoiled(300.0, lambda i: i > 60 and i % 10 == 0)},
        "every 10",
    ),
    Fault("every 10th batch bad", "cnn", "input_scale", {"batch": spoiled(300.0, lambda i: i > 60 and i % 10 == 0)}),
    Fault("a sample of NaN", "mlp cnn", "nonfinite_input", {"batch": nan_row}),
    Fault("labels are noise", "mlp cnn gpt", "not_learning", {"batch": noise_labels}),
    Fault("inputs not normalized", "mlp lstm cnn", "input_scale", {"batch": lambda i, x, y: (500 * x + 2000, y)}),
    Fault("targets not normalized", "lstm", "loss_scale", {"batch": lambda i, x, y: (x, 3000 * y)}),
    Fault("softmax before cross_entropy", "mlp cnn", "bounded_outputs", {"before": added(nn.Softmax(1))}),
    Fault(
        "a weight × 1e6 between steps",
        "gpt mlp lstm",
        "weight_changed",
        {"each": at_step(175, set_(r"blocks\.0\.mlp\.0\.weight|^2\.weight|weight_hh", "1e6"))},
    ),
    Fault("log(0) in the loss", "mlp cnn gpt", "nonfinite_loss", {"loss": log_zero}),
    Fault(
        "sqrt(0) in the loss",
        "mlp lstm",
        "nonfinite_loss",
        {"loss": lambda i, loss, out, y: loss + 1e-3 * (out * (i < 120)).abs().sum().sqrt()},
    ),
    Fault("14 sigmoid layers", "mlp", "vanishing_gradients", {"before": deep(nn.Sigmoid, 14)}),
    Fault(
        "14 ReLU layers, weights × 6",
        "mlp",
        "exploding_gradients activation_outlier",
        {"before": deep(nn.ReLU, 14), "after": set_("weight", "6")},
    ),
    Fault("recurrent weights × 30", "lstm", "exploding_gradients", {"after": set_("weight_hh", "30")}),
    Fault("biases of -30 before ReLU", "mlp cnn", "dead_units", {"after": set_(r"^2\.bias|^4\.bias", -30.0)}),
    Fault("queries and keys × 20", "gpt", "large_logits attention_collapse", {"after": set_("qkv.weight", "20")}),
    Fault(
        "weight decay × 1e4",
        "mlp gpt",
        "weights_shrank",
        {"optimizer": lambda p, lr: torch.optim.AdamW(p, lr=lr, weight_decay=20.0)},
    ),
    Fault("dropout of 0.99", "mlp", "dead_units high_dropout", {"before": inserted(lambda: nn.Dropout(0.99), 2)}),
    Fault("overfits a tiny data set", "mlp", "overfitting", {"held_out": True, "train_size": 2}),
    Fault("slow loader", "mlp cnn", "data_wait", {"wait": 0.012}),
    Fault(
        "float16 overflows",
        "cnn",
        "overflows no_step",
        {"scaler": torch.amp.GradScaler("cpu", growth_interval=2), "autocast": torch.float16},
    ),
    Fault("eps of 10", "mlp gpt", "epsilon_dominated", {"optimizer": adam(eps=10.0)}),
    Fault(
        "gradient ascent",
        "mlp cnn",
        "wrong_sign",
        {"optimizer": lambda p, lr: torch.optim.AdamW(p, lr=2e-3, maximize=True)},
    ),
    Fault("rewards × 1e4", "rl", "loss_scale", {"reward": 1e4}),
    Fault("discriminator stops learning", "gan", "not_learning rate_vanished small_updates", {"rates": (1e-6, 1.0)}),
)
HEALTHY = (
    Fault("as it is", "mlp cnn gpt lstm gan rl"),
    Fault("accumulation", "mlp gpt", "", {"accumulate": 4}),
    Fault(
        "warm-up and cosine",
        "mlp gpt",
        "",
        {"schedule": lambda s: min(1.0, (s + 1) / 30) * (0.55 + 0.45 * math.cos(math.pi * s / 300))},
    ),
    Fault("warm restarts", "cnn", "", {"schedule": lambda s: 0.5 + 0.5 * math.cos(math.pi * (s % 100) / 100)}),
    Fault("step decay", "lstm", "", {"schedule": lambda s: 0.3 ** (s // 100)}),
    Fault("a frozen first layer, on purpose", "cnn", "", {"after": frozen("^0"), "members": without("^0")}),
    Fault("batch of 2", "mlp lstm", "", {"size": 2}),
    Fault("full buffer from the start", "rl", "", {"buffer": 2}),
    Fault("clipping", "gpt lstm", "", {"clip": 1.0}),
    Fault("bfloat16 autocast", "cnn", "", {"autocast": torch.bfloat16}),
    Fault("weight decay", "mlp", "", {"optimizer": adam(weight_decay=0.1)}),
    Fault("momentum SGD", "mlp", "", {"optimizer": lambda p, lr: torch.optim.SGD(p, lr=10 * lr, momentum=0.9)}),
    Fault("GradScaler", "cnn", "", {"scaler": torch.amp.GradScaler("cpu", init_scale=2.0**14)}),
    Fault("an average of the weights", "mlp", "", {"held_out": True}),
)


def zero_input(i: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs of 0."""
    return 0 * x, y


def nan_target(i: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return one target of NaN in iteration 140."""
    if i == 140:
        y[0] = math.nan
    return x, y


NEW = (
    Fault(
        "every 7th batch's targets × 60",
        "lstm",
        "periodic_spikes",
        {"batch": lambda i, x, y: (x, 60 * y if i > 80 and i % 7 == 0 else y)},
        "every 7",
    ),
    Fault("rate × 300 from step 150 on", "gpt", "rate_rose", {"schedule": lambda s: 1.0 if s < 150 else 300.0}),
    Fault("head × 1e4 between steps", "cnn", "weight_changed", {"each": at_step(155, set_(r"^8\.weight", "1e4"))}),
    Fault("a target of NaN", "lstm", "nonfinite_loss", {"batch": nan_target}),
    Fault(
        "loss multiplied by 0",
        "mlp",
        "no_gradients vanishing_gradients not_learning frozen_parameters",
        {"loss": lambda i, loss, out, y: 0 * loss},
    ),
    Fault("learning rate 0", "rl", "zero_learning_rate", {"rate": 0.0}),
    Fault("generator's rate × 300", "gan", "large_updates", {"rates": (1.0, 300.0)}, "generator"),
    Fault("inputs of 0", "lstm", "not_learning", {"batch": zero_input}),
    Fault("all weights 0", "mlp", "dead_units", {"after": set_("weight|bias", 0.0)}),
    Fault("24 sigmoid layers", "mlp", "vanishing_gradients", {"before": deep(nn.Sigmoid, 24)}),
)
TRAIN = {"gan": gan, "rl": reinforce}


def record(fault: Fault, kind: str, seed: int, iterations: int, file: Path) -> None:
    """Record a run."""
    torch.manual_seed(seed)
    plan = Plan(kind, seed, **copy.deepcopy(fault.changes))
    with HDF5Logger(file, mode="w") as logger:
        TRAIN.get(kind, supervised)(plan, iterations, logger)


def first_finding(file: Path) -> dict[str, Any]:
    """Return the summary of a file as the command prints it."""
    from ignite_monitor.hdf5.reader import read_hdf5
    from ignite_monitor.report.run import Run
    from ignite_monitor.report.summary import summarise

    return summarise(str(file), Run(read_hdf5(file))).as_json()


def assess(fault: Fault, findings: list[dict[str, Any]]) -> bool:
    """Return True if the first finding names the cause, or a healthy run has nothing but notes."""
    if not fault.kinds:
        return all(it["severity"] == "note" for it in findings)
    first = findings[0] if findings else {"kind": "", "text": ""}
    return first["kind"] in fault.kinds.split() and re.search(fault.words, first["text"]) is not None


def main() -> None:
    """Record, read and count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--only", default="", help="a regular expression of fault and training")
    parser.add_argument("--quick", action="store_true", help="only the MLP")
    parser.add_argument("--keep", type=Path, help="a directory of recordings, to be used again")
    parser.add_argument("--page", action="store_true", help="write the last seed's table into docs/diagnosis.md")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("ignite_monitor").setLevel(logging.CRITICAL)
    directory = chosen.keep or Path(tempfile.mkdtemp())
    directory.mkdir(parents=True, exist_ok=True)
    tables: list[str] = []
    for seed in chosen.seed:
        tables, counts = [], []
        for title, faults in (("Faults", FAULTS), ("Healthy", HEALTHY), ("Ten more", NEW)):
            right = total = 0
            tables += ["", f"### {title}", "", "| fault | training | first finding | right |", "|---|---|---|---|"]
            for fault, kind in [(it, kind) for it in faults for kind in it.trainings.split()]:
                name = f"{fault.name}, {kind}"
                if not re.search(chosen.only, name) or (chosen.quick and kind != "mlp"):
                    continue
                file = directory / f"{re.sub(r'[^a-z0-9]+', '_', name.lower())}_{seed}.h5"
                if not file.exists():
                    record(fault, kind, seed, ITERATIONS, file)
                findings = first_finding(file)["findings"]
                good = assess(fault, findings)
                right, total = right + good, total + 1
                said = f"{findings[0]['severity']} `{findings[0]['kind']}`: {findings[0]['text']}" if findings else "-"
                said = said if len(said) < 220 else f"{said[:200]} …"
                tables.append(f"| {fault.name} | {kind} | {said.replace('|', '/')} | {'yes' if good else '**no**'} |")
                print(f"{'ok ' if good else 'BAD'} {seed} {name}: {said}", flush=True)
            counts.append(f"{title}: {right} of {total}")
            tables.insert(len(tables) - total - 3, f"\n{right} of {total} right.")
        print(f"seed {seed}: {'; '.join(counts)}")
    if chosen.page:
        text = PAGE.read_text(encoding="utf-8")
        head = text[: text.index(MARK) + len(MARK)]
        PAGE.write_text(f"{head}\n\nSeed {chosen.seed[-1]}.\n" + "\n".join(tables) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
