"""Best learning rate of a small Llama and of a ViT at three widths, in the standard parametrization and under muP.

The Llama (two layers, 32 bytes of context) learns the docstrings of Python's standard library, the ViT (two layers, 17
positions) scikit-learn's handwritten digits. The learning rate of Adam rises over 10 steps and falls to 0. The loss is
measured at the end, on held-out text and on the first 256 digits. Except for the readout, initial weights are the same
in both parametrizations; the standard one has a single learning rate.

Every run is one line of a file, so that an interrupted search continues where it stopped.

    PYTHONPATH=. python benchmarks/learning_rate_transfer.py RUNS.jsonl [--minutes 60]   train what is missing
    PYTHONPATH=. python benchmarks/learning_rate_transfer.py RUNS.jsonl --draw FILE.png   figure and tables
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
import logging
import math
import sysconfig
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from trainings import digits, mean_and_error, options, provenance

from ignite_monitor.scaling import parametrize

KINDS = {"standard": "standard", "mup": "muP"}
TASKS = {"llama": "Llama", "vit": "ViT"}
SHOWN = {"llama": ((2.5, 2.75, 3, 3.5), (2.45, 3.6)), "vit": ((0.1, 0.2, 0.5, 1, 2), (0.1, 2.5))}  # losses
WIDTHS = (64, 256, 512)
STEPS, BATCH, LENGTH, HELD_OUT = 120, 8, 32, 64
HEAD = 8  # dimension of an attention head at all widths
# log2 of the learning rate that the search starts at; under muP that of a layer of width 1.
STARTS = {("llama", "standard"): -7, ("llama", "mup"): -2, ("vit", "standard"): -9, ("vit", "mup"): -3}


class Run(NamedTuple):
    """The settings of one run."""

    task: str
    kind: str
    width: int
    rate: int
    seed: int


Results = dict[tuple[str, str, int, int], dict[int, float]]  # task, kind, width and seed -> rate -> loss


@functools.cache
def text() -> Tensor:
    """Docstrings of the standard library, as bytes."""
    docstrings = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(path.read_bytes())
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        docstrings += [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    return torch.tensor(list("\n".join(filter(None, docstrings)).encode("ascii", "ignore")))


def passages(starts: Tensor) -> dict[str, Tensor]:
    ids = torch.stack([text()[start : start + LENGTH] for start in starts])
    return {"input_ids": ids, "labels": ids}


def images(index: Tensor) -> dict[str, Tensor]:
    pixels, target = digits(8.0)
    return {"pixel_values": (pixels[index] - 1).view(-1, 1, 8, 8), "labels": target[index]}


def make(task: str, width: int) -> torch.nn.Module:
    import transformers

    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2}
    if task == "vit":
        vit = transformers.ViTConfig(
            **sizes, num_attention_heads=width // HEAD, image_size=8, patch_size=2, num_channels=1, num_labels=10
        )
        return transformers.ViTForImageClassification(vit)
    heads = {"num_attention_heads": width // HEAD, "num_key_value_heads": max(width // HEAD // 2, 1), "head_dim": HEAD}
    llama = transformers.LlamaConfig(**sizes, **heads, vocab_size=128, pad_token_id=None)
    return transformers.LlamaForCausalLM(llama)


def data(task: str) -> tuple[Callable[[], dict[str, Tensor]], dict[str, Tensor]]:
    """A function that draws a batch, and the held-out batch."""
    if task == "vit":
        return lambda: images(torch.randint(len(digits()[1]), (2 * BATCH,))), images(torch.arange(256))
    train = len(text()) * 9 // 10
    held_out = torch.linspace(train, len(text()) - LENGTH, HELD_OUT).long()
    return lambda: passages(torch.randint(train - LENGTH, (BATCH,))), passages(held_out)


def loss_of(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(**batch)
    return output.loss if "input_ids" in batch else F.cross_entropy(output.logits, batch["labels"])


def train(run: Run, steps: int = STEPS) -> float:
    """Loss at the end."""
    torch.manual_seed(run.seed)
    draw, held_out = data(run.task)
    standard = run.kind == "standard"
    scaled = parametrize(
        functools.partial(make, run.task),
        (32, run.width),
        sample_input=draw(),
        lr_prefactor=2.0**run.rate,
        preset="standard" if standard else "mup",
    )
    groups = scaled.model.parameters() if standard else scaled.param_groups
    optimizer = torch.optim.Adam(groups, lr=2.0**run.rate, fused=True)
    torch.manual_seed(run.seed)  # the same batches for all

    def train_step(engine: Engine, batch: dict[str, Tensor]) -> None:
        optimizer.zero_grad()
        loss_of(scaled.model, batch).backward()
        optimizer.step()

    trainer = Engine(train_step)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10) * (1 - step / steps))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: schedule.step())
    trainer.run([draw() for _ in range(steps)], max_epochs=1)
    with torch.no_grad():
        loss = float(loss_of(scaled.model.eval(), held_out))
    return loss if math.isfinite(loss) else 100.0


def lowest(losses: dict[int, float], default: int = 0) -> int:
    return min(losses, key=losses.__getitem__, default=default)


def wanted(results: Results, seeds: int) -> Iterator[Run]:
    """Runs until the best learning rate of each seed has neighbours: within a factor of four, at the last width two.

    Wider models are also trained with the best rate of the first width. The caller adds each run to the results.
    """
    for seed, width, ((task, kind), start) in itertools.product(range(seeds), WIDTHS, STARTS.items()):
        known, reach, missing = results[task, kind, width, seed], 1 if width == WIDTHS[-1] else 2, [start]
        while missing:
            best = lowest(known, start)
            rates = [*range(best - reach, best + reach + 1), lowest(results[task, kind, WIDTHS[0], seed], best)]
            missing = [rate for rate in rates if rate not in known]
            yield from (Run(task, kind, width, rate, seed) for rate in missing[:1])


def read(path: Path) -> tuple[Results, list[str]]:
    """The runs of a file, and what they were measured with."""
    results: Results = defaultdict(dict)
    measured = []
    for line in map(json.loads, path.read_text().splitlines() if path.exists() else []):
        if isinstance(line, list):
            task, kind, width, rate, seed, loss = line
            results[task, kind, width, seed][rate] = loss
        else:
            measured.append(line["measured"])
    return results, measured


def work(path: Path, seeds: int, minutes: float) -> None:
    """Train the missing runs and append a line for each, after one that says what they are measured with."""
    end = time.monotonic() + 60 * minutes
    results, _ = read(path)
    with path.open("a", buffering=1) as file:
        file.write(json.dumps({"measured": provenance()}) + "\n")
        for run in wanted(results, seeds):
            if time.monotonic() > end:
                return
            started, loss = time.process_time(), round(train(run), 5)
            results[run.task, run.kind, run.width, run.seed][run.rate] = loss
            file.write(json.dumps([*run, loss]) + "\n")
            print(*run, loss, f"{time.process_time() - started:.1f} s", flush=True)


def vertex(losses: dict[int, float]) -> tuple[float, float] | None:
    """Vertex of a parabola of log loss over log2 of the rate, through the best; None if that has no neighbours."""
    rate = lowest(losses)
    if not {rate - 1, rate + 1} <= losses.keys():
        return None
    left, middle, right = (math.log(losses[near]) for near in (rate - 1, rate, rate + 1))
    slope, curvature = (right - left) / 2, right - 2 * middle + left
    return rate - slope / curvature, math.exp(middle - slope**2 / (2 * curvature))


def by_seed(results: Results, *cell: object) -> dict[int, dict[int, float]]:
    """Seed -> learning rate -> loss of a task, kind and width."""
    return {seed: losses for (*key, seed), losses in sorted(results.items()) if tuple(key) == cell and losses}


def table(results: Results) -> str:
    """Best learning rates and their losses: means over seeds and standard errors."""
    narrow, *wide = WIDTHS
    head = ["model", "parametrization", f"best at {narrow}", *(f"moved at {width}" for width in wide)]
    lines = [[*head, *(f"loss at {width}" for width in WIDTHS), f"at {wide[-1]} with the rate of {narrow}"]]
    lines.append(["---"] * len(lines[0]))
    for task, kind in STARTS:
        runs = {width: by_seed(results, task, kind, width) for width in WIDTHS}
        fits = {
            width: {seed: fit for seed, losses in seeds.items() if (fit := vertex(losses)) is not None}
            for width, seeds in runs.items()
        }
        first = {seed: rate for seed, (rate, _) in fits[narrow].items()}
        moved = [[rate - first[seed] for seed, (rate, _) in fits[width].items() if seed in first] for width in wide]
        cells = [f"2^{mean_and_error([*first.values()], 1)}", *(mean_and_error(shifts, 1, "+") for shifts in moved)]
        losses = [mean_and_error([loss for _, loss in fits[width].values()], 2) for width in WIDTHS]
        carried = [runs[wide[-1]].get(seed, {}).get(lowest(runs[narrow][seed]), math.nan) for seed in first]
        lines.append([TASKS[task], KINDS[kind], *cells, *losses, mean_and_error(carried, 2)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(results: Results, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 5.6), dpi=100, layout="constrained", facecolor="white")
    grid = figure.subplots(len(TASKS), len(KINDS), sharey="row")
    for (task, kind), axes in zip(STARTS, grid.flat, strict=True):
        for width, colour in zip(WIDTHS, ("#e07b00", "#0b7a75", "#3a3f9e"), strict=True):
            label: str | None = f"width {width}"
            for losses in by_seed(results, task, kind, width).values():
                points = sorted(losses.items())
                axes.plot(*zip(*points, strict=True), ".-", color=colour, linewidth=0.9, markersize=4, label=label)
                label = None
                if (fit := vertex(losses)) is not None:
                    axes.plot(
                        *fit, "*", color=colour, markersize=11, markeredgecolor="white", markeredgewidth=0.6, zorder=3
                    )
        ticks, limits = SHOWN[task]
        axes.set_title(f"{TASKS[task]}: {KINDS[kind]}", loc="left", fontsize=10)
        axes.set(yscale="log", ylim=limits)
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_yticks([], minor=True)
        axes.tick_params(labelsize=8)
        axes.grid(visible=True, color="#e6e8eb", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("log2 of the learning rate" + ("" if kind == "standard" else " at width 1"), fontsize=8.5)
    for axes in grid[:, 0]:
        axes.set_ylabel("loss at the end", fontsize=8.5)
    grid[0, 0].legend(frameon=False, fontsize=8)
    figure.savefig(path)


def main() -> None:
    parser = options(__doc__, seeds=3)
    parser.add_argument("runs", type=Path, help="the file of runs")
    parser.add_argument("--draw", type=Path, help="draw what there is, and print a table, instead of training")
    parser.add_argument("--minutes", type=float, default=60.0, help="when to stop (default: 60)")
    args = parser.parse_args()
    logging.getLogger("ignite_monitor").setLevel(logging.ERROR)
    if args.draw:
        results, measured = read(args.runs)
        draw(results, args.draw)
        print("\n".join(dict.fromkeys(measured)), table(results), sep="\n\n")
    elif args.quick:
        print(train(Run("vit", "mup", 64, -3, 0), steps=2))
    else:
        work(args.runs, args.seeds, args.minutes)


if __name__ == "__main__":
    main()
