"""Measure which layers learn and which diverge as an MLP in standard parametrization gets wider.

MLPs of three hidden layers learn handwritten digits (scikit-learn's, nothing is downloaded) with SGD and
cross-entropy, at widths 64 to 2048. RCCHandler measures how much the update of each layer's weights changes its output,
without the change of its input. The exponents of the width are printed and plotted in ``runs/rcc_width_sweep.png``.

    python examples/rcc_width_sweep.py

Theory of the first steps (https://arxiv.org/abs/2505.22491): at one learning rate for all widths, the update
of a hidden layer grows as width^(1/2) and that of the output layer as width^1. With the learning rate times
width^(-1/2) hidden layers keep updating by O(1), whatever the width, while the output layer still diverges, as
width^(1/2). That is harmless under cross-entropy, whose gradients stay bounded: controlled divergence.

This run (15 seconds on a CPU) confirms it: after one step the measured exponents are 0.53 and 0.51 for the
hidden layers and 1.17 for the output layer at one learning rate, 0.03, 0.01 and 0.65 with the learning rate times
width^(-1/2), and the input layer's update vanishes in either. The loss gets lower with the width all the same but for
the last width at one learning rate, where it rises again.

Its limits: after 30 steps the digits are nearly learned and gradients are small, in wider networks sooner, and the
output layer's exponent is about 0: the divergence is that of the first steps. Six widths, one seed and thirty steps
are no evidence for the limit of infinite width, nor for the transfer of a learning rate.
"""

import argparse
import math
from pathlib import Path

import torch
from ignite.engine import Events, create_supervised_trainer
from sklearn.datasets import load_digits
from torch import nn

from ignite_monitor import RCCHandler

LAYERS = {"0": "input layer", "2": "hidden layer 1", "4": "hidden layer 2", "6": "output layer"}
SCALINGS = ("one learning rate", "learning rate × width$^{-1/2}$"), (0.0, -0.5)
LAST = 5  # steps at the end that are averaged


def make_batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    digits = load_digits()
    images, targets = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    images = (images - images.mean()) / images.std()
    generator = torch.Generator().manual_seed(0)
    return [
        (images[rows], targets[rows])
        for rows in (torch.randint(0, len(images), (64,), generator=generator) for _ in range(steps))
    ]


def make_model(width: int) -> nn.Sequential:
    """Standard parametrisation: weights of variance 2 / fan-in, in the output layer 1 / fan-in."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, 10),
    )  # fmt: skip
    for name, layer in model.named_children():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=math.sqrt((1 if name == "6" else 2) / layer.in_features))
            nn.init.zeros_(layer.bias)
    return model


def train(width: int, lr: float, steps: int) -> dict[str, list[float]]:
    """Train at one width; return the RMS change of each layer's output by its weights in each step, and the loss."""
    model = make_model(width)
    trainer = create_supervised_trainer(model, torch.optim.SGD(model.parameters(), lr=lr), nn.CrossEntropyLoss())
    handler = RCCHandler(model, include="^[0246]$")
    handler.attach(trainer)
    seen: dict[str, list[float]] = {name: [] for name in (*LAYERS, "loss")}

    @trainer.on(Events.ITERATION_COMPLETED)
    def record(engine):
        for name in LAYERS:
            norm = float(engine.state.metrics[f"rcc/weight_update/{name}"])
            seen[name].append(norm / math.sqrt(10 if name == "6" else width))
        seen["loss"].append(engine.state.output)

    trainer.run(make_batches(steps), max_epochs=1)
    return seen


def exponent(widths: list[int], values: list[float]) -> float:
    """The slope of the values over the widths, both in logarithms, by least squares."""
    x, y = torch.tensor(widths).log(), torch.tensor(values).log()
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def main() -> None:
    parser = argparse.ArgumentParser(description="Refined coordinate check of an MLP over its width.")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512, 1024, 2048])
    parser.add_argument("--lr", type=float, default=0.1, help="of the smallest width (default: 0.1)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", type=Path, default=Path("runs/rcc_width_sweep.png"))
    args = parser.parse_args()

    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(15, 5.5), layout="constrained")
    for panel, title, power in zip(panels[:2], *SCALINGS, strict=True):
        runs = [train(width, args.lr * (width / args.widths[0]) ** power, args.steps) for width in args.widths]
        print(title)
        for name, layer in LAYERS.items():
            first = [run[name][1] for run in runs]
            last = [sum(run[name][-LAST:]) / LAST for run in runs]
            slopes = exponent(args.widths, first), exponent(args.widths, last)
            print(f"  {layer:15} width^{slopes[0]:+.2f} after one step, width^{slopes[1]:+.2f} at the end")
            (line,) = panel.loglog(args.widths, first, marker="o", label=f"{layer}, width$^{{{slopes[0]:+.2f}}}$")
            panel.loglog(args.widths, last, linestyle=":", color=line.get_color())
        losses = [sum(run["loss"][-LAST:]) / LAST for run in runs]
        print("  loss at the end", " ".join(f"{loss:.2f}" for loss in losses))
        panel.set(title=title, xlabel="width", ylabel="$(W_t - W_0)\\, x_t$, root mean square")
        panel.legend(
            title=f"after one step; dotted: after {args.steps}",
            loc="upper center",
            bbox_to_anchor=(0.5, -0.15),
            ncols=2,
        )
        panels[2].semilogx(args.widths, losses, marker="o", label=title)
    panels[2].set(title=f"loss after {args.steps} steps", xlabel="width", ylabel="cross-entropy")
    panels[2].legend()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, dpi=110)
    print(f"Figure: {args.output}")


if __name__ == "__main__":
    main()
