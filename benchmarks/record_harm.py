"""Record small trainings with planted faults whose harm is measured, and healthy ones that are hard to judge.

Every ``EVERY`` iterations one batch or gradient is faulty. The recorded training leaves that step out; a twin, made of
the same state, takes it, and both go on with the same batches. The mean rise of the twin's loss over the next ``AFTER``
batches is the fault's harm. At a ``control`` nothing is faulty, and the twin is the one that leaves the step out: its
harm is what a false alarm costs.

One .npz per training: per iteration ``loss``, ``gnorm`` and per tensor ``lg`` (natural logs of gradient norms); per
event ``ev_it``, ``ev_kind``, ``ev_area50``, ``ev_tensor`` (which tensor's gradient was multiplied, else -1); ``meta``
(JSON): name, seed, names of the tensors. ``gan_*`` and ``fall_*`` are healthy all through: both sides of a GAN, and
trainings of 700 iterations whose gradients fall steeply at first.

    python benchmarks/record_harm.py DIRECTORY [--seed 1] [--iterations 1500] [--only gpt_adamw cnn ...]
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record_norms import VOCABULARY, Batches, Training, batches, build
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

EVERY, AFTER, FIRST = 55, 50, 150
KINDS = (
    "random_labels",
    "one_tensor_x10",
    "shifted_labels",
    "constant_input",
    "control",
    "loss_x3",
    "half_random_labels",
    "one_tensor_x10",
    "loss_x10",
    "one_bad_input",
    "one_tensor_x30",
)
TRAININGS = (
    Training("gpt_adamw", 40, 2, 6, "AdamW", 2e-3, 50, "cosine", {"weight_decay": 0.1}),
    Training("gpt_momentum", 32, 2, 12, "SGD", 0.2, 50, "linear", {"momentum": 0.9}),
    Training("gpt_deep", 24, 4, 8, "Adam", 3e-3, 200, "constant"),
    Training("cnn", 12, 2, 24, "AdamW", 2e-3, 0, "constant"),
    Training("cnn_sgd", 16, 2, 48, "SGD", 0.1, 0, "cosine", {"momentum": 0.9}),
    Training("mlp_adam", 80, 2, 24, "Adam", 2e-3, 0, "rsqrt"),
    Training("mlp_sgd", 48, 3, 16, "SGD", 0.1, 0, "constant"),
)
FALLS = (
    Training("fall_regression", 64, 2, 32, "SGD", 1e-3, 0, "constant"),
    Training("fall_adam", 128, 2, 16, "Adam", 3e-3, 0, "constant"),
    Training("fall_momentum", 32, 3, 64, "SGD", 3e-4, 0, "constant", {"momentum": 0.9}),
    Training("gpt_fall", 32, 2, 8, "AdamW", 1e-2, 0, "cosine"),
)
Step = Callable[[nn.Module, Tensor, Tensor], Tensor]


def make_model(training: Training) -> nn.Module:
    if not training.name.startswith("cnn"):
        return build(training)
    width = training.width
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1, stride=2),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * width, 10),
    )


def make_optimizer(training: Training, model: nn.Module) -> Optimizer:
    kind: Callable[..., Optimizer] = getattr(torch.optim, training.optimizer)
    return kind(model.parameters(), lr=training.lr, **training.options)


def spoil(kind: str, inputs: Tensor, labels: Tensor, classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A batch with a fault."""
    inputs, labels = inputs.clone(), labels.clone()
    if kind in ("random_labels", "half_random_labels"):
        rows = len(labels) // (2 if kind.startswith("half") else 1)
        labels[:rows] = torch.randint(classes, labels[:rows].shape, generator=generator)
    elif kind == "shifted_labels":
        labels = labels.roll(1, 0)
    elif kind == "constant_input":
        inputs = torch.ones_like(inputs)
    elif kind == "one_bad_input":
        noise = torch.randint(classes, inputs[0].shape, generator=generator)
        inputs[0] = (
            noise if not inputs.is_floating_point() else 10.0 * torch.randn(inputs[0].shape, generator=generator)
        )
    return inputs, labels


def gradients(
    model: nn.Module, inputs: Tensor, labels: Tensor, times: float = 1.0, tensor: int = -1, by: float = 1.0
) -> float:
    """One backward; the loss before it was multiplied."""
    model.zero_grad()
    loss = F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())
    (times * loss).backward()
    if tensor >= 0:
        gradient = list(model.parameters())[tensor].grad
        assert gradient is not None
        gradient.mul_(by)
    return loss.item()


def record(training: Training, seed: int, iterations: int) -> dict[str, Any]:
    """Train beside a twin, and return the recording."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model, draw = make_model(training), batches(training, generator)
    optimizer, classes = make_optimizer(training, model), VOCABULARY if training.is_gpt else 10
    names = [name for name, _ in model.named_parameters()]
    twin: tuple[nn.Module, Optimizer] | None = None
    found: dict[str, list[Any]] = {
        key: [] for key in ("loss", "gnorm", "lg", "ev_it", "ev_kind", "ev_area50", "ev_tensor")
    }
    rise: list[float] = []
    for iteration in range(iterations):
        inputs, labels = draw()
        since = (iteration - FIRST) % EVERY if iteration >= FIRST else -1
        kind = KINDS[(iteration - FIRST) // EVERY % len(KINDS)] if since == 0 else ""
        for group in optimizer.param_groups:
            group["lr"] = training.lr * training.lr_factor(iteration, iterations)
        if kind and iteration + AFTER >= iterations:  # its harm could not be measured any more
            break
        if kind:
            inputs, labels = spoil(kind, inputs, labels, classes, generator)
        by = {"loss_x3": 3.0, "loss_x10": 10.0}.get(kind, 1.0)
        tensor = int(torch.randint(len(names), (), generator=generator)) if kind.startswith("one_tensor") else -1
        loss = gradients(model, inputs, labels, by, tensor, 30.0 if kind.endswith("x30") else 10.0)
        norms = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).double()
        found["loss"].append(loss)
        found["gnorm"].append(norms.norm().item())
        found["lg"].append(norms.log().tolist())
        if twin is not None:
            for group in twin[1].param_groups:
                group["lr"] = optimizer.param_groups[0]["lr"]
            if since <= AFTER:
                rise.append(gradients(twin[0], inputs, labels) - loss)
                twin[1].step()
            if since == AFTER:
                found["ev_area50"].append(float(np.mean(rise)))
                twin = None
        if not kind:
            optimizer.step()
            continue
        # The twin is made of the state before the step, and one of the two takes it.
        other = copy.deepcopy(model)
        for parameter, own in zip(other.parameters(), model.parameters(), strict=True):
            parameter.grad = None if own.grad is None else own.grad.clone()
        others = make_optimizer(training, other)
        others.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        (optimizer if kind == "control" else others).step()
        twin, rise = (other, others), []
        found["ev_it"].append(iteration)
        found["ev_kind"].append(kind)
        found["ev_tensor"].append(tensor)
    return found | {"meta": {"name": training.name, "seed": seed, "names": names}}


def record_fall(training: Training, seed: int, iterations: int = 700) -> dict[str, Any]:
    """A healthy training that starts far from where it ends."""
    if training.is_gpt:
        draw, model, loss_of = batches(training, torch.Generator().manual_seed(seed)), build(training), F.cross_entropy
    else:
        draw, model = digits_sum(training, seed), build(training)
        model[-1] = nn.Linear(training.width, 1)  # type: ignore[operator]
        loss_of = F.mse_loss
    optimizer = make_optimizer(training, model)
    found: dict[str, list[Any]] = {"loss": [], "gnorm": [], "lg": []}
    for iteration in range(iterations):
        inputs, targets = draw()
        for group in optimizer.param_groups:
            group["lr"] = training.lr * training.lr_factor(iteration, iterations)
        optimizer.zero_grad()
        loss = (
            loss_of(model(inputs).flatten(0, -2), targets.flatten())
            if training.is_gpt
            else loss_of(model(inputs).flatten(), targets)
        )
        loss.backward()
        note(found, loss, model)
        optimizer.step()
    return found | {"meta": {"name": training.name, "seed": seed, "names": [n for n, _ in model.named_parameters()]}}


def digits_sum(training: Training, seed: int) -> Batches:
    """Images of digits, and how dark they are plus ten, to regress on."""
    images = torch.tensor(load_digits().data / 16.0, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)

    def draw() -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(images), (training.batch_size,), generator=generator)
        return images[rows], images[rows].sum(1) + 10.0

    return draw


def note(found: dict[str, list[Any]], loss: Tensor, model: nn.Module) -> None:
    norms = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).double()
    found["loss"].append(loss.item())
    found["gnorm"].append(norms.norm().item())
    found["lg"].append(norms.log().tolist())


def record_gan(seed: int, iterations: int, lr: float = 1e-3, width: int = 64) -> dict[str, dict[str, Any]]:
    """Both sides of a small GAN on the digits."""
    torch.manual_seed(seed)
    images = torch.tensor(load_digits().data / 8.0 - 1.0, dtype=torch.float32)
    generator = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 64), nn.Tanh())
    discriminator = nn.Sequential(nn.Linear(64, width), nn.LeakyReLU(0.2), nn.Linear(width, 1))
    optimizers = [torch.optim.Adam(m.parameters(), lr=lr, betas=(0.5, 0.999)) for m in (generator, discriminator)]
    sides: dict[str, dict[str, Any]] = {side: {"loss": [], "gnorm": [], "lg": []} for side in ("gan_g", "gan_d")}
    for _ in range(iterations):
        real, made = images[torch.randint(len(images), (32,))], generator(torch.randn(32, 16))
        discriminator.zero_grad()
        loss = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(made.detach())).mean()
        loss.backward()
        note(sides["gan_d"], loss, discriminator)
        optimizers[1].step()
        generator.zero_grad()
        loss = F.softplus(-discriminator(made)).mean()
        loss.backward()
        note(sides["gan_g"], loss, generator)
        optimizers[0].step()
    for side, model in zip(sides, (generator, discriminator), strict=True):
        sides[side]["meta"] = {"name": side, "seed": seed, "names": [name for name, _ in model.named_parameters()]}
    return sides


def write(directory: Path, recording: dict[str, Any]) -> None:
    meta = recording["meta"]
    arrays = {key: np.array(value) for key, value in recording.items() if key != "meta"}
    arrays["lg"] = arrays["lg"].astype(np.float32)
    for key, empty in (("ev_it", int), ("ev_kind", str), ("ev_area50", float), ("ev_tensor", int)):
        arrays.setdefault(key, np.array([], dtype=empty))
    file = directory / f"{meta['name']}_{meta['seed']}.npz"
    np.savez_compressed(file, meta=json.dumps(meta), **arrays)
    print(
        f"{file}: {len(arrays['loss'])} iterations, loss {arrays['loss'][0]:.3g} to {arrays['loss'][-1]:.3g}",
        flush=True,
    )


def record_all(directory: Path, seed: int, iterations: int, only: list[str] | None = None) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for training in TRAININGS:
        if only is None or training.name in only:
            write(directory, record(training, seed, iterations))
    for training in FALLS:
        if only is None or training.name in only:
            torch.manual_seed(seed)
            write(directory, record_fall(training, seed))
    if only is None or "gan" in only:
        for recording in record_gan(seed, iterations).values():
            write(directory, recording)


def main() -> None:
    parser = argparse.ArgumentParser(description="Record trainings with faults whose harm is measured.")
    parser.add_argument("directory", type=Path, nargs="?", help="where to write; without it this help is all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=1500)
    parser.add_argument("--only", nargs="+", choices=[*(t.name for t in TRAININGS + FALLS), "gan"])
    args = parser.parse_args()
    if args.directory is None:
        parser.print_help()
        return
    torch.set_num_threads(1)
    record_all(args.directory, args.seed, args.iterations, args.only)


if __name__ == "__main__":
    main()
