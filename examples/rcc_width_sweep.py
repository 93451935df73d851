"""Measure which layers learn and which diverge as an MLP in standard parametrization gets wider.

MLPs of three hidden layers learn handwritten digits (scikit-learn's, nothing is downloaded) with SGD and
cross-entropy, at widths 64 to 1024. ``coordinate_check`` fits how each layer's output changes with the width: by the
layer's own weights and by its input. It draws ``runs/rcc_width_sweep.png``.

    python examples/rcc_width_sweep.py

Theory of the first step (https://arxiv.org/abs/2505.22491): at one learning rate for all widths, the update of a hidden
layer grows as width^(1/2) and that of the output layer as width^1. With the learning rate times width^(-1/2), as here,
hidden layers update by O(1), whatever the width, while the output layer still grows as width^(1/2). That is harmless
under cross-entropy, whose gradients stay bounded.
"""

import argparse
import itertools
import math
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

from ignite_monitor.scaling import coordinate_check

LAYERS = {"0": "input layer", "2": "hidden layer 1", "4": "hidden layer 2", "6": "output layer"}


def make_model(width: int, lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Standard parametrization: weights of variance 2 / fan-in, in the output layer 1 / fan-in."""
    sizes = [64, width, width, width, 10]
    layers = [nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
    for layer in layers:
        nn.init.normal_(layer.weight, std=math.sqrt((1 if layer is layers[-1] else 2) / layer.in_features))
        nn.init.zeros_(layer.bias)
    model = nn.Sequential(*[module for layer in layers for module in (layer, nn.ReLU())][:-1])
    return model, torch.optim.SGD(model.parameters(), lr)


def main() -> None:
    parser = argparse.ArgumentParser(description="Refined coordinate check of an MLP over its width.")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--lr", type=float, default=0.1, help="of the smallest width (default: 0.1)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--output", type=Path, default=Path("runs/rcc_width_sweep.png"))
    args = parser.parse_args()
    digits = load_digits()
    images, targets = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    images = (images - images.mean()) / images.std()

    def batch(width: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.randint(len(images), (64,))
        return images[rows], targets[rows]

    def run(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        return make_model(width, args.lr * (width / args.widths[0]) ** -0.5)

    result = coordinate_check(run, batch, args.widths, steps=args.steps, seeds=2)
    updates = {(slope.layer, slope.step): slope for slope in result.slopes if slope.quantity == "weight_update"}
    for layer, title in LAYERS.items():
        first, last = updates[layer, 1], updates[layer, args.steps]
        print(f"{title:15} width^{first.slope:+.2f} after one step, width^{last.slope:+.2f} at the end")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    result.plot(args.output)
    print(f"Figure: {args.output}")


if __name__ == "__main__":
    main()
