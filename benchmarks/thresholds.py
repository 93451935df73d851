"""False alarms, recall and damage-weighted recall of threshold rules over training runs with planted faults.

Records the runs of ``recorded_harm.py``. Prints for each rule the false alarms per 1,000 healthy iterations, pooled and
on the worst recording; recall, the fraction of faults found; damage-weighted recall, the fraction of all harm that is
in the faults found, as the mean over recordings; and the fraction of multiplied single-tensor gradients found.

The rules of other libraries are written from their descriptions, with their defaults; each is given what it asks for,
norm or loss. All rules flag a value that is not finite, and none of their statistics includes it.

    PYTHONPATH=. python benchmarks/thresholds.py [--seeds 35 36]
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from statistics import fmean, mean, pvariance, stdev
from typing import Any

import torch
from recorded_harm import Recording, record_all
from torch import Tensor
from trainings import options, print_header, print_row

from ignite_monitor.detection.robust import RobustThreshold
from ignite_monitor.detection.spikes import SpikeDetector
from ignite_monitor.detection.thresholds import MeanStdThreshold, ThresholdRule
from ignite_monitor.gradient.detector import PerParameterDetector

WARMUP = 20

Flags = list[bool]
Rule = Callable[[Recording], Flags]


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


def by_norm(rule: Callable[[], ThresholdRule]) -> Rule:
    return lambda recording: detected(SpikeDetector(rule()), doubles(recording.norms))


def by_tensor(recording: Recording) -> Flags:
    return detected(PerParameterDetector(), ((recording.names, norms) for norms in recording.tensors))


def finite(rule: Callable[[list[float], list[float]], Flags]) -> Rule:
    """Flag values that are not finite, and give a rule of norms and losses the previous finite value in their place."""

    def run(recording: Recording) -> Flags:
        series = recording.norms, recording.losses
        cleaned = [[*itertools.accumulate(v, lambda a, b: b if math.isfinite(b) else a)] for v in series]
        values = zip(rule(*cleaned), *series, strict=True)
        return [flag or not (math.isfinite(norm) and math.isfinite(loss)) for flag, norm, loss in values]

    return run


@finite
def olmo(norms: list[float], losses: list[float]) -> Flags:
    """OLMo-core's SkipStepOptimizer: 6 standard deviations from the mean of the last 128 losses or norms, either side.

    The first value tested is the 64th; the window includes every value.
    """

    def is_far(values: list[float], i: int) -> bool:
        window = values[max(0, i - 128) : i]
        return len(window) >= 63 and abs(values[i] - mean(window)) > 6 * stdev(window)

    return [is_far(losses, i) or is_far(norms, i) for i in range(len(norms))]


@finite
def zclip(norms: list[float], losses: list[float]) -> Flags:
    """ZClip (arXiv:2504.02507): norms with z > 2.5 become mean + 2.5^2 / z * std; moving averages of 0.97."""
    mu, variance = mean(norms[:25]), pvariance(norms[:25])
    flags = [False] * 25
    for norm in norms[25:]:
        z = (norm - mu) / (math.sqrt(variance) + 1e-6)
        flags.append(z > 2.5)
        clipped = mu + 2.5**2 / z * math.sqrt(variance) if z > 2.5 else norm
        mu = 0.97 * mu + 0.03 * clipped
        variance = 0.97 * variance + 0.03 * (clipped - mu) ** 2
    return flags


default = by_norm(MeanStdThreshold)
robust = by_norm(RobustThreshold)
# A row flags what any of its rules flags.
RULES: dict[str, tuple[Rule, ...]] = {
    "`MeanStdThreshold()`": (default,),
    "`MeanStdThreshold()`, or any tensor": (default, by_tensor),
    "`RobustThreshold()`": (robust,),
    "`RobustThreshold()`, or any tensor": (robust, by_tensor),
    "any tensor alone": (by_tensor,),
    "`MeanStdThreshold(k=3, decay=None)`": (by_norm(lambda: MeanStdThreshold(k=3.0, decay=None)),),
    "OLMo-core, skip step": (olmo,),
    "ZClip, z > 2.5": (zclip,),
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


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[35, 36], help="of the recordings")
    args = parser.parse_args()
    seeds = args.seeds[:1] if args.quick else args.seeds
    recordings = [recording for seed in seeds for recording in record_all(seed, args.quick)]
    measures = "false alarms per 1,000", "worst", "recall", "damage-weighted recall", "one tensor x 10 or 30"
    print_header(seeds, "rule", *measures)
    flags_of = functools.cache(lambda rule: [rule(recording) for recording in recordings])
    for name, rules in RULES.items():
        by_recording = zip(*map(flags_of, rules), strict=True)
        flags = [[any(flags) for flags in zip(*of_rules, strict=True)] for of_rules in by_recording]
        print_row(name, *row(flags, recordings))
    faults = sum(kind != "control" for r in recordings for kind, _ in r.events.values())
    print(f"\n{len(recordings)} recordings, {sum(len(r.norms) for r in recordings)} iterations, {faults} faults.")


if __name__ == "__main__":
    main()
