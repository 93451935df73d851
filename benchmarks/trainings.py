"""Shared parts of benchmarks: models, data, schedules and faulty batches of small runs, options, and tables."""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

COMMIT = "BENCHMARK_COMMIT"  # environment variable of scripts that tables.py runs
CONTEXT, VOCABULARY = 32, 128
Batch = tuple[Tensor, Tensor]
Batches = Callable[[], Batch]


def options(doc: str) -> argparse.ArgumentParser:
    """Return a parser of a script's options.

    ``--quick`` runs the least that passes through all of the script, within seconds; its figures mean nothing.
    """
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="run as little as possible, to test the script")
    return parser


def commit() -> str:
    """Commit of the code that measures; that of :data:`COMMIT`, if it is set."""
    git = ["git", "describe", "--always", "--dirty", "--abbrev=9", "--exclude=*"]
    made = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True, check=False).stdout.strip()
    return os.environ.get(COMMIT) or made or "unknown"


def provenance(*seeds: int) -> str:
    """Versions, number of threads, commit, command and seeds of a measurement."""
    packages = {"torch": "torch", "Ignite": "pytorch-ignite", "scikit-learn": "scikit-learn"}
    packages |= {"transformers": "transformers"} if "transformers" in sys.modules else {}
    numbers = [f"{name} {version(package).partition('+')[0]}" for name, package in packages.items()]
    # Texts are files of Python's standard library.
    versions = ", ".join([f"Python {platform.python_version()}", *numbers, f"{torch.get_num_threads()} threads"])
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return f"Measured with {versions}, commit {commit()}: {command}, seeds {' '.join(map(str, seeds))}"


def print_header(seeds: Sequence[int], *columns: str) -> None:
    """Print where a table comes from, and its head."""
    print(f"{provenance(*seeds)}\n")
    print_head(*columns)


def print_head(*columns: str) -> None:
    """Print the head of a table."""
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)


def print_row(*cells: object) -> None:
    """Print a row of a table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def mean_and_error(values: Sequence[float], digits: int = 3, sign: str = "") -> str:
    """Mean of the finite values and, for two or more, its standard error."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return "-"
    error = f" ± {stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):{sign}.{digits}f}{error}"


class Training(NamedTuple):
    """One recipe. The name begins with the kind of model: "gpt", "cnn", "mlp", or "fall", an MLP for a regression."""

    name: str
    width: int
    depth: int
    batch_size: int
    optimizer: Callable[..., torch.optim.Optimizer]  # makes one of parameters
    warmup: int = 0  # iterations
    decay: str = "constant"

    @property
    def kind(self) -> str:
        return self.name.partition("_")[0]

    def set_lr(self, optimizer: torch.optim.Optimizer, iteration: int, iterations: int) -> None:
        done = (iteration - self.warmup) / max(1, iterations - self.warmup)
        factors: dict[str, float] = {
            "constant": 1.0,
            "cosine": 0.02 + 0.49 * (1.0 + math.cos(math.pi * done)),
            "linear": 1.0 - 0.98 * done,
            "rsqrt": (max(100, self.warmup) / max(100, iteration)) ** 0.5,
        }
        factor = (iteration + 1) / self.warmup if iteration < self.warmup else factors[self.decay]
        for group in optimizer.param_groups:
            group["lr"] = optimizer.defaults["lr"] * factor


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(nn.Module):
    """A character model with one logit per next character."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def make_model(training: Training) -> nn.Module:
    width = training.width
    if training.kind == "gpt":
        return GPT(width, training.depth)
    if training.kind == "cnn":
        first = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        second = [nn.Conv2d(width, 2 * width, 3, padding=1, stride=2), nn.BatchNorm2d(2 * width), nn.ReLU()]
        return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32 * width, 10))
    sizes = [64, *[width] * training.depth]
    hidden = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(sizes[-1], 10))
    if training.kind == "fall":
        model[-1] = nn.Linear(sizes[-1], 1)
    return model


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    if labels.is_floating_point():
        return F.mse_loss(logits.flatten(), labels)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


@functools.cache
def digits(divisor: float = 16.0) -> tuple[Tensor, Tensor]:
    """Images and labels of the handwritten digits of scikit-learn."""
    data = load_digits()
    return torch.tensor(data.data / divisor, dtype=torch.float32), torch.tensor(data.target)


def batches(training: Training, generator: torch.Generator) -> Batches:
    """A function that draws inputs and labels."""
    if training.kind == "gpt":
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
        text = b"".join(file.read_bytes() for file in files)
        pieces = torch.tensor([byte for byte in text if byte < VOCABULARY]).unfold(0, CONTEXT + 1, 1)
        inputs, labels = pieces[:, :-1], pieces[:, 1:]
    else:
        inputs, labels = digits()
        if training.kind == "fall":
            labels = inputs.sum(1) + 10.0  # a large offset

    def draw() -> Batch:
        rows = torch.randint(len(inputs), (training.batch_size,), generator=generator)
        return inputs[rows], labels[rows]

    return draw


def spoil(kind: str, inputs: Tensor, labels: Tensor, generator: torch.Generator) -> Batch:
    """A faulty copy of a batch."""
    inputs, labels = inputs.clone(), labels.clone()
    is_image = inputs.is_floating_point()
    classes = 10 if is_image else VOCABULARY
    if kind in ("random_labels", "half_random_labels"):
        rows = len(labels) // (2 if kind.startswith("half") else 1)
        labels[:rows] = torch.randint(classes, labels[:rows].shape, generator=generator)
    elif kind == "shifted_labels":
        labels = labels.roll(1, 0)
    elif kind == "constant_input":
        inputs = torch.ones_like(inputs)
    elif kind == "one_bad_input":
        noise = torch.randint(classes, inputs[0].shape, generator=generator)
        inputs[0] = 10.0 * torch.randn(inputs[0].shape, generator=generator) if is_image else noise
    return inputs, labels


@functools.cache
def digit_images() -> tuple[Batch, Batch]:
    """Images and labels to train on, and others."""
    x, y = digits()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    return (x[order[:1397]], y[order[:1397]]), (x[order[1397:]], y[order[1397:]])


def make_small(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    if name == "mlp":
        model = nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 10))
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    layers = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3)]
    model = nn.Sequential(*layers, nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3)
