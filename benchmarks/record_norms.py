"""Record the gradient norms of small real trainings, with faults planted at known iterations.

A small GPT on the standard library's own source text, and multilayer perceptrons on scikit-learn's digits, with varied
widths, batch sizes, optimizers and learning-rate schedules. After ``FIRST_FAULT`` iterations, 40 random ones get a
fault: random labels, a constant input, or the loss times 3 or 10. Their optimizer step is left out, as a handler that
skips spikes would.

One JSON file per training: ``norms[i]`` and ``losses[i]`` of iteration i, ``faults``: iteration -> kind.

    python benchmarks/record_norms.py DIRECTORY [--seed 1] [--iterations 4000] [--only gpt_adamw mlp_sgd ...]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

FAULTS = ("random_labels", "constant_input", "scaled_loss3", "scaled_loss10")
FAULTS_PER_KIND = 10
FIRST_FAULT = 200
CONTEXT = 32
VOCABULARY = 128

Batches = Callable[[], tuple[Tensor, Tensor]]


class Training(NamedTuple):
    """One recipe; ``warmup`` is in iterations, ``decay`` names what follows it."""

    name: str
    width: int
    depth: int
    batch_size: int
    optimizer: str
    lr: float
    warmup: int = 0
    decay: str = "constant"
    options: dict[str, Any] = {}

    @property
    def is_gpt(self) -> bool:
        return self.name.startswith("gpt")

    def lr_factor(self, iteration: int, iterations: int) -> float:
        """What the learning rate is multiplied by."""
        if iteration < self.warmup:
            return (iteration + 1) / self.warmup
        done = (iteration - self.warmup) / max(1, iterations - self.warmup)
        factors: dict[str, float] = {
            "constant": 1.0,
            "cosine": 0.02 + 0.49 * (1.0 + math.cos(math.pi * done)),
            "linear": 1.0 - 0.98 * done,
            "rsqrt": (max(100, self.warmup) / max(100, iteration)) ** 0.5,
        }
        return factors[self.decay]


TRAININGS = (
    Training("gpt_adamw", 32, 2, 8, "AdamW", 3e-3),
    Training("gpt_cosine", 48, 2, 4, "AdamW", 1e-3, 200, "cosine"),
    Training("gpt_sgd", 32, 1, 16, "SGD", 0.3, 100, "linear", {"momentum": 0.9}),
    Training("gpt_batch2", 64, 1, 2, "AdamW", 3e-3, 500),
    Training("gpt_rsqrt", 32, 3, 8, "Adam", 3e-3, 400, "rsqrt"),
    Training("gpt_batch32", 24, 2, 32, "AdamW", 5e-3, 100, "cosine", {"weight_decay": 0.1}),
    Training("mlp_sgd", 64, 2, 32, "SGD", 0.1),
    Training("mlp_momentum", 256, 2, 16, "SGD", 0.01, 0, "constant", {"momentum": 0.9}),
    Training("mlp_cosine", 32, 3, 64, "SGD", 0.3, 200, "cosine"),
    Training("mlp_batch8", 128, 1, 8, "SGD", 0.03, 0, "linear"),
    Training("mlp_rmsprop", 64, 2, 128, "RMSprop", 3e-4),
    Training("adam_plain", 64, 2, 32, "Adam", 1e-3),
    Training("adam_cosine", 128, 2, 16, "AdamW", 3e-3, 100, "cosine"),
    Training("adam_high_lr", 32, 2, 64, "Adam", 1e-2),
    Training("adam_decayed", 256, 1, 8, "AdamW", 1e-3, 0, "rsqrt", {"weight_decay": 0.1}),
    Training("gpt_batch1", 32, 2, 1, "AdamW", 1e-3, 100, "linear"),
    Training("gpt_linear", 40, 2, 8, "Adam", 2e-3, 200, "linear"),
    Training("gpt_plain_sgd", 32, 4, 16, "SGD", 0.5, 0, "cosine"),
    Training("gpt_rmsprop", 64, 2, 12, "RMSprop", 1e-3, 100),
    Training("gpt_batch6", 48, 1, 6, "AdamW", 1e-3),
    Training("mlp_rsqrt", 96, 2, 24, "SGD", 0.2, 0, "rsqrt"),
    Training("mlp_nesterov", 48, 1, 48, "SGD", 0.05, 0, "linear", {"momentum": 0.9, "nesterov": True}),
    Training("adam_deep", 96, 3, 32, "AdamW", 2e-3, 300, "linear"),
    Training("adam_max", 48, 2, 12, "Adamax", 2e-3),
)


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
    """A character model; logits of every next character."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def build(training: Training) -> nn.Module:
    if training.is_gpt:
        return GPT(training.width, training.depth)
    sizes = [64, *[training.width] * training.depth]
    hidden = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(sizes[-1], 10))


def batches(training: Training, generator: torch.Generator, start: float = 0.0, end: float = 1.0) -> Batches:
    """A function that draws one batch, inputs and labels, from the data between two shares of all."""
    if training.is_gpt:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
        text = b"".join(file.read_bytes() for file in files)
        tokens = torch.tensor([byte for byte in text if byte < VOCABULARY])
        tokens = tokens[int(start * len(tokens)) : int(end * len(tokens))]

        def draw() -> tuple[Tensor, Tensor]:
            starts = torch.randint(len(tokens) - CONTEXT, (training.batch_size, 1), generator=generator)
            pieces = tokens[starts + torch.arange(CONTEXT + 1)]
            return pieces[:, :-1], pieces[:, 1:]

    else:
        digits = load_digits()
        images = torch.tensor(digits.data / 16.0, dtype=torch.float32)
        labels = torch.tensor(digits.target)
        part = slice(int(start * len(images)), int(end * len(images)))
        images, labels = images[part], labels[part]

        def draw() -> tuple[Tensor, Tensor]:
            rows = torch.randint(len(images), (training.batch_size,), generator=generator)
            return images[rows], labels[rows]

    return draw


def plant_faults(iterations: int, seed: int) -> dict[int, str]:
    """Random iterations after the warm-up -> kind of fault."""
    places = random.Random(seed).sample(range(FIRST_FAULT, iterations), FAULTS_PER_KIND * len(FAULTS))
    return {place: FAULTS[i % len(FAULTS)] for i, place in enumerate(sorted(places))}


def record(training: Training, seed: int, iterations: int) -> dict[str, Any]:
    """Train, and return the trace."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model, draw, faults = build(training), batches(training, generator), plant_faults(iterations, seed)
    optimizer = getattr(torch.optim, training.optimizer)(model.parameters(), lr=training.lr, **training.options)
    norms, losses = [], []
    for iteration in range(iterations):
        inputs, labels = draw()
        fault = faults.get(iteration)
        if fault == "random_labels":
            classes = VOCABULARY if training.is_gpt else 10
            labels = torch.randint(classes, labels.shape, generator=generator)
        if fault == "constant_input":
            inputs = torch.ones_like(inputs)
        loss = F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())
        optimizer.zero_grad()
        (loss * {"scaled_loss3": 3.0, "scaled_loss10": 10.0}.get(fault or "", 1.0)).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        norms.append(float(f"{norm.item():.6g}"))
        losses.append(float(f"{loss.item():.6g}"))
        if fault is None:
            optimizer.param_groups[0]["lr"] = training.lr * training.lr_factor(iteration, iterations)
            optimizer.step()
    return {"name": training.name, "seed": seed, "norms": norms, "losses": losses, "faults": faults}


def record_all(directory: Path, seed: int, iterations: int = 4000, only: list[str] | None = None) -> list[Path]:
    """Write the traces of all trainings, or of those named, and return the files."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for number, training in enumerate(TRAININGS):
        if only is None or training.name in only:
            trace = record(training, seed + number, iterations)
            written.append(directory / f"{training.name}_{trace['seed']}.json")
            written[-1].write_text(json.dumps(trace, separators=(",", ":")))
            print(f"{written[-1]}: norms {min(trace['norms']):g} to {max(trace['norms']):g}", flush=True)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description="Record gradient norms with known faults.")
    parser.add_argument("directory", type=Path, nargs="?", help="where to write; without it this help is all")
    parser.add_argument("--seed", type=int, default=1, help="of the first training; the others follow (default 1)")
    parser.add_argument("--iterations", type=int, default=4000, help="of each training (default 4000)")
    parser.add_argument("--only", nargs="+", choices=[t.name for t in TRAININGS], help="names of trainings")
    args = parser.parse_args()
    if args.directory is None:
        parser.print_help()
        return
    torch.set_num_threads(1)
    record_all(args.directory, args.seed, args.iterations, args.only)


if __name__ == "__main__":
    main()
