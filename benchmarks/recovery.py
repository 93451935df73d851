"""Recovery from faults: held-out loss minus that of the undisturbed run, and steps lost, with and without handlers.

Models are trained on the same batches with one fault each, which begins at iteration 300 of 600. "Handlers" are
``GradMonitor(on_spike="skip")`` and ``RollbackHandler``. A step is lost if its update is not in the final weights.
``--regimes`` trains runs of ``regimes.py`` instead, in which nothing is wrong. ``--constants`` halves and doubles one
constant of RollbackHandler at a time, which takes ten minutes of one core.

    PYTHONPATH=. python benchmarks/recovery.py [--draw PICTURE]
    PYTHONPATH=. python benchmarks/recovery.py --regimes
    PYTHONPATH=. python benchmarks/recovery.py --constants
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from ignite.engine import Engine
from regimes import BY_CHANCE, CHANGE, REGIMES, Training, make_regime
from regimes import LENGTH as REGIME
from torch import Tensor, nn
from trainings import Batch, digit_images, make_small, mean_and_error, options, print_header, print_row

from ignite_monitor import GradMonitor, RollbackHandler
from ignite_monitor.rollback import limits

START, LENGTH = 300, 600
SEEDS = {"mlp": (7, 8, 9), "cnn": (7,)}  # constants of the handlers were chosen on seeds 0 to 2
MANY = 64  # seeds of regime changes in which chance decides what is learnt
FAULTS = (
    *("one bad batch", "forty bad batches", "rate x 100 for 3 steps", "rate permanently 1e6", "rate grows by 2 %"),
    *("exponent bit of a weight", "weight = 1000", "NaN batch", "NaN in the weights", "BatchNorm statistics ruined"),
    *("alternating data",),
)
LASTING = (
    *("labels shuffled for 100", "rate grows by 6 % for 100 steps", "slowly corrupted", "every tenth batch bad"),
    *("flipped weight decay",),
)
SENSITIVE = (  # faults and regime changes whose lost steps depend on constants
    *("forty bad batches", "weight = 1000", "labels shuffled for 100", "rate grows by 6 % for 100 steps"),
    *("alternating data", "labels shifted", "batches of 8", "mixup"),
)
REASONS = {  # why a constant of RollbackHandler exists
    "MEMORY": "losses in mean and standard deviation (known to 16 % then), and before the first threshold: follows a "
    "falling loss, and averages noise",
    "NOISE": "relative difference of two means that is none: over 20 losses with noise of 30 %, a mean varies by 7 %",
    "JUMP": "relative rise that is a sign: losses with little noise may rise",
    "FAR": "times the threshold: at a change of data, healthy norms reach 1.5 to 4.5 times theirs",
    "FAR_PATIENCE": "iterations far above the threshold: one or two bad batches are left to `on_spike`",
    "RECENT": "newest snapshots: the one before the first sign, and one before that",
    "OLDER": "older snapshots: the newest ones may be damaged already",
    "SPACING": "times `every` between older ones: they reach back 180 iterations",
    "CONFIRMED": "times the delay of the detection until a restored snapshot is confirmed: one that a slow fault has "
    "damaged is restored once only. Without it, a rate that grows by 2 % a step ends at +1.6 (MLP), with it at +0.3",
    "TESTS": "failed tests after which the data have changed, or trainings after which the snapshot is damaged: single "
    "batches may be bad. A passed test takes 1/4 off: `batches of 8` lost 268 to 624 steps without this",
    "PROBATION": "healthy iterations that end an instability: a ruined weight hid for up to nine batches",
    "WINDOW": "iterations in which rollbacks count, and accepted losses are remembered. These runs are too short: with "
    "data that alternate every 450 of 5,000 iterations there is one rollback, with half of it six",
    "TRIAL": "iterations of training on changed data before the snapshot is tested again",
    "LEARNT": "iterations after which data are final that are learnt: forty bad batches, and a test after them. "
    "`domains in turn` lost 256 steps in two rollbacks without this",
    "LASTING": "iterations after which data are final: labels shuffled for 100 are undone",
}
MODES = {"nothing": "without", "clipping": "clipping + isfinite", "handlers": "with handlers"}


def disturb(fault: str, age: int, model: nn.Module, optimizer: Any, batch: Batch) -> tuple[Batch, float]:
    """Disturb an iteration, ``age`` iterations after the fault began; return batch and an addition to the loss."""
    (x, y), group, rate = batch, optimizer.param_groups[0], optimizer.defaults["lr"]
    if fault == "alternating data":
        return batch, float((age // 50) % 2 == (age < 0))
    if age < 0:
        return batch, 0.0
    if age == 0:
        damage(model, fault)
    generator = torch.Generator().manual_seed(START + age)
    shuffled = y[torch.randperm(len(y), generator=generator)]
    is_bad = {"one bad batch": age == 0, "forty bad batches": age < 40, "every tenth batch bad": age % 10 == 0}
    if fault == "rate x 100 for 3 steps" and age in (0, 3):
        group["lr"] = rate * (100.0 if age == 0 else 1.0)
    elif fault == "rate permanently 1e6" and age == 0:
        group["lr"] = 1e6
    elif fault == "rate grows by 2 %" or (fault == "rate grows by 6 % for 100 steps" and age < 100):
        group["lr"] *= 1.02 if "2 %" in fault else 1.06
    elif fault == "flipped weight decay" and age == 0:
        group["weight_decay"] = -0.2 if "momentum" in group else -2.0
    elif is_bad.get(fault):
        x, y = 30.0 * x, shuffled
    elif fault == "slowly corrupted" or (fault == "labels shuffled for 100" and age < 100):
        share = min(1.0, age / 150) if fault == "slowly corrupted" else 1.0
        y = torch.where(torch.rand(len(y), generator=generator) < share, shuffled, y)
    elif fault == "NaN batch" and age == 0:
        x = torch.full_like(x, math.nan)
    return (x, y), 0.0


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


class Outcome(NamedTuple):
    """Result of a run, steps that are not in its final weights, and rollbacks."""

    loss: float
    lost: float
    rollbacks: float


def follow(training: Training, mode: str, length: int, *, decays: bool = False) -> Outcome:
    """Train with a mode; ``decays`` lowers the rate to 0 in the last quarter, so that chance counts less."""
    model, optimizer = training.model, training.optimizer
    model.register_buffer("steps_made", torch.zeros(()))
    rates: list[float] = []

    def train_step(engine: Engine, i: int) -> float:
        if decays and i >= 3 * length // 4:
            rates[:] = rates or [group["lr"] for group in optimizer.param_groups]
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * (length + 1 - i) / (length // 4 + 1)
        loss = training.loss(i)
        optimizer.zero_grad()
        loss.backward()
        weight = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        before = weight.detach().clone()
        if mode != "clipping" or (loss.isfinite() and nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite()):
            optimizer.step()
        model.steps_made += not torch.equal(weight, before)
        return loss.item()

    trainer = Engine(train_step)
    if mode == "handlers":
        GradMonitor(model, optimizer, on_spike="skip").attach(trainer)
        RollbackHandler({"model": model, "optimizer": optimizer}).attach(trainer)
    trainer.run(range(1, length + 1), max_epochs=1)
    model.eval()
    with torch.no_grad():
        loss = training.result()
    return Outcome(loss, length - float(model.steps_made), trainer.state.metrics.get("rollback/count", 0.0))


def train(name: str, seed: int, fault: str, mode: str) -> Outcome:
    """Train a model with a fault from iteration :data:`START` on; "" for none."""
    (x, y), (test_x, test_y) = digit_images()
    torch.manual_seed(seed)
    model, optimizer = make_small(name)
    generator = torch.Generator().manual_seed(100 + seed)

    def loss_of(i: int) -> Tensor:
        place = torch.randint(len(x), (64,), generator=generator)
        batch, extra = disturb(fault, i - START, model, optimizer, (x[place], y[place]))
        return F.cross_entropy(model(batch[0]), batch[1]) + extra

    training = Training(model, optimizer, loss_of, lambda: float(F.cross_entropy(model(test_x), test_y)))
    return follow(training, mode, LENGTH)


def draw(rows: Sequence[tuple[str, str, list[float]]], path: Path) -> None:
    """Draw losses by fault, model and mode; of the first faults only."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    ink, grey, colors = "#24292f", "#6e7781", dict(zip(MODES.values(), ("#c0362c", "#bf8700", "#0b5fa5"), strict=True))
    limit = 4000.0
    with rc_context({"font.size": 11, "text.color": ink, "axes.edgecolor": "#afb8c1"}):
        figure = Figure(figsize=(10, 5.2), dpi=140, layout="constrained", facecolor="white")
        axes = figure.add_subplot()
        title = "Held-out loss minus that of the undisturbed run, mean over seeds"
        figure.suptitle(title, x=0.01, ha="left", weight="bold")
        for fault, model, losses in rows:
            y = FAULTS.index(fault) + 0.22 * ([*SEEDS].index(model) - 0.5)
            ends = [min(loss, limit) if math.isfinite(loss) else limit for loss in losses]
            axes.plot(ends, [y] * len(ends), color="#d0d7de", linewidth=1.2, zorder=1)
            for (name, color), end in zip(colors.items(), ends, strict=True):
                label = f"{name}, {model.upper()}" if fault == FAULTS[0] else None
                axes.scatter(end, y, s=30, marker="os"[model == "cnn"], color=color, zorder=2, label=label)
        axes.set_xscale("symlog", linthresh=0.1, linscale=1.5)
        ticks = {0.0: "0", 0.1: "+0.1", 1.0: "+1", 10.0: "+10", 100.0: "+100", limit: "> 4,000, NaN"}
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


def counts(made: Sequence[Outcome]) -> list[str]:
    """Steps lost and rollbacks of each run; of many runs the range."""
    numbers = ([f"{m.lost:.0f}" for m in made], [f"{m.rollbacks:.0f}" for m in made])
    return [" ".join(it) if len(it) < 9 else f"{min(it, key=float)} to {max(it, key=float)}" for it in numbers]


def with_handlers(kinds: Sequence[str]) -> dict[str, Outcome]:
    """Train with handlers and each fault or regime change."""
    regimes = {k: follow(make_regime(k, 7), "handlers", REGIME, decays=True) for k in kinds if k in REGIMES}
    return {kind: regimes.get(kind) or train("mlp", 7, kind, "handlers") for kind in kinds}


def print_constants(names: Sequence[str], kinds: Sequence[str]) -> None:
    """Print steps lost, and the largest rise of a loss, with half and twice the value of each constant."""
    usual = with_handlers(kinds)
    print_header([7], "constant", "value", "reason", "half", "twice")
    print_row("", "", "steps lost with these values", *2 * [f"{sum(it.lost for it in usual.values()):.0f}"])
    for name in names:
        value, cells = getattr(limits, name), []
        for other in (value / 2 if isinstance(value, float) else max(1, round(value / 2)), 2 * value):
            setattr(limits, name, other)
            made = with_handlers(kinds)
            rises = {kind: made[kind].loss - usual[kind].loss for kind in kinds}
            worst = max(rises, key=lambda kind: rises[kind])
            text = f"{sum(it.lost for it in made.values()):.0f}; {worst} {rises[worst]:+.3f}"
            cells.append("the same" if made == usual else text)
        setattr(limits, name, value)
        print_row(f"`{name}`", f"{value:g}", REASONS[name], *cells)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--regimes", action="store_true", help="changes of data, objective or model instead of faults")
    parser.add_argument("--constants", action="store_true", help="half and twice the value of each constant")
    parser.add_argument("--draw", type=Path, metavar="PICTURE", help="draw the first faults; needs matplotlib")
    args = parser.parse_args()
    logging.disable(logging.ERROR)
    if args.constants:
        print_constants(["FAR_PATIENCE"] if args.quick else [*REASONS], SENSITIVE[:1] if args.quick else SENSITIVE)
        return
    if args.regimes:
        print_header(SEEDS["mlp"], "regime change", *MODES.values(), "handlers / nothing", "steps lost", "rollbacks")
        length = CHANGE + 40 if args.quick else REGIME
        for name in ["targets shifted"] if args.quick else REGIMES:
            seeds = range(7, 7 + MANY) if name in BY_CHANCE else SEEDS["mlp"][: 1 if args.quick else None]
            made = {mode: [follow(make_regime(name, s), mode, length, decays=True) for s in seeds] for mode in MODES}
            losses = {mode: fmean(run.loss for run in runs) for mode, runs in made.items()}
            ratio, pairs = losses["handlers"] / losses["nothing"], zip(made["handlers"], made["nothing"], strict=True)
            parts = [ratio + (ours.loss - ratio * other.loss) / losses["nothing"] for ours, other in pairs]
            cells = (f"{loss:.4f}" for loss in losses.values())
            print_row(name, *cells, mean_and_error(parts), *counts(made["handlers"]))
        return
    models = {"mlp": (7,)} if args.quick else SEEDS
    print_header(sorted({*sum(models.values(), ())}), "fault", "model", *MODES.values(), "steps lost", "rollbacks")
    rows = []
    for name, seeds in models.items():
        clean = [train(name, seed, "", "nothing").loss for seed in seeds]
        for fault in FAULTS[:1] if args.quick else FAULTS + LASTING:
            results = {mode: [train(name, seed, fault, mode) for seed in seeds] for mode in MODES}
            rises = [fmean(m.loss - c for m, c in zip(runs, clean, strict=True)) for runs in results.values()]
            cells = (f"{rise:+.3f}" if abs(rise) < 1e4 else f"{rise:+.0e}" for rise in rises)
            print_row(fault, name, *cells, *counts(results["handlers"]))
            rows += [(fault, name, rises)] if fault in FAULTS else []
    if args.draw:
        draw(rows, args.draw)


if __name__ == "__main__":
    main()
