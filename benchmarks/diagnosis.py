"""Plant faults in small trainings, and compare the first finding of ``ignite-monitor summary`` with the cause.

Prints the tables of docs/diagnosis.md. Seeds 0, 1 and 9 chose the limits of the rules; the tables are of seed 10.
"""

from __future__ import annotations

import copy
import logging
import math
import re
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from faulty_trainings import Plan, train
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.swa_utils import AveragedModel
from trainings import options, provenance

from ignite_monitor import HDF5Logger
from ignite_monitor.hdf5.reader import read_hdf5
from ignite_monitor.report.run import Run
from ignite_monitor.report.summary import summarise


class Fault(NamedTuple):
    """A fault, or a healthy variant: the trainings it is planted in, and the kinds of findings that name its cause."""

    name: str
    trainings: str
    kinds: str = ""  # any of them; empty for a healthy variant
    changes: dict[str, Any] = {}  # of a Plan
    words: str = ""  # that the first finding's text has to match too


def change(name: str, by: Callable[[Tensor], Any], at: int = 0) -> Any:
    """A function that changes the parameters whose names match; with ``at``, in that iteration."""

    @torch.no_grad()
    def apply(model: nn.Module) -> None:
        for key, parameter in model.named_parameters():
            if re.search(name, key):
                by(parameter)

    return (lambda i, m: apply(m) if i == at else None) if at else apply


def without(pattern: str) -> Any:
    return lambda m: [p for n, p in m.named_parameters() if not re.search(pattern, n)]


def frozen(pattern: str) -> Any:
    return change(pattern, lambda p: p.requires_grad_(False))


def deep(activation: type[nn.Module], depth: int) -> Any:
    layers = [part for _ in range(depth) for part in (nn.Linear(64, 64), activation())]
    return lambda _: nn.Sequential(nn.Linear(20, 64), activation(), *layers, nn.Linear(64, 10))


class Call(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleDict(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            layer(x)  # the output is unused
        return self.function(x)


def inserted(module: nn.Module, at: int) -> Any:
    return lambda m: nn.Sequential(*[*m][:at], copy.deepcopy(module), *[*m][at:])


def spoiled(factor: float, which: Callable[[int], bool]) -> Any:
    """A function that multiplies half the inputs, or replaces the targets of tokens, in some iterations."""

    def batch(i: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if which(i) and x.is_floating_point():
            x[: len(x) // 2] *= factor
            return x, factor * y if y.is_floating_point() else y
        return (torch.full_like(x, 7), torch.randint_like(y, 128)) if which(i) else (x, y)

    return batch


def nan_at(which: Callable[[int], bool], target: bool = False) -> Any:
    """A function that puts NaN into a row of some batches."""

    def batch(i: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        (y if target else x)[0 if which(i) else len(x) :] = math.nan
        return x, y

    return batch


def log_zero(i: int, loss: Tensor, out: Tensor, y: Tensor) -> Tensor:
    return loss if i < 150 else loss - 1e-3 * (out * 1e3).softmax(-1).min(-1).values.log().mean()


def cosine(steps: int, warmup: int = 0) -> Any:
    return lambda s: min(1.0, (s + 1) / max(1, warmup)) * (0.55 + 0.45 * math.cos(math.pi * (s % steps) / steps))


def scaler(growth_interval: int = 2000) -> Any:
    return torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=growth_interval)


def without_gradients(model: nn.Module) -> None:
    model.lstm.forward = torch.no_grad()(model.lstm.forward)


def scaled(name: str, factor: float, at: int = 0) -> Any:
    return change(name, lambda p: p.mul_(factor), at)


average = cache(AveragedModel)  # one of each model
UNUSED = Call(lambda x: x, layer=nn.Linear(64, 64))
EVERY_TENTH = spoiled(300.0, lambda i: i > 60 and i % 10 == 0)
FEATURE = 10.0 ** (5 * (torch.arange(20) == 0))
FAULTS = (
    Fault("a layer in no optimizer", "mlp cnn gpt", "not_in_optimizer", {"members": without(r"^2|mlp|^3")}),
    Fault("zero_grad forgotten", "mlp gpt lstm rl", "gradients_not_zeroed", {"zero": False}),
    Fault("evaluation mode", "cnn lstm", "evaluation_mode", {"mode": False}),
    Fault("the same batch again and again", "mlp gpt", "batch_repeats", {"batches": 1}),
    Fault("frozen by mistake", "cnn gpt", "requires_grad_false", {"after": frozen(r"^0|^3|blocks\.1")}),
    Fault("GradScaler not given", "mlp cnn", "scaler_not_given", {"scaler": scaler(), "given": False}),
    Fault(
        *("head replaced after the optimizer was made", "mlp lstm", "stale_optimizer"),
        {"after": lambda m: m.add_module(*copy.deepcopy([*m.named_children()][-1]))},
    ),
    Fault("learning rate 0", "lstm mlp rl", "zero_learning_rate", {"rate": 0.0}),
    Fault("detach() by mistake", "mlp", "unused_parameters", {"before": inserted(Call(Tensor.detach), 3)}),
    Fault("a layer whose output is unused", "mlp", "unused_parameters", {"before": inserted(UNUSED, 2)}),
    Fault("loss multiplied by 0", "mlp", "no_gradients", {"loss": lambda i, loss, out, y: 0 * loss}),
    Fault(
        *("bfloat16 weights, small rate", "mlp", "lost_updates"),
        {"after": lambda m: m.bfloat16(), "batch": lambda i, x, y: (x.bfloat16(), y), "rate": 0.05},
    ),
    Fault("step() forgotten", "mlp cnn", "no_step", {"step": False}),
    Fault("learning rate × 300", "mlp cnn gpt lstm rl", "large_updates", {"rate": 300.0}),
    Fault("discriminator's rate × 500", "gan", "large_updates", {"rates": (500.0, 1.0)}, "discriminator"),
    Fault("generator's rate × 300", "gan", "large_updates", {"rates": (1.0, 300.0)}, "generator"),
    Fault(
        *("warm-up to a rate × 300", "mlp gpt cnn", "rate_rose"),
        {"rate": 300.0, "schedule": lambda s: 10 ** min(0.0, s / 50 - 3)},
    ),
    Fault("rate × 300 from step 150 on", "gpt", "rate_rose", {"schedule": lambda s: 1.0 if s < 150 else 300.0}),
    Fault("loss summed, not averaged", "cnn", "large_updates", {"loss": lambda i, loss, out, y: loss * y.numel()}),
    Fault(
        *("accumulation without division", "cnn", "large_updates"),
        {"accumulate": 16, "loss": lambda i, loss, out, y: 16 * loss, "rate": 3.0},
    ),
    Fault("learning rate × 1e-5", "mlp gpt lstm", "small_updates", {"rate": 1e-5}),
    Fault("discriminator stops learning", "gan", "small_updates", {"rates": (1e-6, 1.0)}),
    Fault("rate decayed to 0 too early", "mlp gpt", "rate_vanished", {"schedule": lambda s: max(0.0, 1 - s / 60)}),
    Fault("scheduler stepped per batch", "cnn lstm", "rate_vanished", {"schedule": lambda s: 0.1 ** (s // 15)}),
    Fault(
        *("one parameter group's rate × 300", "mlp lstm", "group_rate"),
        {"members": lambda m: [{"params": [*m.parameters()][i::3], **({} if i else {"lr": 0.6})} for i in range(3)]},
    ),
    Fault("gradient clipped to 1e-7", "cnn lstm", "clipped_away", {"clip": 1e-7}),
    Fault("one batch × 1e3", "mlp cnn gpt lstm rl", "bad_batches", {"batch": spoiled(1e3, lambda i: i == 170)}),
    Fault("every 10th batch bad", "mlp lstm", "periodic_spikes", {"batch": EVERY_TENTH}, "every 10"),
    Fault("every 10th batch bad", "cnn", "periodic_spikes input_scale", {"batch": EVERY_TENTH}),
    Fault(
        *("every 7th batch's targets × 60", "lstm", "periodic_spikes"),
        *({"batch": lambda i, x, y: (x, 60 * y if i > 80 and i % 7 == 0 else y)}, "every 7"),
    ),
    Fault("a sample of NaN", "mlp cnn", "nonfinite_input", {"batch": nan_at(lambda i: i == 170)}),
    Fault("a target of NaN", "lstm", "nonfinite_loss", {"batch": nan_at(lambda i: i == 140, target=True)}),
    Fault("labels are noise", "mlp cnn gpt", "not_learning", {"batch": lambda i, x, y: (x, y[torch.randperm(len(y))])}),
    Fault("inputs not normalized", "mlp lstm cnn", "input_scale", {"batch": lambda i, x, y: (500 * x + 2000, y)}),
    Fault("inputs of 0", "lstm", "input_scale", {"batch": lambda i, x, y: (0 * x, y)}),
    Fault("targets not normalized", "lstm", "loss_scale", {"batch": lambda i, x, y: (x, 3000 * y)}),
    Fault("rewards × 1e4", "rl", "loss_scale", {"reward": 1e4}),
    Fault("softmax before cross_entropy", "mlp cnn", "bounded_outputs", {"before": inserted(nn.Softmax(1), 99)}),
    Fault(
        *("a weight × 1e6 between steps", "gpt mlp lstm", "weight_changed"),
        {"each": scaled(r"blocks\.0\.mlp\.0\.weight|^2\.weight|weight_hh", 1e6, 175)},
    ),
    Fault("head × 1e4 between steps", "cnn", "weight_changed", {"each": scaled("^8.weight", 1e4, 155)}),
    Fault("log(0) in the loss", "mlp cnn gpt", "nonfinite_loss", {"loss": log_zero}),
    Fault(
        *("sqrt(0) in the loss", "mlp lstm", "nonfinite_loss"),
        {"loss": lambda i, loss, out, y: loss + 1e-3 * (out * (i < 120)).abs().sum().sqrt()},
    ),
    Fault("14 sigmoid layers", "mlp", "vanishing_gradients", {"before": deep(nn.Sigmoid, 14)}),
    Fault("24 sigmoid layers", "mlp", "vanishing_gradients", {"before": deep(nn.Sigmoid, 24)}),
    Fault(
        *("14 ReLU layers, weights × 6", "mlp", "exploding_gradients activation_outlier"),
        {"before": deep(nn.ReLU, 14), "after": scaled("weight", 6)},
    ),
    Fault("recurrent weights × 30", "lstm", "exploding_gradients", {"after": scaled("weight_hh", 30)}),
    Fault(
        *("biases of -30 before ReLU", "mlp cnn", "dead_units"),
        {"after": change(r"^[24]\.bias", lambda p: p.fill_(-30))},
    ),
    Fault("all weights 0", "mlp", "dead_units", {"after": scaled("weight|bias", 0)}),
    Fault("dropout of 0.99", "mlp", "dead_units", {"before": inserted(nn.Dropout(0.99), 2)}),
    Fault("queries and keys × 20", "gpt", "large_logits", {"after": scaled("qkv.weight", 20)}),
    Fault("weight decay × 1e4", "mlp gpt", "weights_shrank", {"optimizer": partial(AdamW, weight_decay=20.0)}),
    Fault("overfits a tiny data set", "mlp", "overfitting", {"held_out": True, "batches": 2}),
    Fault("slow loader", "mlp cnn", "data_wait", {"batch": lambda i, x, y: time.sleep(0.012) or (x, y)}),
    Fault("float16 overflows", "cnn", "overflows", {"scaler": scaler(2), "autocast": torch.float16}),
    Fault("eps of 10", "mlp gpt", "epsilon_dominated", {"optimizer": partial(AdamW, eps=10.0)}),
    Fault("gradient ascent", "mlp", "wrong_sign", {"optimizer": partial(AdamW, maximize=True)}),
    Fault("gradient ascent", "cnn", "wrong_sign", {"optimizer": partial(AdamW, maximize=True), "rate": 0.04}),
    Fault("one feature × 1e5", "mlp", "input_scale", {"batch": lambda i, x, y: (x * FEATURE, y)}),
    Fault("loss divided by 1e6", "cnn", "small_updates", {"loss": lambda i, loss, out, y: 1e-6 * loss}),
    Fault("momentum of 0.999", "cnn", "large_momentum", {"optimizer": partial(SGD, momentum=0.999)}),
    Fault("NaN in every 25th batch", "lstm", "nonfinite_input", {"batch": nan_at(lambda i: i % 25 == 0)}),
    Fault(
        *("embeddings × 1e3", "gpt", "activation_outlier large_logits"),
        {"after": scaled("characters|places", 1e3)},
    ),
    Fault("recurrence without gradients", "lstm", "unused_parameters", {"before": without_gradients}),
    Fault("loss negated", "gpt", "wrong_sign", {"loss": lambda i, loss, out, y: -loss}),
    Fault("weights × 0.01 between steps", "cnn", "weight_changed", {"each": scaled("weight", 0.01, 190)}),
    Fault("rate × 100 after 200 steps", "lstm", "rate_rose", {"schedule": lambda s: 100.0 if s >= 200 else 1.0}),
    Fault("rewards of NaN", "rl", "nonfinite_loss nonfinite_input", {"reward": math.nan}),
)
HEALTHY = (
    Fault("as it is", "mlp cnn gpt lstm gan rl"),
    Fault("accumulation", "mlp gpt", "", {"accumulate": 4}),
    Fault("warm-up and cosine", "mlp gpt", "", {"schedule": cosine(300, 30)}),
    Fault("warm restarts", "cnn", "", {"schedule": cosine(100)}),
    Fault("step decay", "lstm", "", {"schedule": lambda s: 0.3 ** (s // 100)}),
    Fault("a frozen first layer, on purpose", "cnn", "", {"after": frozen("^0"), "members": without("^0")}),
    Fault("batch of 2", "mlp lstm", "", {"batch": lambda i, x, y: (x[:2], y[:2])}),
    Fault("full buffer from the start", "rl", "", {"buffer": 2}),
    Fault("clipping", "gpt lstm", "", {"clip": 1.0}),
    Fault("bfloat16 autocast", "cnn", "", {"autocast": torch.bfloat16}),
    Fault("weight decay", "mlp", "", {"optimizer": partial(AdamW, weight_decay=0.1)}),
    Fault("momentum SGD", "mlp", "", {"optimizer": partial(SGD, momentum=0.9), "rate": 10.0}),
    Fault("GradScaler", "cnn", "", {"scaler": scaler()}),
    Fault(
        "an average of the weights", "mlp", "", {"each": lambda i, m: average(m).update_parameters(m), "held_out": True}
    ),
)
NEW = (  # added after the rules: no rule was changed for one of these
    Fault("scales of BatchNorm are 0", "cnn", "dead_units", {"after": scaled(r"^[14]\.weight", 0)}),
    Fault(
        *("model.eval() for a validation, and never back", "cnn", "evaluation_mode"),
        {"each": lambda i, m: m.train(i <= 100)},
    ),
    Fault("clipping before unscale_()", "cnn", "clipped_away", {"scaler": scaler(), "clip": 1.0}),
    Fault("only biases in the optimizer", "gpt", "not_in_optimizer", {"members": without("weight|places")}),
    Fault("all images are the same", "cnn", "not_learning", {"batch": lambda i, x, y: (x[:1].expand_as(x) * 0 + 1, y)}),
    Fault("a running sum of inputs", "lstm", "input_scale", {"batch": lambda i, x, y: (x * i, y)}),
    Fault("generator's rate 0", "gan", "zero_learning_rate", {"rates": (1.0, 0.0)}, "generator"),
    Fault(
        "all weights re-initialized after 150 steps",
        "mlp",
        "weight_changed",
        {"each": change("", nn.init.normal_, 150)},
    ),
    Fault("a target of infinity", "lstm", "nonfinite_loss", {"batch": lambda i, x, y: (x, y / (i != 200))}),
    Fault(
        *("the first layer frozen after 150 steps", "mlp", "frozen_parameters unused_parameters requires_grad_false"),
        {"each": lambda i, m: m[0].requires_grad_(i <= 150)},
    ),
)


def assess(fault: Fault, findings: list[dict[str, Any]]) -> bool:
    """Return True if the first finding names the cause, or a healthy run has nothing but notes."""
    if not fault.kinds:
        return all(it["severity"] == "note" for it in findings)
    first = findings[0] if findings else {"kind": "", "text": ""}
    return first["kind"] in fault.kinds.split() and re.search(fault.words, first["text"]) is not None


def diagnose(fault: Fault, kind: str, seed: int, iterations: int, file: Path) -> tuple[bool, str]:
    """Record a run, unless it is recorded; return whether its first finding is right, and the row of the table."""
    if not file.exists():
        with HDF5Logger(file, mode="w") as logger:
            train(Plan(kind, **copy.deepcopy(fault.changes)), seed, iterations, logger)
    summary = summarise(str(file), Run(read_hdf5(file))).as_json()
    findings = summary["findings"]
    said = f"{findings[0]['severity']} `{findings[0]['kind']}`: {findings[0]['text']}" if findings else "-"
    said = (said if len(said) < 220 else f"{said[:200]} …").replace("|", "/")
    right = assess(fault, findings) and not summary["failed"]
    return right, f"| {fault.name} | {kind} | {said} | {'yes' if right else '**no**'} |"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seed", type=int, default=10, help="of weights and batches")
    parser.add_argument("--select", default="", help="a regular expression of fault and training")
    parser.add_argument("--keep", type=Path, help="a directory of recordings, to be used again")
    chosen = parser.parse_args()
    logging.getLogger("ignite_monitor").setLevel(logging.CRITICAL)
    directory = chosen.keep or Path(tempfile.mkdtemp())
    directory.mkdir(parents=True, exist_ok=True)
    tables, seed = [], chosen.seed
    print(f"{provenance(seed)}\n")
    for title, faults in (("Faults", FAULTS), ("Healthy runs", HEALTHY), ("Ten more faults", NEW)):
        runs = [(fault, kind) for fault in faults for kind in fault.trainings.split()]
        runs = [(fault, kind) for fault, kind in runs if re.search(chosen.select, f"{fault.name}, {kind}")]
        rows = []
        for fault, kind in runs[:1] if chosen.quick else runs:
            name = re.sub(r"[^a-z0-9]+", "_", f"{fault.name} {kind}".lower())
            rows.append(diagnose(fault, kind, seed, 60 if chosen.quick else 300, directory / f"{name}_{seed}.h5"))
        print(f"- {title}, seed {seed}: {sum(right for right, _ in rows)} of {len(rows)} right.", flush=True)
        tables += [f"\n## {title}\n", "| fault | training | first finding | right |", "|---|---|---|---|"]
        tables += [row for _, row in rows]
    print("\n".join(tables))


if __name__ == "__main__":
    main()
