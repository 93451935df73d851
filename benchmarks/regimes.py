"""Trainings whose data, objective or model change, with nothing wrong: what ``recovery.py --regimes`` trains."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from trainings import Batch, digit_images, make_small

CHANGE, LENGTH = 600, 1200
CLASSIFIERS = (
    *("labels shifted", "inputs mirrored", "noisy inputs", "five more classes", "smoothed labels", "mixup", "dropout"),
    *("loss summed", "loss + 1", "head reset", "body unfrozen", "batches of 8", "domains in turn", "rare domain"),
    *("one cycle", "warm restarts", "cyclic"),
)
REGRESSIONS = ("targets shifted", "targets in turn", "heavy tails")
REGIMES = (*CLASSIFIERS, *REGRESSIONS, "reinforce", "reinforce, other rewards", "TD, a late reward")
BY_CHANCE = ("reinforce, other rewards", "TD, a late reward")
SCHEDULES: dict[str, Callable[[int], float]] = {  # factor of the rate in an iteration, for the whole run
    "one cycle": lambda i: 3.0 * math.sin(math.pi * min(i / LENGTH, 0.999)) ** 2 + 1e-3,
    "warm restarts": lambda i: 0.5 + 0.5 * math.cos(math.pi * (i % 150) / 150),
    "cyclic": lambda i: 1.0 + abs(i % 100 - 50) / 25,
}


class Training(NamedTuple):
    """A training run: ``loss(i)`` of iteration i, and its result, the smaller the better."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[int], Tensor]
    result: Callable[[], float]


def make_regime(name: str, seed: int) -> Training:
    """Make the training run of a regime change."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(100 + seed)
    if name in CLASSIFIERS:
        return _classifier(name, generator)
    if name in REGRESSIONS:
        return _regression(name, generator)
    return _reinforce(name, generator) if name.startswith("reinforce") else _td(generator)


def _changed(x: Tensor, y: Tensor, change: str, i: int, generator: torch.Generator) -> Batch:
    """Change the data of an iteration."""
    if change == "five more classes" and i < CHANGE:
        return x[y < 5], y[y < 5]
    is_on = {
        "domains in turn": (i // 60) % 2 == 1,
        "rare domain": i >= 200 and i % 40 == 8,
    }.get(change, i >= CHANGE)
    kinds: dict[str, Callable[[], Batch]] = {
        "labels shifted": lambda: (x, (y + 1) % 10),
        "rare domain": lambda: (3.0 * x.flip(1), y),
        "noisy inputs": lambda: (x + 0.7 * torch.randn(x.shape, generator=generator), y),
        "dropout": lambda: (x * (torch.rand(x.shape, generator=generator) > 0.5) * 2.0, y),
        **dict.fromkeys(("inputs mirrored", "domains in turn"), lambda: (x.flip(1), y)),
    }
    return kinds[change]() if is_on and change in kinds else (x, y)


def _classifier(change: str, generator: torch.Generator) -> Training:
    (x, y), (test_x, test_y) = digit_images()
    model, optimizer = make_small("mlp")
    group = optimizer.param_groups[0]

    def noisy(inputs: Tensor, labels: Tensor) -> Batch:
        """Add noise, so that results differ little by chance."""
        return inputs + 0.3 * torch.randn(inputs.shape, generator=generator), labels

    def loss(i: int) -> Tensor:
        is_on = i >= CHANGE
        if change == "body unfrozen" and i in (1, CHANGE):
            model[0].requires_grad_(is_on)
        if change in SCHEDULES:
            group["lr"] = optimizer.defaults["lr"] * SCHEDULES[change](i)
        if change == "head reset" and i == CHANGE:
            model[-1].reset_parameters()
        place = torch.randint(len(x), (8 if change == "batches of 8" and is_on else 64,), generator=generator)
        inputs, labels = _changed(*noisy(x[place], y[place]), change, i, generator)
        if change == "mixup" and is_on:
            share = torch.rand((), generator=generator)
            logits = model(share * inputs + (1.0 - share) * inputs.roll(1, 0))
            return share * F.cross_entropy(logits, labels) + (1 - share) * F.cross_entropy(logits, labels.roll(1, 0))
        value = F.cross_entropy(model(inputs), labels, label_smoothing=0.3 * (change == "smoothed labels" and is_on))
        return value * (4.0 if change == "loss summed" and is_on else 1.0) + float(change == "loss + 1" and is_on)

    def result() -> float:
        batch = noisy(test_x.repeat(8, 1), test_y.repeat(8))
        inputs, labels = _changed(*batch, change, LENGTH, generator)
        if change in ("domains in turn", "rare domain"):
            other = batch[0].flip(1) * (3.0 if change == "rare domain" else 1.0)
            inputs, labels = torch.cat((batch[0], other)), batch[1].repeat(2)
        return float(F.cross_entropy(model(inputs), labels))

    return Training(model, optimizer, loss, result)


def _regression(name: str, generator: torch.Generator) -> Training:
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    weights = torch.randn(8, generator=torch.Generator().manual_seed(1))

    def draw(i: int, count: int) -> Batch:
        x = torch.randn(count, 8, generator=generator)
        y = (x @ weights).sin()[:, None] + 0.1 * torch.randn(count, 1, generator=generator)
        if name == "heavy tails" and i < LENGTH:
            noise = torch.randn(y.shape, generator=generator)
            y = y + 0.1 * noise / (torch.rand(y.shape, generator=generator) + 1e-3).sqrt()
        is_on = (i // 100) % 2 == 1 if name == "targets in turn" else i >= CHANGE
        return x, y + 2.0 * (is_on and name.startswith("targets"))

    def loss(i: int) -> Tensor:
        x, y = draw(i, 64)
        return F.mse_loss(model(x), y)

    def result() -> float:
        x, y = draw(LENGTH - 1 if name == "targets in turn" else LENGTH, 2000)
        return float(F.mse_loss(model(x), y))

    return Training(model, optimizer, loss, result)


def _reinforce(name: str, generator: torch.Generator) -> Training:
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    x, good = torch.eye(8).repeat(4, 1), torch.arange(8).repeat(4)
    baseline = [0.0]

    def loss(i: int) -> Tensor:
        logs = model(x).log_softmax(-1)
        action = torch.multinomial(logs.exp(), 1, generator=generator)
        shift = 3 if name.endswith("rewards") and i >= CHANGE else 0
        reward = (action[:, 0] == (good + shift) % 8).float() * (5.0 if shift else 1.0)
        advantage = reward - baseline[0]
        baseline[0] += 0.05 * (float(reward.mean()) - baseline[0])
        return -(advantage * logs.gather(1, action)[:, 0]).mean() + 0.05 * (logs.exp() * logs).sum(-1).mean()

    def result() -> float:
        """Mean number of actions per reward: the inverse of the exact expected return."""
        shift = 3 if name.endswith("rewards") else 0
        chances = model(torch.eye(8)).softmax(-1)[torch.arange(8), (torch.arange(8) + shift) % 8]
        return 1.0 / float(chances.mean())

    return Training(model, optimizer, loss, result)


def _td(generator: torch.Generator) -> Training:
    """Values of a random walk over 16 states; its end has a reward from iteration CHANGE on."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    states = torch.eye(16)

    def loss(i: int) -> Tensor:
        place = torch.randint(16, (64,), generator=generator)
        after = (place + 1).clamp(max=15)
        reward = (place == 15) * 10.0 * (i >= CHANGE) + torch.randn(64, generator=generator)
        with torch.no_grad():
            target = reward + 0.9 * model(states[after])[:, 0] * (place < 15)
        return F.mse_loss(model(states[place])[:, 0], target)

    def result() -> float:
        return float(F.mse_loss(model(states)[:, 0], 10.0 * 0.9 ** torch.arange(15.0, -1.0, -1.0)))

    return Training(model, optimizer, loss, result)
