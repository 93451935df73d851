"""Recovery from faults: held-out loss minus that of the undisturbed run, and steps lost, with and without handlers.

    python benchmarks/recovery.py [--seeds 3] [--models mlp cnn gpt] [--faults ...] [--healthy]
    python benchmarks/recovery.py --draw docs/recovery.md docs/recovery.png     draw a table of this script

Three models are trained on the same batches with one fault each, which begins at iteration 300 of 600. "Handlers" are
``GradMonitor(on_spike="skip")`` and ``RollbackHandler``. A step is lost if its update is not in the final weights.

Rows are independent: run processes with one model and one fault in parallel, ``--models cnn --faults "NaN batch"``.
"""

from __future__ import annotations

import functools
import logging
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import Tensor, nn
from trainings import digits, options, print_header, print_row

from ignite_monitor import GradMonitor, RollbackHandler

START, LENGTH = 300, 600
FAULTS = (
    "one bad batch", "forty bad batches", "rate x 100 for 3 steps", "rate 1e6 and left", "rate grows by 2 %",
    "exponent bit of a weight", "weight = 1000", "NaN batch", "NaN in the weights", "BatchNorm statistics ruined",
    "alternating data",
)  # fmt: skip
Batch = tuple[Tensor, Tensor]


class GPT(nn.Module):
    """Two pre-norm blocks over 28 characters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(28, 32), nn.Parameter(0.02 * torch.randn(32, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 28))
        self.register_buffer("mask", torch.full((32, 32), -math.inf).triu(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        hidden = self.tokens(x) + self.places[:length]
        return self.head(self.blocks(hidden, mask=self.mask[:length, :length])).transpose(1, 2)


@functools.cache
def images() -> tuple[Batch, Batch]:
    x, y = digits()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    return (x[order[:1397]], y[order[:1397]]), (x[order[1397:]], y[order[1397:]])


@functools.cache
def text() -> tuple[Batch, Batch]:
    """Characters of a second-order Markov chain."""
    generator = torch.Generator().manual_seed(0)
    table = torch.softmax(3.0 * torch.randn(28, 28, 28, generator=generator), -1).cumsum(-1)
    noise, sequence = torch.rand(40_000, generator=generator), [0, 1]
    for number in noise.tolist():
        sequence.append(min(int(torch.searchsorted(table[sequence[-2], sequence[-1]], number)), 27))
    rows = torch.tensor(sequence[:39_600]).view(-1, 33)
    return (rows[:1000, :-1], rows[:1000, 1:]), (rows[1000:, :-1], rows[1000:, 1:])


def make(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    if name == "mlp":
        model: nn.Module = nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 10))
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if name == "cnn":
        layers = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3)]
        model = nn.Sequential(*layers, nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))
        return model, torch.optim.AdamW(model.parameters(), lr=2e-3)
    model = GPT()
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3)


@torch.no_grad()
def damage(model: nn.Module, fault: str) -> None:
    """Damage the model itself."""
    weight = [p for p in model.parameters() if p.ndim > 1][-1].view(-1)[3:4]
    if fault == "exponent bit of a weight":
        weight.view(torch.int32).bitwise_xor_(1 << 30)
    elif fault == "weight = 1000":
        weight.fill_(1000.0)
    elif fault == "NaN in the weights":
        weight.fill_(math.nan)
    elif fault == "BatchNorm statistics ruined":
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean.add_(30.0)
                module.running_var.mul_(1000.0)


def bad(batch: Batch, iteration: int, fault: str) -> Batch:
    """Damage the batch."""
    x, y = batch
    if fault in ("one bad batch", "forty bad batches"):
        lasts = 1 if fault.startswith("one") else 40
        if START <= iteration < START + lasts:
            generator = torch.Generator().manual_seed(iteration)
            y = y[torch.randperm(len(y), generator=generator)]
            return (x * 30.0, y) if x.is_floating_point() else (x.flip(1), y.flip(0))
    if fault == "NaN batch" and iteration == START and x.is_floating_point():
        return torch.full_like(x, math.nan), y
    return batch


def train(
    name: str, seed: int, fault: str, handlers: bool, schedule: Callable[..., Any] | None = None, sizes: Any = (64,)
) -> dict[str, float]:
    """Train once, each part of the run with the next batch size: held-out loss, steps lost, rollbacks, spikes."""
    (x, y), (test_x, test_y) = text() if name == "gpt" else images()
    torch.manual_seed(seed)
    model, optimizer = make(name)
    model.register_buffer("steps_made", torch.zeros(()))
    rate = optimizer.param_groups[0]["lr"]
    generator = torch.Generator().manual_seed(100 + seed)

    def train_step(engine: Engine, place: Tensor) -> float:
        iteration = engine.state.iteration
        group = optimizer.param_groups[0]
        if fault == "rate x 100 for 3 steps" and iteration in (START, START + 3):
            group["lr"] = rate * (100.0 if iteration == START else 1.0)
        if fault == "rate 1e6 and left" and iteration == START:
            group["lr"] = 1e6
        if fault == "rate grows by 2 %" and iteration >= START:
            group["lr"] *= 1.02
        if iteration == START:
            damage(model, fault)
        batch = bad((x[place], y[place]), iteration, fault)
        loss = F.cross_entropy(model(batch[0]), batch[1])
        if fault == "NaN batch" and iteration == START and name == "gpt":
            loss = loss * math.nan
        if fault == "alternating data" and (iteration // 50) % 2:
            loss = loss + 1.0
        optimizer.zero_grad()
        loss.backward()
        weight = next(model.parameters())
        before = weight.detach().clone()
        optimizer.step()
        model.steps_made += not torch.equal(weight, before)
        return loss.item()

    trainer = Engine(train_step)
    rollback = None
    if schedule is not None:
        trainer.add_event_handler(Events.ITERATION_STARTED, schedule(optimizer, rate))
    if handlers:
        GradMonitor(model, optimizer, on_spike="skip").attach(trainer)
        rollback = RollbackHandler({"model": model, "optimizer": optimizer})
        rollback.attach(trainer)
    trainer.run(batches(generator, len(x), sizes), max_epochs=1, epoch_length=LENGTH)
    model.eval()
    with torch.no_grad():
        loss = float(F.cross_entropy(model(test_x), test_y))
    return {
        "loss": loss,
        "lost": LENGTH - float(model.steps_made),
        "rollbacks": 0.0 if rollback is None else trainer.state.metrics["rollback/count"],
        "spikes": trainer.state.metrics.get("grad/spike_count", 0.0),
    }


def batches(generator: torch.Generator, count: int, sizes: Sequence[int]) -> Iterator[Tensor]:
    for iteration in range(LENGTH):
        yield torch.randint(count, (sizes[iteration * len(sizes) // LENGTH],), generator=generator)


SCHEDULES: dict[str, Callable[[Any, float], Callable[[Engine], None]]] = {
    "one cycle": lambda optimizer, rate: (
        lambda e: set_rate(optimizer, 3 * rate * math.sin(math.pi * min(e.state.iteration / LENGTH, 0.999)) ** 2 + 1e-5)
    ),
    "warm restarts": lambda optimizer, rate: (
        lambda e: set_rate(optimizer, rate * 0.5 * (1 + math.cos(math.pi * (e.state.iteration % 150) / 150)))
    ),
    "cyclic": lambda optimizer, rate: (
        lambda e: set_rate(optimizer, rate * (1 + 2 * abs(e.state.iteration % 100 - 50) / 50))
    ),
}


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def draw(table: str, path: str) -> None:
    """Draw the rows of a table that this script has printed."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    ink, grey, colors = "#24292f", "#6e7781", {"without handlers": "#c0362c", "with handlers": "#0b5fa5"}
    shapes, limit = {"mlp": "o", "cnn": "s", "gpt": "^"}, 4000.0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0] in FAULTS and len(row) == 6]
    with rc_context({"font.size": 11, "text.color": ink, "axes.edgecolor": "#afb8c1"}):
        figure = Figure(figsize=(10, 5.2), dpi=140, layout="constrained", facecolor="white")
        axes = figure.add_subplot()
        title = "Held-out loss minus that of the undisturbed run: 11 faults, 3 models, mean of 3 seeds"
        figure.suptitle(title, x=0.01, ha="left", weight="bold")
        for fault, model, *losses, _, _ in rows:
            y = FAULTS.index(fault) + 0.22 * ([*shapes].index(model) - 1)
            ends = [min(float(loss), limit) if math.isfinite(float(loss)) else limit for loss in losses]
            axes.plot(ends, [y, y], color="#d0d7de", linewidth=1.2, zorder=1)
            for (name, color), end in zip(colors.items(), ends, strict=True):
                label = f"{name}, {model.upper()}" if fault == FAULTS[0] else None
                axes.scatter(end, y, s=30, marker=shapes[model], color=color, zorder=2, label=label)
        axes.set_xscale("symlog", linthresh=0.1, linscale=1.5)
        ticks = {0.0: "0", 0.1: "+0.1", 1.0: "+1", 10.0: "+10", 100.0: "+100", limit: "not finite"}
        axes.set_xticks([*ticks], [*ticks.values()])
        axes.set_yticks(range(len(FAULTS)), FAULTS)
        axes.set(xlim=(-0.02, 2 * limit), ylim=(len(FAULTS) - 0.4, -0.6))
        axes.minorticks_off()
        axes.tick_params(length=0, labelcolor=grey)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.grid(axis="x", color="#eaeef2")
        axes.set_axisbelow(True)
        axes.legend(loc="lower right", ncols=2, frameon=False, fontsize=9, bbox_to_anchor=(0.97, 0.0))
        figure.savefig(path)


def main() -> None:
    parser = options(__doc__, seeds=3)
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn", "gpt"])
    parser.add_argument("--faults", nargs="+", default=list(FAULTS))
    parser.add_argument("--healthy", action="store_true", help="only the healthy runs: rollbacks and spikes")
    parser.add_argument("--draw", nargs=2, metavar=("TABLE", "PICTURE"), help="draw a printed table; needs matplotlib")
    args = parser.parse_args()
    if args.draw:
        draw(Path(args.draw[0]).read_text(), args.draw[1])
        return
    logging.disable(logging.ERROR)
    if args.healthy:
        print_header("schedule", "model", "rollbacks", "false alarms in 1,000 iterations")
        for name in args.models:
            for schedule in (None, *SCHEDULES, "batches of 128, 4, 128"):
                change, sizes = SCHEDULES.get(schedule or ""), (128, 4, 128) if "128" in (schedule or "") else (64,)
                made = [train(name, seed, "", True, change, sizes) for seed in range(args.seeds)]
                alarms = 1000 * sum(m["spikes"] for m in made) / (LENGTH * len(made))
                back = sum(m["rollbacks"] for m in made)
                print_row(schedule or "constant", name, f"{back:.0f}", f"{alarms:.2f}")
        return
    print_header("fault", "model", "without", "with handlers", "steps lost", "rollbacks")
    for name in args.models:
        clean = [train(name, seed, "", False)["loss"] for seed in range(args.seeds)]
        for fault in args.faults:
            if "BatchNorm" in fault and name == "gpt":
                continue
            bare, kept = ([train(name, seed, fault, flag) for seed in range(args.seeds)] for flag in (False, True))
            above = [
                f"{statistics.fmean(m['loss'] - c for m, c in zip(made, clean, strict=True)):+.3f}"
                for made in (bare, kept)
            ]
            back = " ".join(f"{m['rollbacks']:.0f}" for m in kept)
            lost = " ".join(f"{m['lost']:.0f}" for m in kept)
            print_row(fault, name, *above, lost, back)


if __name__ == "__main__":
    main()
