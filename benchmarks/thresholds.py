"""How often threshold rules cry wolf over recorded trainings, and how many faults, and how much harm, they find.

Reads recordings of ``record_harm.py`` (.npz) and of ``record_norms.py`` (.json), the latter without harm. Prints for
each rule the false alarms per 1,000 healthy iterations, pooled and on the worst recording; recall, the share of faults
found; harm recall, the share of all harm that sits in the faults found, as the mean over recordings; and how many
multiplied gradients of a single tensor it finds. Without a directory a few short trainings are recorded first.

The rules of other libraries are written anew from their descriptions, with their defaults; each is given what it asks
for, norm or loss. What is not finite is a find for all of them, and enters none of their statistics.

    python benchmarks/thresholds.py [DIRECTORY ...] [--each | --planted]
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, mean, pstdev, stdev
from typing import NamedTuple

import numpy as np
import torch
from record_harm import record_all

from ignite_monitor.detection.robust import RobustThreshold
from ignite_monitor.detection.spikes import SpikeDetector
from ignite_monitor.detection.thresholds import MeanStdThreshold, ThresholdRule
from ignite_monitor.gradient.loss import LossDetector
from ignite_monitor.gradient.per_parameter import PerParameterDetector

SHORT = ["gpt_adamw", "cnn", "mlp_sgd", "gan", "gpt_fall"]
WARMUP = 20

Flags = list[bool]


class Recording(NamedTuple):
    """One training; of its events iteration -> kind and harm, NaN where it was not measured."""

    name: str
    norms: list[float]
    losses: list[float]
    tensors: np.ndarray | None  # iterations x tensors, norms
    events: dict[int, tuple[str, float]]
    judged_to: int


class Score(NamedTuple):
    alarms: int
    healthy: int
    found: list[bool]
    single: list[bool]  # of the faults in a single tensor
    harm: float  # recall, NaN where there is none


def read(file: Path) -> Recording:
    if file.suffix == ".json":
        content = json.loads(file.read_text())
        events = {int(i): (kind, math.nan) for i, kind in content["faults"].items()}
        return Recording(file.stem, content["norms"], content["losses"], None, events, len(content["norms"]))
    content = np.load(file)
    # Harm that is no number is the largest there is.
    harms = np.nan_to_num(content["ev_area50"].astype(float), nan=1.0, posinf=1.0).clip(max=1.0)
    events = {int(i): (str(k), float(h)) for i, k, h in zip(content["ev_it"], content["ev_kind"], harms, strict=True)}
    norms = content["gnorm"].astype(float).tolist()
    # A recording of unknown make may hold an event after its last, too late for its harm to be measured.
    end = max(events) + 55 if events and "ev_tensor" not in content else len(norms)
    tensors = np.exp(content["lg"].astype(float))
    return Recording(file.stem, norms, content["loss"].astype(float).tolist(), tensors, events, end)


def tensors_of(values: list[float]) -> list[torch.Tensor]:
    return list(torch.tensor(values, dtype=torch.float64).unbind())


def by_norm(rule: Callable[[], ThresholdRule]) -> Callable[[Recording], Flags]:
    def run(recording: Recording) -> Flags:
        detector, flags = SpikeDetector(rule()), []
        for norm in tensors_of(recording.norms):
            detection = detector.detect(norm)
            detector.observe(detection)
            flags.append(detection.spike)
        return torch.stack(flags).tolist()

    return run


def by_loss(recording: Recording) -> Flags:
    signal, flags = LossDetector(), []
    for loss in tensors_of(recording.losses):
        detection = signal.detect(loss)
        signal.observe(detection)
        flags.append(detection.spike)
    return torch.stack(flags).tolist()


def by_tensor(recording: Recording) -> Flags:
    if recording.tensors is None:
        return [False] * len(recording.norms)
    judge, flags = PerParameterDetector(), []
    names = tuple(str(i) for i in range(recording.tensors.shape[1]))
    for norms in torch.tensor(recording.tensors).unbind():
        detection = judge.detect(names, norms)
        judge.observe(detection)
        flags.append(detection.spike.any())
    return torch.stack(flags).tolist()


def without_overflows(rule: Callable[[Recording], Flags]) -> Callable[[Recording], Flags]:
    """The rule over a recording in which the value before stands for one that is not finite, which is flagged."""

    @functools.wraps(rule)
    def run(recording: Recording) -> Flags:
        cleaned, overflows = [], np.zeros(len(recording.norms), bool)
        for values in (recording.norms, recording.losses):
            bad = ~np.isfinite(values)
            before = np.maximum.accumulate(np.where(bad, 0, np.arange(len(bad))))
            cleaned.append(np.array(values)[before].tolist())
            overflows |= bad
        flags = rule(recording._replace(norms=cleaned[0], losses=cleaned[1]))
        return (overflows | np.array(flags)).tolist()

    return run


@without_overflows
def let_in_whole(recording: Recording) -> Flags:
    """Mean + 3 standard deviations, with spikes in the statistics as they are."""
    flags, average, spread = [], 0.0, 0.0
    for count, norm in enumerate(recording.norms):
        flags.append(count >= WARMUP and norm > average + 3 * math.sqrt(spread / (count - 1)))
        delta = norm - average
        average += delta / (count + 1)
        spread += delta * (norm - average)
    return flags


@without_overflows
def olmo(recording: Recording) -> Flags:
    """OLMo-core's SkipStepOptimizer: 6 deviations from the mean of the last 128 losses or norms, either side.

    It begins with the 64th, and lets everything into its window.
    """
    flags = []
    for i in range(len(recording.norms)):
        far = False
        for values in (recording.losses, recording.norms):
            window = values[max(0, i - 128) : i]
            far |= len(window) >= 63 and abs(values[i] - mean(window)) > 6 * stdev(window)
        flags.append(far)
    return flags


@without_overflows
def zclip(recording: Recording) -> Flags:
    """ZClip (arXiv:2504.02507): z > 2.5 by moving averages with 0.97, into which what is clipped enters clipped."""
    first, flags, average, variance = [], [], 0.0, 0.0
    for norm in recording.norms:
        if len(first) < 25:
            first.append(norm)
            average, variance = fmean(first), pstdev(first) ** 2
            flags.append(False)
            continue
        z = (norm - average) / (math.sqrt(variance) + 1e-6)
        flags.append(z > 2.5)
        entering = average + 2.5**2 / z * math.sqrt(variance) if z > 2.5 else norm
        average = 0.97 * average + 0.03 * entering
        variance = 0.97 * variance + 0.03 * (entering - average) ** 2
    return flags


@without_overflows
def lightning(recording: Recording) -> Flags:
    """Lightning's SpikeDetection: a loss that is worse than the last and off the mean of the last ten by twice it."""
    flags, window, last = [], deque[float](maxlen=10), 0.0
    for loss in recording.losses:
        spike = bool(window) and loss > last and abs(loss - mean(window)) >= abs(2.0 * mean(window))
        flags.append(spike)
        if not spike:
            window.append(loss)
            last = loss
    return flags


@without_overflows
def foundry_loss(recording: Recording) -> Flags:
    """llm-foundry's KillLossSpike calls a loss an outlier at twice the mean of the last hundred, all let in."""
    flags, window = [], deque[float](maxlen=100)
    for loss in recording.losses:
        flags.append(len(window) == 100 and loss >= 2.0 * mean(window))
        window.append(loss)
    return flags


@without_overflows
def foundry_norm(recording: Recording) -> Flags:
    """llm-foundry's OutlierDetector: 7.5 times the mean of the norms 500 to 1,000 iterations ago."""
    norms = recording.norms
    return [i >= 500 and norms[i] > 7.5 * fmean(norms[max(0, i - 999) : i - 499]) for i in range(len(norms))]


default = by_norm(MeanStdThreshold)
robust = by_norm(RobustThreshold)
# An alarm of a row is one of any of its rules.
RULES: dict[str, tuple[Callable[[Recording], Flags], ...]] = {
    "`MeanStdThreshold()`": (default,),
    "`MeanStdThreshold()`, or the loss": (default, by_loss),
    "`MeanStdThreshold()`, or any tensor": (default, by_tensor),
    "`RobustThreshold()`": (robust,),
    "`RobustThreshold()`, or the loss": (robust, by_loss),
    "`RobustThreshold()`, or any tensor": (robust, by_tensor),
    "`RobustThreshold()`, the loss, or any tensor": (robust, by_loss, by_tensor),
    "any tensor alone": (by_tensor,),
    "the loss alone": (by_loss,),
    "`MeanStdThreshold(k=3, decay=None)`": (by_norm(lambda: MeanStdThreshold(k=3.0, decay=None)),),
    "mean + 3 std, spikes let in whole": (let_in_whole,),
    "OLMo-core, skip step": (olmo,),
    "ZClip, z > 2.5": (zclip,),
    "Lightning, SpikeDetection": (lightning,),
    "llm-foundry, KillLossSpike's outlier": (foundry_loss,),
    "llm-foundry, OutlierDetector": (foundry_norm,),
}


def score(flags: Flags, recording: Recording) -> Score:
    events = {i: event for i, event in recording.events.items() if i < len(flags)}
    healthy = [i for i in range(WARMUP, min(recording.judged_to, len(flags))) if i not in events]
    faults = {i: (kind, harm) for i, (kind, harm) in events.items() if kind != "control"}
    harmful = {i: max(h, 0.0) for i, (kind, h) in faults.items() if not math.isnan(h) and kind != "bitflip_weight"}
    total = sum(harmful.values())
    return Score(
        sum(flags[i] for i in healthy),
        len(healthy),
        [flags[i] for i in faults],
        [flags[i] for i, (kind, _) in faults.items() if kind.startswith("one_tensor")],
        sum(h for i, h in harmful.items() if flags[i]) / total if total > 0 else math.nan,
    )


def row(name: str, scores: list[Score]) -> str:
    rates = [1000 * s.alarms / s.healthy for s in scores]
    pooled = 1000 * sum(s.alarms for s in scores) / sum(s.healthy for s in scores)
    found = [hit for s in scores for hit in s.found]
    single = [hit for s in scores for hit in s.single]
    harms = [s.harm for s in scores if not math.isnan(s.harm)]
    cells = [f"{fmean(found):.2f}" if found else "", f"{fmean(harms):.3f}" if harms else ""]
    cells += [f"{fmean(single):.2f}" if single else ""]
    return f"| {name} | {pooled:.2f} | {max(rates):.1f} | {' | '.join(cells)} |"


def planted(recording: Recording, times: float = 10.0, every: int = 11) -> tuple[list[bool], list[bool]]:
    """Each tensor's gradient multiplied in healthy iterations: whether it is found, and then whether named first."""
    found: list[bool] = []
    first: list[bool] = []
    if recording.tensors is None:
        return found, first
    judge = PerParameterDetector()
    names = tuple(str(i) for i in range(recording.tensors.shape[1]))
    for i, norms in enumerate(torch.tensor(recording.tensors).unbind()):
        if i >= 100 and i % every == 0 and i not in recording.events:
            for tensor in norms.nonzero().flatten().tolist():
                spoilt = norms.clone()
                spoilt[tensor] *= times
                detection = judge.detect(names, spoilt)
                found.append(bool(detection.spike[tensor]))
                culprits = judge.named(judge.culprits(detection).tolist())
                first += [next(iter(culprits), "") == names[tensor]] * found[-1]
        judge.observe(judge.detect(names, norms))
    return found, first


def main() -> None:
    parser = argparse.ArgumentParser(description="False alarms, recall and harm recall of the threshold rules.")
    parser.add_argument("directories", type=Path, nargs="*", metavar="DIRECTORY", help="of recordings (*.npz, *.json)")
    parser.add_argument("--each", action="store_true", help="a row for every recording too")
    parser.add_argument("--planted", action="store_true", help="instead: single tensors multiplied, found and named")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        if not args.directories:
            record_all(Path(temporary), 1, 700, SHORT)
        directories = args.directories or [Path(temporary)]
        files = [file for directory in directories for file in sorted(directory.iterdir())]
        recordings = [read(file) for file in files if file.suffix in (".npz", ".json")]
    if args.planted:
        print("| recording | one tensor x 10: found | named first where found |\n|---|---|---|")
        for recording in recordings:
            found, first = planted(recording)
            if found:
                print(
                    f"| {recording.name} | {fmean(found):.2f} | {fmean(first) if first else math.nan:.2f} |", flush=True
                )
        return
    if not recordings:
        raise FileNotFoundError(f"No recordings (*.npz, *.json) in {directories}")
    faults = sum(kind != "control" for r in recordings for kind, _ in r.events.values())
    print(f"\n{len(recordings)} recordings, {sum(len(r.norms) for r in recordings)} iterations, {faults} faults\n")
    columns = ("rule", "false alarms per 1,000", "worst", "recall", "harm recall", "one tensor x 10 or 30")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    known: dict[Callable[[Recording], Flags], list[Flags]] = {}
    for name, rules in RULES.items():
        for rule in rules:
            if rule not in known:
                known[rule] = [rule(recording) for recording in recordings]
        scores = [
            score([any(flags) for flags in zip(*(known[rule][i] for rule in rules), strict=True)], recording)
            for i, recording in enumerate(recordings)
        ]
        print(row(name, scores), flush=True)
        if args.each:
            for recording, result in zip(recordings, scores, strict=True):
                print(row(f"&nbsp; {recording.name}", [result]))


if __name__ == "__main__":
    main()
