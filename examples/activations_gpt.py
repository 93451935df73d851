"""A small GPT on the Python standard library's own sources, with attention entropy and dead units in TensorBoard.

python examples/activations_gpt.py [--iterations 200]
tensorboard --logdir runs/activations_gpt
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from ignite.handlers.tensorboard_logger import TensorboardLogger
from torch import Tensor, nn

from ignite_monitor import ActivationHandler

LENGTH, WIDTH, HEADS, LAYERS, BATCH = 64, 64, 4, 3, 16
DIRECTORY = "runs/activations_gpt"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(heads.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def read_sources(size: int = 2_000_000) -> Tensor:
    """Bytes of modules of the standard library."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
    return torch.frombuffer(text[:size], dtype=torch.uint8).long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=200)
    iterations = parser.parse_args().iterations
    torch.manual_seed(0)
    text = read_sources()
    model = GPT()
    # With this bias many units are dead: see activation/blocks.1.mlp.1/dead_fraction.
    nn.init.constant_(model.blocks[1].mlp[0].bias, -1.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def train_step(engine: Engine, start: Tensor) -> float:
        windows = text[start[:, None] + torch.arange(LENGTH + 1)]
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(train_step)
    handler = ActivationHandler(
        model, activations={"std": True, "dead_fraction": True}, include=r"attention$|mlp\.1$", attention=True
    )
    handler.attach(trainer, Events.ITERATION_STARTED(every=10))

    with TensorboardLogger(log_dir=DIRECTORY) as logger:
        handler.log_to(logger, trainer)

        @trainer.on(Events.ITERATION_COMPLETED(every=50))
        def report(engine: Engine) -> None:
            values = engine.state.metrics
            dead = [f"{float(values[f'activation/blocks.{i}.mlp.1/dead_fraction']):.2f}" for i in range(LAYERS)]
            entropy = [f"{float(values[f'attention_entropy/blocks.0.attention/head_{i}']):.2f}" for i in range(HEADS)]
            iteration, loss = engine.state.iteration, engine.state.output
            print(f"iteration {iteration}: loss {loss:.2f}, dead units by layer {' '.join(dead)}")
            print(f"    attention entropy by head of the first layer {' '.join(entropy)}")

        starts = torch.randint(0, len(text) - LENGTH - 1, (iterations, BATCH))
        trainer.run(list(starts))
    print(f"Now: tensorboard --logdir {DIRECTORY}")


if __name__ == "__main__":
    main()
