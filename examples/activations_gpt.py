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


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, nn.ReLU(), batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(block, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.tokens(tokens) + self.positions.weight, self.mask, is_causal=True))


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
    # With this bias many units are dead: see activation/encoder.layers.1.activation/dead_fraction.
    nn.init.constant_(model.encoder.layers[1].linear1.bias, -1.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def train_step(engine: Engine, start: Tensor) -> float:
        windows = text[start[:, None] + torch.arange(LENGTH + 1)]
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(train_step)
    kinds = {"std": True, "dead_fraction": True}
    handler = ActivationHandler(model, activations=kinds, include=r"self_attn$|activation$", attention=True)
    handler.attach(trainer, Events.ITERATION_STARTED(every=10))

    with TensorboardLogger(log_dir=DIRECTORY) as logger:
        handler.log_to(logger, trainer)

        @trainer.on(Events.ITERATION_COMPLETED(every=50))
        def report(engine: Engine) -> None:
            values, layers = engine.state.metrics, [f"encoder.layers.{i}" for i in range(LAYERS)]
            dead = [f"{values[f'activation/{layer}.activation/dead_fraction']:.2f}" for layer in layers]
            entropy = [f"{values[f'attention_entropy/{layers[0]}.self_attn/head_{i}']:.2f}" for i in range(HEADS)]
            print(f"iteration {engine.state.iteration}: loss {engine.state.output:.2f}")
            print(f"    dead units by layer {' '.join(dead)}")
            print(f"    attention entropy by head of the first layer {' '.join(entropy)}")

        starts = torch.randint(0, len(text) - LENGTH - 1, (iterations, BATCH))
        trainer.run(list(starts))
    print(f"Now: tensorboard --logdir {DIRECTORY}")


if __name__ == "__main__":
    main()
