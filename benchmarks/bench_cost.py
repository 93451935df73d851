"""Cost of every monitor, compared with a train step and with operations whose cost is known.

Two transformers are trained, one of many small layers and one of few large layers; on a GPU under autocast in
bfloat16, the second one of the size of GPT-2. Every variant has a model and an optimizer of its own. All variants
take turns; what a variant adds to an iteration is the difference of the fastest iterations of a turn with and without
it. The table has medians over turns with their standard errors, and ratios only where their errors are at most a
quarter of them: run it on a quiet machine. Values are copied to the host in every monitored iteration, as with a
logger. On the CPU, times are those of the thread. The cost of an iteration that is not monitored is measured without
forward and backward passes.

    PYTHONPATH=. python benchmarks/bench_cost.py [--device cuda] [--rounds 5] [--only GradMonitor ...]
"""

from __future__ import annotations

import itertools
import math
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from ignite.engine import Engine, Events
from torch import Tensor, nn
from trainings import options, print_head, print_row, provenance

import ignite_monitor as im
from ignite_monitor.replicas import handler as replicas
from ignite_monitor.setup_check import handler as setup_check

NEVER = 10**9
ITERATIONS = 6
CLIP, CLOSURES, PASSES, CLONE = "clip_grad_norm_", "three closures per module", "two forward passes", "weight clones"
NOISE, CURVATURE = "GradientNoiseScaleHandler, two micro-batches", "CurvatureHandler"


class Cost(NamedTuple):
    """Median of measurements, and the standard error of a median of normal ones, in seconds."""

    seconds: float
    error: float

    @classmethod
    def of(cls, values: list[float]) -> Cost:
        middle = median(values)
        deviation = 1.4826 * median(abs(value - middle) for value in values)
        return cls(middle, 1.2533 * deviation / len(values) ** 0.5 if len(values) > 2 else math.inf)

    def text(self, unit: float, digits: int = 2) -> str:
        return f"{self.seconds / unit:.{digits}f} ± {self.error / unit:.{digits}f}"

    def over(self, other: Cost, form: str = "{:.2f} x") -> str:
        """The ratio, if its relative error is at most a quarter."""
        errors = [cost.error / cost.seconds if cost.seconds > 0 else math.inf for cost in (self, other)]
        return "noise" if math.hypot(*errors) > 0.25 else form.format(self.seconds / other.seconds)


class Setting(NamedTuple):
    """Sizes of a transformer and of its batches."""

    blocks: int
    width: int
    sequences: int
    length: int

    def model(self) -> nn.Module:
        block = nn.TransformerEncoderLayer(self.width, 4, 4 * self.width, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(block, self.blocks, enable_nested_tensor=False)
        layers = nn.Embedding(50, self.width), encoder, nn.LayerNorm(self.width), nn.Linear(self.width, 10, bias=False)
        return nn.Sequential(*layers)


SETTINGS = {"cpu": {"wide": Setting(4, 256, 8, 32)}, "cuda": {"large": Setting(12, 768, 16, 512)}}


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        outputs = model(tokens)
    return nn.functional.cross_entropy(outputs.float().flatten(0, 1), tokens.flatten() % 10)


COMPARISONS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    CLIP: lambda model, _: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9),
    PASSES: torch.no_grad()(lambda model, tokens: (model(tokens), model(tokens))),
    CLONE: lambda model, _: [parameter.detach().clone() for parameter in model.parameters()],
}


def three_closures(model: nn.Module, watched: Callable[[], bool]) -> None:
    """Forward hooks as one writes them without a monitor."""

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if watched():
            tensor = (output[0] if isinstance(output, tuple) else output).detach()
            module.__dict__["statistics"] = tensor.mean().item(), tensor.std().item(), tensor.norm(dim=-1).mean().item()

    for module in model.modules():
        module.register_forward_hook(hook)


def replica_check(model: nn.Module, optimizer: torch.optim.Optimizer) -> im.ReplicaCheckHandler:
    """A check with a second rank that has the same state, without the time of the collective."""
    replicas.all_reduce = lambda values, **_: values
    check = im.ReplicaCheckHandler(model, optimizer)
    check.ranks.resolve = lambda: vars(check.ranks).update(size=2, groups=[None], max=lambda values: values)
    return check


def endless_check(model: nn.Module, optimizer: torch.optim.Optimizer) -> im.SetupCheck:
    setup_check.ITERATIONS = setup_check.MOST = NEVER
    return im.SetupCheck(model, optimizer)


def checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """The checks of a checkpoint, without its file."""
    handler: Any = im.HealthyCheckpoint({"model": model, "optimizer": optimizer}, lambda *_: None)
    handler.on_host = lambda: None
    return handler


Make = Callable[[nn.Module, torch.optim.Optimizer], Any]
# The second entry is the comparison that the cost is a multiple of.
MONITORS: dict[str, tuple[Make, str]] = {
    "GradMonitor": (im.GradMonitor, CLIP),
    "GradMonitor, RobustThreshold": (lambda m, o: im.GradMonitor(m, o, threshold=im.RobustThreshold()), CLIP),
    "GradMonitor, per_parameter": (lambda m, o: im.GradMonitor(m, o, per_parameter=True), CLIP),
    "WeightUpdateHandler": (im.WeightUpdateHandler, CLONE),
    "OptimizerStateHandler": (im.OptimizerStateHandler, CLONE),
    "ActivationHandler": (lambda m, _: im.ActivationHandler(m, activations=True), CLOSURES),
    "ActivationHandler, attention": (lambda m, _: im.ActivationHandler(m, activations=True, attention=True), CLOSURES),
    "SpectralNormHandler": (lambda m, _: im.SpectralNormHandler(m), CLONE),
    "RCCHandler": (lambda m, _: im.RCCHandler(m), PASSES),
    "HistogramHandler": (lambda m, _: im.HistogramHandler(m), CLONE),
    "RoutingHandler": (lambda m, _: im.RoutingHandler(m, routers=r"linear1$", top_k=2), CLOSURES),  # first of each MLP
    "ReplicaCheckHandler": (replica_check, CLONE),
    "ReplayCheckHandler": (lambda m, _: im.ReplayCheckHandler(m, loss=loss_of), PASSES),
    "StepStatsHandler": (im.StepStatsHandler, CLIP),
    "SetupCheck": (endless_check, CLIP),  # in a run it takes three iterations
    "SpikeMonitor": (lambda m, _: im.SpikeMonitor(lambda engine: 1.0, prefix="value", flag="value_spike"), CLIP),
    "DriftMonitor": (lambda m, _: im.DriftMonitor(lambda engine: 1.0), CLIP),
    "HealthyCheckpoint": (checkpoint, CLONE),
    "RollbackHandler between snapshots": (
        lambda m, o: im.RollbackHandler({"model": m, "optimizer": o}, loss=lambda engine: 1.0),
        CLONE,
    ),
    NOISE: (lambda m, o: im.GradientNoiseScaleHandler(m, o, micro_batches=2), CLIP),
    CURVATURE: (lambda m, o: im.CurvatureHandler(m, o, loss=loss_of), PASSES),
}


class Runner:
    """A trainer with one variant, a comparison or a monitor, and the times of its iterations; "" for none."""

    def __init__(self, setting: Setting, device: str, variant: str, passes: bool = True) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            model = setting.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.every = 1
        self._stamps: list[float] = []
        self._clock = _synchronized if device == "cuda" else time.thread_time
        self._batch = torch.randint(0, 50, (setting.sequences, setting.length), device=device)
        chunks = (2 if variant == NOISE else 1) if passes else 0

        def train_step(engine: Engine, tokens: Tensor) -> None:
            optimizer.zero_grad()
            for part in tokens.chunk(chunks) if chunks else ():
                (loss_of(model, part) / chunks).backward()
            if variant in COMPARISONS and self.monitored(engine, engine.state.iteration):
                COMPARISONS[variant](model, tokens)
            optimizer.step()

        self.trainer = Engine(train_step)
        if variant == CLOSURES:
            three_closures(model, lambda: self.monitored(self.trainer, self.trainer.state.iteration))
        if variant in MONITORS:
            monitor = MONITORS[variant][0](model, optimizer)
            monitor.attach(self.trainer, Events.ITERATION_STARTED(event_filter=self.monitored))
            self.trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda _: monitor.on_host())
        self.trainer.add_event_handler(Events.GET_BATCH_STARTED, lambda: self._stamps.append(self._clock()))

    def monitored(self, engine: Engine, iteration: int) -> bool:
        return iteration % self.every == 0

    def __call__(self, iterations: int, every: int) -> list[float]:
        """Seconds of each iteration of a run, without the first two; one in ``every`` is monitored."""
        self.every = every
        self._stamps.clear()
        self.trainer.state.max_epochs = None
        self.trainer.run([self._batch] * (iterations + 3), max_epochs=1)
        return [after - before for before, after in itertools.pairwise(self._stamps)][2:]


def _synchronized() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def unmonitored(setting: Setting, device: str, name: str, rounds: int) -> Cost:
    """Seconds that a monitor adds to an unmonitored iteration."""
    plain, variant = (Runner(setting, device, kind, passes=False) for kind in ("", name))
    return Cost.of([median(variant(50, NEVER)) - median(plain(50, NEVER)) for _ in range(2 * rounds)])


def measure(setting: Setting, device: str, names: list[str], rounds: int) -> tuple[Cost, dict[str, Cost]]:
    """Seconds of a train step, and seconds that each variant adds to a monitored iteration."""
    runners = {name: Runner(setting, device, name) for name in ("", *names)}
    fastest: dict[str, list[float]] = {name: [] for name in runners}
    for turn in range(-1, rounds):  # the first turn warms up
        for name, runner in runners.items():
            # Curvature takes seconds: one monitored iteration per turn.
            seconds = max(runner(2, every=4)) if name == CURVATURE else min(runner(ITERATIONS, every=1))
            if turn >= 0:
                fastest[name].append(seconds)
    steps = fastest[""]
    added = {name: Cost.of([a - b for a, b in zip(fastest[name], steps, strict=True)]) for name in names}
    return Cost.of(steps), added


def machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    file = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", file.read_text(encoding="utf-8") if file.exists() else "")
    return f"one thread of {[*names, platform.processor()][0]}"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--device", choices=[*SETTINGS], default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[""], help="first letters of the monitors to measure")
    args = parser.parse_args()
    device, rounds = args.device, args.rounds
    settings = {"quick": Setting(2, 32, 4, 8)} if args.quick else {"small": Setting(24, 32, 4, 8)} | SETTINGS[device]
    if args.quick:
        rounds, args.only = 1, ["StepStats", "Healthy"]
    monitors = [name for name in MONITORS if name.startswith(tuple(args.only))]
    compared = [CLIP, CLOSURES, PASSES, CLONE]
    print(f"{provenance(0)}, on {machine(device)}")
    for label, setting in settings.items():
        step, added = measure(setting, device, [*compared, *monitors], rounds)
        size = sum(parameter.numel() for parameter in setting.model().parameters()) / 1e6
        print(f"\n{label}: {setting.blocks} blocks of width {setting.width}, {size:.1f} million parameters, "
              f"{setting.sequences * setting.length} tokens, {step.text(1e-3)} ms per step\n")  # fmt: skip
        print_head("", "ms", "of a step", "one in 100", "not monitored", "compared")
        for name in compared:
            print_row(name, added[name].text(1e-3), added[name].over(step, "{:.1%}"), "", "", "")
        for name in monitors:
            idle = unmonitored(setting, device, name, rounds)
            cost, comparison = added[name], MONITORS[name][1]
            rare = Cost(*((one + 99 * other) / 100 for one, other in zip(cost, idle, strict=True)))
            shares = cost.over(step, "{:.1%}"), rare.over(step, "{:.2%}")
            ratio = f"{cost.over(added[comparison])} {comparison}"
            print_row(f"`{name}`", cost.text(1e-3), *shares, f"{idle.text(1e-6, 0)} us", ratio)


if __name__ == "__main__":
    main()
