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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import fmean, mean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
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

    def named_norms(self) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """The tensors' names and norms in each iteration."""
        names = tuple(map(str, range(self.tensors.shape[1])))
        return ((names, norms) for norms in torch.tensor(self.tensors).unbind())


def read(file: Path) -> Recording:
    content = np.load(file)
    # A harm that is not a number is the largest possible.
    harms = np.nan_to_num(content["ev_area50"].astype(float), nan=1.0, posinf=1.0).clip(max=1.0)
    events = {int(i): (str(k), float(h)) for i, k, h in zip(content["ev_it"], content["ev_kind"], harms, strict=True)}
    norms, losses = (content[key].astype(float).tolist() for key in ("gnorm", "loss"))
    return Recording(file.stem, norms, losses, np.exp(content["lg"].astype(float)), events)


def detected(detector: Any, arguments: Iterable[tuple[Any, ...]]) -> Flags:
    """Whether each value, of which these are the arguments, is a spike, or one of its elements."""
    flags = []
    for given in arguments:
        detection = detector.detect(*given)
        detector.observe(detection)
        flags.append(detection.spike.any())
    return torch.stack(flags).tolist()


def doubles(values: list[float]) -> Iterable[tuple[Tensor]]:
    return zip(torch.tensor(values, dtype=torch.float64), strict=True)


def by_norm(rule: Callable[[], ThresholdRule]) -> Callable[[Recording], Flags]:
    return lambda recording: detected(SpikeDetector(rule()), doubles(recording.norms))


def by_loss(recording: Recording) -> Flags:
    return detected(LossDetector(), doubles(recording.losses))


def by_tensor(recording: Recording) -> Flags:
    return detected(PerParameterDetector(), recording.named_norms())


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


def row(rule_flags: list[Flags], recordings: list[Recording]) -> list[str]:
    """False alarms, pooled and of the worst recording, recall, damage-weighted recall, and recall of single tensors."""
    alarms, healthy, harms = [], [], []
    hits: dict[bool, list[bool]] = {False: [], True: []}  # by whether a single tensor was multiplied
    for flags, recording in zip(rule_flags, recordings, strict=True):
        quiet = [i for i in range(WARMUP, len(flags)) if i not in recording.events]
        faults = {i: event for i, event in recording.events.items() if event[0] != "control"}
        alarms.append(sum(flags[i] for i in quiet))
        healthy.append(len(quiet))
        for i, (kind, _) in faults.items():
            hits[kind.startswith("one_tensor")].append(flags[i])
        damage = {i: max(harm, 0.0) for i, (_, harm) in faults.items()}
        if total := sum(damage.values()):
            harms.append(sum(harm for i, harm in damage.items() if flags[i]) / total)
    worst = max(1000 * count / total for count, total in zip(alarms, healthy, strict=True))
    recall, single = (f"{fmean(values):.2f}" if values else "" for values in (hits[False] + hits[True], hits[True]))
    weighted = f"{fmean(harms):.3f}" if harms else ""
    return [f"{1000 * sum(alarms) / sum(healthy):.2f}", f"{worst:.1f}", recall, weighted, single]


def planted(recording: Recording, factor: float = 10.0, every: int = 11) -> tuple[str, str]:
    """The fraction of multiplied tensors that are found in healthy iterations, and of those named first."""
    found: list[bool] = []
    first: list[bool] = []
    detector = PerParameterDetector()
    for i, (names, norms) in enumerate(recording.named_norms()):
        is_healthy = i >= 100 and i % every == 0 and i not in recording.events
        for tensor in norms.nonzero().flatten().tolist() if is_healthy else ():
            spoilt = norms.clone()
            spoilt[tensor] *= factor
            detection = detector.detect(names, spoilt)
            found.append(bool(detection.spike[tensor]))
            if found[-1]:
                first.append(next(iter(named(culprits(detection).tolist(), detector.names)), "") == names[tensor])
        detector.observe(detector.detect(names, norms))
    return f"{fmean(found):.2f}", f"{fmean(first) if first else math.nan:.2f}"


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
        flags = [
            list(map(any, zip(*flags, strict=True))) for flags in zip(*(known[rule] for rule in rules), strict=True)
        ]
        print_row(name, *row(flags, recordings))


if __name__ == "__main__":
    main()
