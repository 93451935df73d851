"""What every handler costs, and all of them together: the beginning of docs/costs.md, as it stands there.

First as a part of a train step, on a transformer of many small layers and on one of few large ones, in every iteration,
every tenth and every hundredth; beside what everyone knows the price of: ``clip_grad_norm_``, two forward passes, a
copy of the weights. Then how what a monitored iteration costs grows with blocks, width, sequences, their length, and
parameters alone (the rows of the embedding): the exponent p of cost ~ size^p, fitted to five sizes.

Each variant has a model of its own that is trained, and is compared with the iterations of the same run that it does
not watch; all take turns, and medians over the turns are shown, so that the ratios hold on a busy machine too. Values
come to the host in every monitored iteration, as with a logger. On the CPU time is the thread's own. What an iteration
costs that is not watched is too little to be seen beside a train step, and is measured without forward and backward;
one in 100 is put together from a monitored iteration, the one after it, and 98 of these.

It takes four minutes of one core, and says on stderr how far it is: half of it are the turns on the larger model.

    PYTHONPATH=. python benchmarks/bench_cost.py [--device cuda] [--rounds 4] [--growth-rounds 1]
"""

from __future__ import annotations

import argparse
import platform
import sys
import textwrap
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from bench_grad_monitor import make_model
from cost_runs import ALL, COMPARISONS, MONITORS, NEVER, Runner, Setting
from fits import power_law

MODELS = {"small": Setting(24, 32, sequences=4), "wide": Setting(4, 256, length=32)}
AXES = {
    "blocks": [Setting(blocks, 32, sequences=4) for blocks in (2, 4, 8, 16, 32)],
    "width": [Setting(width=width) for width in (32, 64, 128, 256, 512)],
    "sequences": [Setting(sequences=sequences) for sequences in (8, 16, 32, 64, 128)],
    "length": [Setting(sequences=2, length=length) for length in (32, 64, 128, 256, 512)],
    "rows": [Setting(width=16, rows=rows) for rows in (2**14, 2**15, 2**16, 2**17, 2**18)],
}


class Share(NamedTuple):
    """What is added to a step, as a part of it: medians over turns, and their standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, turns: list[float]) -> Share:
        middle = median(turns)
        # Of normally distributed turns the median's error is 1.2533 / sqrt(n) standard deviations.
        spread = 1.4826 * median(abs(each - middle) for each in turns)
        return cls(middle, 1.2533 * spread / len(turns) ** 0.5)

    def __str__(self) -> str:
        least = 2 * self.error
        if self.value < least:
            return f"< {max(100 * least, 0.1):.1f} %"
        if self.value < 0.0005:
            return "< 0.1 %"
        return f"{100 * self.value:.0f} %" if self.value >= 0.0995 else f"{100 * self.value:.1f} %"


def unwatched(setting: Setting, device: str, name: str) -> float:
    """Seconds that a handler adds to an iteration that it does not watch."""
    plain, never = (Runner(setting, device, variant, idle=True) for variant in ("", name))
    return median(median(never(50, NEVER)) - median(plain(50, NEVER)) for _ in range(20))


def shares(setting: Setting, device: str, rounds: int) -> tuple[float, dict[str, list[Share]], dict[str, float]]:
    """Seconds of a step; what is added in every iteration, one in 10, one in 100; seconds added where not watched."""
    rests = {name: unwatched(setting, device, name) for name in MONITORS}
    runners = {name: Runner(setting, device, name) for name in (*COMPARISONS, *MONITORS)}
    steps: list[float] = []
    added: dict[str, list[tuple[float, ...]]] = {name: [] for name in runners}
    for turn in range(-1, rounds):  # the first is to warm up
        print(f"{setting}: turn {turn + 1} of {rounds}", file=sys.stderr, flush=True)
        for name, runner in runners.items():
            always = median(runner(4, every=1))
            *others, monitored, after = runner(10, every=10)
            rest = rests.get(name, 0.0)
            step = median(others) - rest
            costs = [always - step, *((monitored + after - 2 * step + (n - 2) * rest) / n for n in (10, 100))]
            if turn >= 0:
                steps.append(step)
                added[name].append(tuple(cost / step for cost in costs))
    found = {name: [Share.of(list(each)) for each in zip(*turns, strict=True)] for name, turns in added.items()}
    return median(steps), found, rests


def growth(settings: list[Setting], device: str, rounds: int) -> dict[str, list[float]]:
    """Seconds that a step takes, and that each variant adds to it, at every size."""
    costs: dict[str, list[float]] = {}
    for setting in settings:
        print(f"{setting}", file=sys.stderr, flush=True)
        runners = {name: Runner(setting, device, name) for name in ("`clip_grad_norm_`", *MONITORS) if name != ALL}
        steps: list[float] = []
        added: dict[str, list[float]] = {name: [] for name in runners}
        for turn in range(-1, rounds):
            for name, runner in runners.items():
                times = runner(8, every=2)
                step = median(times[1::2])
                if turn >= 0:
                    steps.append(step)
                    added[name].append(median(times[::2]) - step)
        for name, each in {"a train step": steps, **added}.items():
            costs.setdefault(name, []).append(median(each))
    return costs


def exponent(axis: str, costs: list[float]) -> str:
    """The exponent that a cost grows with along an axis, and its standard error, where there is a cost at all."""
    if min(costs) <= 0:
        return "-"
    slope = power_law([getattr(setting, axis) for setting in AXES[axis]], costs)
    return f"{slope.value:.2f} ± {slope.error:.2f}"


def machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor()
    return f"one thread of {name}"


def described(setting: Setting, seconds: float) -> str:
    model = make_model(setting.width, "cpu", setting.blocks, setting.rows)
    million = sum(each.numel() for each in model.parameters()) / 1e6
    return (
        f"{setting.blocks} blocks of width {setting.width} ({million:.1f} million parameters, "
        f"{setting.sequences * setting.length} tokens, {1e3 * seconds:.0f} ms)"
    )


def table(head: list[str], rows: dict[str, list[str]]) -> str:
    lines = [["", *head], *([name, *cells] for name, cells in rows.items())]
    written = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([written[0].replace("|  |", "| |"), "|" + "---|" * len(lines[0]), *written[1:]])


def section(device: str, rounds: int, growth_rounds: int) -> str:
    found = {name: shares(setting, device, rounds) for name, setting in MODELS.items()}
    costs = {axis: growth(settings, device, growth_rounds) for axis, settings in AXES.items()}
    added = {
        name: [str(share) for _, each, _ in found.values() for share in each[name]]
        for name in (*COMPARISONS, *MONITORS)
    }
    for name in COMPARISONS:
        added[name][1:3] = added[name][4:] = "", ""
    exponents = {name: [exponent(axis, costs[axis][name]) for axis in AXES] for name in costs["blocks"]}
    ranges = [f"{axis}: {getattr(each[0], axis):,} to {getattr(each[-1], axis):,}" for axis, each in AXES.items()]
    rests = [1e6 * rest for _, _, each in found.values() for name, rest in each.items() if name != ALL]
    every = ["every iteration", "one in 10", "one in 100"]
    models = " and ".join(f"{name}: {described(MODELS[name], each[0])}" for name, each in found.items())
    paragraphs = [
        "What watching every iteration, one in 10 or one in 100 adds to a train step (forward, backward, AdamW), in "
        "percent of the step, the values read in each; and what else is known to cost something. Two transformers, "
        f"{models}, {machine(device)}, torch {torch.__version__.partition('+')[0]}. `python benchmarks/bench_cost.py` "
        "prints this section.",
        table([f"{name}, {each}" for name in MODELS for each in every], added),
        f"A handler makes an iteration that it does not watch {min(rests):.0f} to {max(rests):.0f} us longer. What one "
        "costs that it watches grows as a size to the power of (a fit to five sizes, with its standard error):",
        table(ranges, exponents),
        "Exponents below 1 are those of costs of which a part does not grow; a dash is one lost in noise. Sequences "
        "are those in a batch, length is theirs, and rows are the embedding's: parameters that no token needs.",
    ]
    return "\n\n".join(
        ["## What it costs", *(each if each[0] == "|" else textwrap.fill(each, 120) for each in paragraphs)]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--growth-rounds", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(section(args.device, args.rounds, args.growth_rounds))


if __name__ == "__main__":
    main()
