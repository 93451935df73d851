"""Best learning rate of a small Llama and of a ViT at two widths, in the standard parametrization and under muP.

The Llama (two layers, 32 bytes of context) learns the docstrings of Python's standard library, the ViT (two layers, 17
positions) scikit-learn's handwritten digits. The learning rate of Adam rises over 10 steps and falls to 0. The loss is
measured at the end, on held-out text and on the first 256 digits. Except for the readout, initial weights are the same
in both parametrizations; the standard one has a single learning rate. Rates are a factor of two apart. The best one is
the vertex of a parabola of log loss through the best of them and its neighbours.

    PYTHONPATH=. python benchmarks/learning_rate_transfer.py [--draw PICTURE]
"""

from __future__ import annotations

import ast
import copy
import functools
import logging
import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from trainings import digits, mean_and_error, options, print_header, print_row
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

from ignite_monitor.scaling import Parametrization, parametrize

WIDTHS, SEEDS, STEPS = (64, 256), 2, 120
BATCH, LENGTH, HELD_OUT = 8, 32, 64
HEAD = 8  # dimension of an attention head at all widths
# Model and preset -> log2 of the learning rates; under muP those of a layer of width 1.
GRIDS = {
    ("Llama", "standard"): range(-9, -4),
    ("Llama", "mup"): range(-4, 1),
    ("ViT", "standard"): range(-11, -5),
    ("ViT", "mup"): range(-5, 0),
}
SHOWN = {"Llama": ((2.5, 2.75, 3, 3.5), (2.45, 3.6)), "ViT": ((0.2, 0.5, 1, 2), (0.15, 2.5))}  # ticks and limits

Batch = dict[str, Tensor]
Losses = dict[int, float]  # log2 of the learning rate -> loss


@functools.cache
def text() -> Tensor:
    """Docstrings of the standard library, as bytes."""
    docstrings = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(path.read_bytes())
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        docstrings += [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    return torch.tensor(list("\n".join(filter(None, docstrings)).encode("ascii", "ignore")))


def make(task: str, width: int) -> torch.nn.Module:
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2}
    heads = width // HEAD
    if task == "ViT":
        image = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
        return ViTForImageClassification(ViTConfig(**sizes, num_attention_heads=heads, **image))
    attention = {"num_attention_heads": heads, "num_key_value_heads": max(heads // 2, 1), "head_dim": HEAD}
    return LlamaForCausalLM(LlamaConfig(**sizes, **attention, vocab_size=128, pad_token_id=None))


def draw_batch(task: str, *, held_out: bool = False) -> Batch:
    if task == "ViT":
        pixels, target = digits(8.0)
        rows = torch.arange(256) if held_out else torch.randint(len(target), (2 * BATCH,))
        return {"pixel_values": (pixels[rows] - 1).view(-1, 1, 8, 8), "labels": target[rows]}
    end = len(text()) * 9 // 10
    starts = torch.linspace(end, len(text()) - LENGTH, HELD_OUT).long()
    ids = torch.stack([text()[i : i + LENGTH] for i in (starts if held_out else torch.randint(end - LENGTH, (BATCH,)))])
    return {"input_ids": ids, "labels": ids}


def loss_of(model: torch.nn.Module, batch: Batch) -> Tensor:
    output = model(**batch)
    return output.loss if "input_ids" in batch else F.cross_entropy(output.logits, batch["labels"])


def train(initial: Parametrization, task: str, preset: str, rate: int, seed: int, steps: int) -> float:
    """Return the loss at the end."""
    scaled = copy.deepcopy(initial)
    scaled.lr_prefactor = 2.0**rate
    groups = scaled.model.parameters() if preset == "standard" else scaled.param_groups
    optimizer = torch.optim.Adam(groups, lr=2.0**rate, fused=True)
    torch.manual_seed(seed)  # the same batches for all

    def train_step(engine: Engine, batch: Batch) -> None:
        optimizer.zero_grad()
        loss_of(scaled.model, batch).backward()
        optimizer.step()

    trainer = Engine(train_step)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10) * (1 - step / steps))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: schedule.step())
    trainer.run([draw_batch(task) for _ in range(steps)], max_epochs=1)
    with torch.no_grad():
        loss = float(loss_of(scaled.model.eval(), draw_batch(task, held_out=True)))
    return loss if math.isfinite(loss) else 100.0


def search(task: str, preset: str, width: int, seed: int, steps: int) -> Losses:
    torch.manual_seed(seed)
    scaled = parametrize(functools.partial(make, task), (32, width), sample_input=draw_batch(task), preset=preset)
    return {rate: train(scaled, task, preset, rate, seed, steps) for rate in GRIDS[task, preset]}


def vertex(losses: Losses) -> tuple[float, float]:
    """Vertex of a parabola of log loss over log2 of the rate, through the best; NaN if that has no neighbours."""
    rate = min(losses, key=losses.get)
    if not {rate - 1, rate + 1} <= losses.keys():
        return math.nan, math.nan
    left, middle, right = (math.log(losses[near]) for near in (rate - 1, rate, rate + 1))
    slope, curvature = (right - left) / 2, right - 2 * middle + left
    return rate - slope / curvature, math.exp(middle - slope**2 / (2 * curvature))


def cells(runs: dict[int, list[Losses]]) -> list[str]:
    """Best learning rates and their losses, and the loss of the widest with the best of the narrowest."""
    fits = {width: [vertex(losses) for losses in of_seeds] for width, of_seeds in runs.items()}
    narrow, *wide = runs
    moved = [[rate - first for (rate, _), (first, _) in zip(fits[w], fits[narrow], strict=True)] for w in wide]
    carried = [losses[min(first, key=first.get)] for losses, first in zip(runs[wide[-1]], runs[narrow], strict=True)]
    losses = [mean_and_error([loss for _, loss in fits[width]], 2) for width in runs]
    rates = [f"2^{mean_and_error([rate for rate, _ in fits[narrow]], 1)}"]
    return [*rates, *(mean_and_error(shift, 1, "+") for shift in moved), *losses, mean_and_error(carried, 2)]


def draw(results: dict[tuple[str, str], dict[int, list[Losses]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 5.6), dpi=100, layout="constrained", facecolor="white")
    grid = figure.subplots(2, 2, sharey="row", squeeze=False)
    for ((task, preset), runs), axes in zip(results.items(), grid.flat, strict=False):
        for (width, of_seeds), color in zip(runs.items(), ("#e07b00", "#0b7a75", "#3a3f9e"), strict=False):
            for seed, losses in enumerate(of_seeds):
                label = None if seed else f"width {width}"
                axes.plot([*losses], [*losses.values()], ".-", color=color, linewidth=0.9, markersize=4, label=label)
                axes.plot(*vertex(losses), "*", color=color, markersize=11, markeredgecolor="white", zorder=3)
        ticks, limits = SHOWN[task]
        axes.set_title(f"{task}: {'muP' if preset == 'mup' else preset}", loc="left", fontsize=10)
        axes.set(yscale="log", ylim=limits)
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_yticks([], minor=True)
        axes.tick_params(labelsize=8)
        axes.grid(visible=True, color="#e6e8eb", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("log2 of the learning rate" + " at width 1" * (preset == "mup"), fontsize=8.5)
    for axes in grid[:, 0]:
        axes.set_ylabel("loss at the end", fontsize=8.5)
    grid[0, 0].legend(frameon=False, fontsize=8)
    figure.savefig(path)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--draw", type=Path, metavar="PICTURE", help="draw all losses; needs matplotlib")
    args = parser.parse_args()
    logging.getLogger("ignite_monitor").setLevel(logging.ERROR)
    plan, widths, seeds, steps = [*GRIDS], WIDTHS, SEEDS, STEPS
    if args.quick:
        plan, widths, seeds, steps = [("ViT", "mup")], (64, 128), 1, 2
    narrow, *wide = widths
    moved, losses = [f"moved at {width}" for width in wide], [f"loss at {width}" for width in widths]
    last = f"at {wide[-1]} with the rate of {narrow}"
    print_header(range(seeds), "model", "", f"best rate at {narrow}", *moved, *losses, last)
    results = {}
    for task, preset in plan:
        runs = {width: [search(task, preset, width, seed, steps) for seed in range(seeds)] for width in widths}
        results[task, preset] = runs
        print_row(task, "muP" if preset == "mup" else preset, *cells(runs))
    if args.draw:
        draw(results, args.draw)


if __name__ == "__main__":
    main()
