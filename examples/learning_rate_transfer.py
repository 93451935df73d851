"""Compare the best learning rates of a narrow and a wide model, under muP and in the standard parametrization.

An MLP with three hidden layers learns scikit-learn's handwritten digits with Adam, at widths 64 and 512, over learning
rates that are four times apart. Under muP (ignite_monitor.scaling.parametrize) the best rate of both widths is the same
or one step of the sweep away. With one learning rate for all layers it falls as the model gets wider. The minima are
broad, so other seeds move them by a step.

    python examples/learning_rate_transfer.py               half a minute on one core
    python examples/learning_rate_transfer.py --steps 200   longer training runs
"""

import argparse
import math

import torch
from ignite.engine import create_supervised_trainer
from sklearn.datasets import load_digits
from torch import nn

from ignite_monitor.scaling import parametrize

NARROW, WIDE = 64, 512
RATES = [4.0**power for power in range(-6, -1)]  # of hidden layers, at width 64


def make_model(width: int) -> nn.Module:
    layers = [nn.Linear(64, width), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def load_data() -> tuple[torch.Tensor, torch.Tensor]:
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    return (images - images.mean(0)) / images.std(), torch.tensor(digits.target)


def prepare(kind: str, width: int, rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    if kind == "muP":
        # The prefactor belongs to width 1, and a hidden layer's learning rate is prefactor / width.
        scaled = parametrize(make_model, (32, width), sample_input=torch.zeros(1, 64), lr_prefactor=rate * NARROW)
        return scaled.model, torch.optim.Adam(scaled.param_groups)
    model = make_model(width)
    return model, torch.optim.Adam(model.parameters(), lr=rate)


def train(kind: str, width: int, rate: float, seed: int, steps: int) -> float:
    """The loss over all the data at the end."""
    images, targets = load_data()
    torch.manual_seed(seed)
    model, optimizer = prepare(kind, width, rate)
    batches = torch.randint(len(images), (steps, 128))
    trainer = create_supervised_trainer(model, optimizer, nn.functional.cross_entropy)
    trainer.run([(images[batch], targets[batch]) for batch in batches], max_epochs=1)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(images), targets)
    return float(loss) if loss.isfinite() else math.inf


def sweep(kind: str, width: int, rates: list[float], seeds: int, steps: int) -> list[float]:
    """The loss at each learning rate, as the geometric mean over seeds."""
    return [math.prod(train(kind, width, rate, seed, steps) for seed in range(seeds)) ** (1 / seeds) for rate in rates]


def draw(results: dict[tuple[str, int], list[float]], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), dpi=120, layout="constrained")
    kinds = list(dict.fromkeys(kind for kind, _ in results))
    for axes, kind in zip(figure.subplots(1, len(kinds), sharey=True), kinds, strict=True):
        for width, colour in ((NARROW, "#e07b00"), (WIDE, "#0b5fa5")):
            losses = results[kind, width]
            best = min(range(len(losses)), key=losses.__getitem__)
            axes.plot(RATES, losses, "o-", color=colour, markersize=4, label=f"width {width}")
            axes.plot(RATES[best], losses[best], "*", color=colour, markersize=15, markeredgecolor="white")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(f"{kind} parametrization" if kind != "muP" else "muP", loc="left")
        axes.set_xlabel("learning rate" if kind != "muP" else f"learning rate of hidden layers at width {NARROW}")
        axes.grid(visible=True, color="#e6e8eb", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("training loss at the end")
    figure.axes[0].legend(frameon=False, title="star: the best")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Learning rates at two widths, under muP and without it.")
    parser.add_argument("--steps", type=int, default=60, help="how long to train (default: 60)")
    parser.add_argument("--seeds", type=int, default=2, help="training runs at each learning rate (default: 2)")
    parser.add_argument("-o", "--output", default="learning_rate_transfer.png", help="where to draw the figure")
    args = parser.parse_args()

    results = {}
    for kind in ("muP", "standard"):
        for width in (NARROW, WIDE):
            losses = results[kind, width] = sweep(kind, width, RATES, args.seeds, args.steps)
            best = RATES[min(range(len(losses)), key=losses.__getitem__)]
            shown = " ".join(f"{loss:.2g}" for loss in losses)
            print(f"{kind:8}  width {width:3}  best learning rate 2^{round(math.log2(best))}  losses {shown}")
    draw(results, args.output)
    print(f"figure: {args.output}")


if __name__ == "__main__":
    main()
