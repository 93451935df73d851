"""Record small training runs with planted faults whose harm is measured, and healthy runs that cause false alarms.

Every ``EVERY`` iterations one batch or gradient is faulty. The recorded run skips that step; a copy of its state takes
it, and both continue with the same batches. The mean rise of the copy's loss over the next ``AFTER`` batches is the
harm of the fault. At a ``control`` nothing is faulty and the copy skips the step: its harm is what a false alarm costs.

One .npz per run: per iteration ``loss``, ``gnorm`` and per tensor ``lg`` (natural logarithms of gradient norms); per
event ``ev_it``, ``ev_kind``, ``ev_area50``, ``ev_tensor`` (index of the tensor whose gradient was multiplied, else -1);
``meta`` (JSON): name, seed, names of the tensors. ``gan_*`` and ``*fall*`` are healthy throughout: both sides of a GAN,
and runs of 700 iterations whose gradients fall steeply at first.

    python benchmarks/record_harm.py DIRECTORY [--seed 1] [--iterations 1500] [--only gpt_adamw cnn ...]
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trainings import Batches, Training, batches, digits, loss_of, make_model, make_optimizer, options, spoil

EVERY, AFTER, FIRST = 55, 50, 150
KINDS = (
    *("random_labels", "one_tensor_x10", "shifted_labels", "constant_input", "control", "loss_x3"),
    *("half_random_labels", "one_tensor_x10", "loss_x10", "one_bad_input", "one_tensor_x30"),
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


def gradients(
    model: nn.Module, inputs: Tensor, labels: Tensor, factor: float = 1.0, tensor: int = -1, tensor_factor: float = 1.0
) -> Tensor:
    """Run one backward pass of ``factor * loss`` and return the loss."""
    model.zero_grad()
    loss = loss_of(model(inputs), labels)
    (factor * loss).backward()
    if tensor >= 0:
        gradient = list(model.parameters())[tensor].grad
        assert gradient is not None
        gradient.mul_(tensor_factor)
    return loss.detach()


class Recording(dict[str, Any]):
    """The arrays of one file."""

    def __init__(self, name: str, seed: int, model: nn.Module) -> None:
        keys = ("loss", "gnorm", "lg", "ev_it", "ev_kind", "ev_area50", "ev_tensor")
        super().__init__({key: [] for key in keys})
        self.meta = {"name": name, "seed": seed, "names": [name for name, _ in model.named_parameters()]}

    def add(self, loss: Tensor, model: nn.Module) -> None:
        norms = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).double()
        self["loss"].append(loss.item())
        self["gnorm"].append(norms.norm().item())
        self["lg"].append(norms.log().tolist())

    def write(self, directory: Path) -> None:
        kinds = {"lg": np.float32, "ev_it": int, "ev_kind": str, "ev_area50": float, "ev_tensor": int}
        arrays = {key: np.array(values, dtype=kinds.get(key)) for key, values in self.items()}
        file = directory / f"{self.meta['name']}_{self.meta['seed']}.npz"
        np.savez_compressed(file, meta=json.dumps(self.meta), **arrays)
        losses = self["loss"]
        print(f"{file}: {len(losses)} iterations, loss {losses[0]:.3g} to {losses[-1]:.3g}", flush=True)


def record(training: Training, seed: int, iterations: int) -> Recording:
    """Train the run and, after each fault, a copy of it."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model, draw = make_model(training), batches(training, generator)
    is_healthy = training in FALLS
    if is_healthy and not training.is_gpt:  # a regression with a large offset
        draw, model[-1] = sums_of_pixels(training, generator), nn.Linear(training.width, 1)  # type: ignore[operator]
    optimizer, tensors = make_optimizer(training, model), len(list(model.parameters()))
    recording = Recording(training.name, seed, model)
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
            inputs, labels = spoil(kind, inputs, labels, training.classes, generator)
        factor = {"loss_x3": 3.0, "loss_x10": 10.0}.get(kind, 1.0)
        tensor = int(torch.randint(tensors, (), generator=generator)) if kind.startswith("one_tensor") else -1
        loss = gradients(model, inputs, labels, factor, tensor, 30.0 if kind.endswith("x30") else 10.0)
        recording.add(loss, model)
        if counterpart is not None:
            training.set_lr(counterpart[1], iteration, iterations)
            if since <= AFTER:
                rise.append(gradients(counterpart[0], inputs, labels).item() - loss.item())
                counterpart[1].step()
            if since == AFTER:
                recording["ev_area50"].append(float(np.mean(rise)))
                counterpart = None
        if not kind:
            optimizer.step()
            continue
        # The counterpart has the state before the step; one of the two takes it.
        other = copy.deepcopy(model)
        for parameter, own in zip(other.parameters(), model.parameters(), strict=True):
            parameter.grad = None if own.grad is None else own.grad.clone()
        others = make_optimizer(training, other)
        others.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        (optimizer if kind == "control" else others).step()
        counterpart, rise = (other, others), []
        recording["ev_it"].append(iteration)
        recording["ev_kind"].append(kind)
        recording["ev_tensor"].append(tensor)
    return recording


def sums_of_pixels(training: Training, generator: torch.Generator) -> Batches:
    """Images of digits with the sum of their pixels plus ten as the target."""

    def draw() -> tuple[Tensor, Tensor]:
        images = digits()[0][torch.randint(len(digits()[0]), (training.batch_size,), generator=generator)]
        return images, images.sum(1) + 10.0

    return draw


def record_gan(seed: int, iterations: int, lr: float = 1e-3, width: int = 64) -> list[Recording]:
    """Generator and discriminator of a small GAN on the digits."""
    torch.manual_seed(seed)
    images = digits(8.0)[0] - 1.0
    generator = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 64), nn.Tanh())
    discriminator = nn.Sequential(nn.Linear(64, width), nn.LeakyReLU(0.2), nn.Linear(width, 1))
    optimizers = [torch.optim.Adam(m.parameters(), lr=lr, betas=(0.5, 0.999)) for m in (generator, discriminator)]
    recordings = [Recording("gan_g", seed, generator), Recording("gan_d", seed, discriminator)]
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


def main() -> None:
    parser = options(__doc__, [*(training.name for training in TRAININGS + FALLS), "gan"], seed=1, iterations=1500)
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.only, args.iterations = [TRAININGS[-1].name, "gan"], FIRST + EVERY * 2
    args.directory.mkdir(parents=True, exist_ok=True)
    for training in TRAININGS + FALLS:
        if training.name in args.only:
            iterations = 700 if training in FALLS else args.iterations
            record(training, args.seed, iterations).write(args.directory)
    for recording in record_gan(args.seed, args.iterations) if "gan" in args.only else ():
        recording.write(args.directory)


if __name__ == "__main__":
    main()
