"""False alarms, recall and damage-weighted recall of threshold rules over recorded training runs.

Reads recordings of ``record_harm.py``. Prints for each rule the false alarms per 1,000 healthy iterations, pooled and
on the worst recording; recall, the fraction of faults found; damage-weighted recall, the fraction of all harm that is
in the faults found, as the mean over recordings; and the fraction of multiplied single-tensor gradients found.

The rules of other libraries are written from their descriptions, with their defaults; each is given what it asks for,
norm or loss. All rules flag a value that is not finite, and none of their statistics includes it.

    python benchmarks/thresholds.py DIRECTORY ... [--planted]
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, mean, stdev
from typing import NamedTuple

import numpy as np
import torch
from trainings import ZClip, options, print_header, print_row

from ignite_monitor.detection.robust import RobustThreshold
from ignite_monitor.detection.spikes import SpikeDetector
from ignite_monitor.detection.thresholds import MeanStdThreshold, ThresholdRule
from ignite_monitor.gradient.detection import culprits, named
from ignite_monitor.gradient.loss import LossDetector
from ignite_monitor.gradient.per_parameter import PerParameterDetector

WARMUP = 20

Flags = list[bool]


class Recording(NamedTuple):
    """One training run; ``events``: iteration -> kind and harm."""

    name: str
    norms: list[float]
    losses: list[float]
    tensors: np.ndarray  # iterations x tensors, norms
    events: dict[int, tuple[str, float]]


class Score(NamedTuple):
    """Counts of one rule on one recording; ``harm`` is NaN where there is none."""

    alarms: int
    healthy: int
    detected: list[bool]
    single: list[bool]
    harm: float


def read(file: Path) -> Recording:
    content = np.load(file)
    # A harm that is not a number is the largest possible.
    harms = np.nan_to_num(content["ev_area50"].astype(float), nan=1.0, posinf=1.0).clip(max=1.0)
    events = {int(i): (str(k), float(h)) for i, k, h in zip(content["ev_it"], content["ev_kind"], harms, strict=True)}
    norms, losses = (content[key].astype(float).tolist() for key in ("gnorm", "loss"))
    return Recording(file.stem, norms, losses, np.exp(content["lg"].astype(float)), events)


def detected(detector: SpikeDetector | LossDetector, values: list[float]) -> Flags:
    flags = []
    for value in torch.tensor(values, dtype=torch.float64).unbind():
        detection = detector.detect(value)
        detector.observe(detection)
        flags.append(detection.spike)
    return torch.stack(flags).tolist()


def by_norm(rule: Callable[[], ThresholdRule]) -> Callable[[Recording], Flags]:
    return lambda recording: detected(SpikeDetector(rule()), recording.norms)


def by_loss(recording: Recording) -> Flags:
    return detected(LossDetector(), recording.losses)


def by_tensor(recording: Recording) -> Flags:
    detector, flags = PerParameterDetector(), []
    names = tuple(str(i) for i in range(recording.tensors.shape[1]))
    for norms in torch.tensor(recording.tensors).unbind():
        detection = detector.detect(names, norms)
        detector.observe(detection)
        flags.append(detection.spike.any())
    return torch.stack(flags).tolist()


def without_overflows(rule: Callable[[Recording], Flags]) -> Callable[[Recording], Flags]:
    """Flag values that are not finite, and give the rule the previous finite value in their place."""

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
def all_included(recording: Recording) -> Flags:
    """Mean + 3 standard deviations; spikes update the statistics unchanged."""
    flags, average, spread = [], 0.0, 0.0
    for count, norm in enumerate(recording.norms):
        flags.append(count >= WARMUP and norm > average + 3 * math.sqrt(spread / (count - 1)))
        delta = norm - average
        average += delta / (count + 1)
        spread += delta * (norm - average)
    return flags


@without_overflows
def olmo(recording: Recording) -> Flags:
    """OLMo-core's SkipStepOptimizer: 6 standard deviations from the mean of the last 128 losses or norms, either side.

    The first value tested is the 64th; the window includes every value.
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
    clipped = ZClip()
    return [clipped(norm) < norm for norm in recording.norms]


@without_overflows
def lightning(recording: Recording) -> Flags:
    """Lightning's SpikeDetection: a loss above the last one and off the mean of the last ten by twice that mean."""
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
    """llm-foundry's KillLossSpike: an outlier is twice the mean of the last hundred losses, outliers included."""
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
# A row flags what any of its rules flags.
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
    "mean + 3 std, spikes included": (all_included,),
    "OLMo-core, skip step": (olmo,),
    "ZClip, z > 2.5": (zclip,),
    "Lightning, SpikeDetection": (lightning,),
    "llm-foundry, KillLossSpike's outlier": (foundry_loss,),
    "llm-foundry, OutlierDetector": (foundry_norm,),
}


def score(flags: Flags, recording: Recording) -> Score:
    healthy = [i for i in range(WARMUP, len(flags)) if i not in recording.events]
    faults = {i: event for i, event in recording.events.items() if event[0] != "control"}
    total = sum(max(harm, 0.0) for _, harm in faults.values())
    return Score(
        sum(flags[i] for i in healthy),
        len(healthy),
        [flags[i] for i in faults],
        [flags[i] for i, (kind, _) in faults.items() if kind.startswith("one_tensor")],
        sum(max(harm, 0.0) for i, (_, harm) in faults.items() if flags[i]) / total if total > 0 else math.nan,
    )


def row(scores: list[Score]) -> list[str]:
    rates = [1000 * s.alarms / s.healthy for s in scores]
    pooled = 1000 * sum(s.alarms for s in scores) / sum(s.healthy for s in scores)
    detected = [hit for s in scores for hit in s.detected]
    single = [hit for s in scores for hit in s.single]
    harms = [s.harm for s in scores if not math.isnan(s.harm)]
    cells = [f"{fmean(detected):.2f}" if detected else "", f"{fmean(harms):.3f}" if harms else ""]
    return [f"{pooled:.2f}", f"{max(rates):.1f}", *cells, f"{fmean(single):.2f}" if single else ""]


def planted(recording: Recording, factor: float = 10.0, every: int = 11) -> tuple[str, str]:
    """The fraction of multiplied tensors that are found in healthy iterations, and of those named first."""
    detected: list[bool] = []
    first: list[bool] = []
    detector = PerParameterDetector()
    names = tuple(str(i) for i in range(recording.tensors.shape[1]))
    for i, norms in enumerate(torch.tensor(recording.tensors).unbind()):
        if i >= 100 and i % every == 0 and i not in recording.events:
            for tensor in norms.nonzero().flatten().tolist():
                spoilt = norms.clone()
                spoilt[tensor] *= factor
                detection = detector.detect(names, spoilt)
                detected.append(bool(detection.spike[tensor]))
                shares = named(culprits(detection).tolist(), detector.names)
                first += [next(iter(shares), "") == names[tensor]] * detected[-1]
        detector.observe(detector.detect(names, norms))
    return f"{fmean(detected):.2f}", f"{fmean(first) if first else math.nan:.2f}"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("directories", type=Path, nargs="+", metavar="DIRECTORY", help="of recordings (*.npz)")
    parser.add_argument("--planted", action="store_true", help="multiply single tensors instead")
    args = parser.parse_args()
    recordings = [read(file) for directory in args.directories for file in sorted(directory.glob("*.npz"))]
    if args.planted:
        print_header("recording", "one tensor x 10: found", "named first where found")
        for recording in recordings:
            print_row(recording.name, *planted(recording))
        return
    faults = sum(kind != "control" for r in recordings for kind, _ in r.events.values())
    print(f"\n{len(recordings)} recordings, {sum(len(r.norms) for r in recordings)} iterations, {faults} faults\n")
    print_header("rule", "false alarms per 1,000", "worst", "recall", "damage-weighted recall", "one tensor x 10 or 30")
    known: dict[Callable[[Recording], Flags], list[Flags]] = {}
    for name, rules in RULES.items():
        for rule in rules:
            if rule not in known:
                known[rule] = [rule(recording) for recording in recordings]
        scores = [
            score([any(flags) for flags in zip(*(known[rule][i] for rule in rules), strict=True)], recording)
            for i, recording in enumerate(recordings)
        ]
        print_row(name, *row(scores))


if __name__ == "__main__":
    main()
