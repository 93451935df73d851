"""How many faults the threshold rules find in recorded gradient norms, and how often they cry wolf.

Prints recall over the faults, false alarms per 1,000 iterations and recall per kind of fault, each the mean over all
traces in the directories given. Without a directory, a few short traces are recorded first.

    python benchmarks/thresholds.py [DIRECTORY ...] [--each]
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from record_norms import FAULTS, record_all

from ignite_monitor.gradient.moments import Moments
from ignite_monitor.gradient.robust import RobustThreshold
from ignite_monitor.gradient.spikes import SpikeDetector
from ignite_monitor.gradient.thresholds import MeanStdThreshold, ThresholdRule

SHORT = ["gpt_adamw", "gpt_cosine", "mlp_sgd", "adam_plain"]
WARMUP = 20

Flags = list[bool]


class Trace(NamedTuple):
    """Recorded norms, and iteration -> kind of fault."""

    name: str
    norms: list[float]
    faults: dict[int, str]


class Score(NamedTuple):
    """Recall, false alarms per 1,000 iterations, and kind of fault -> recall."""

    recall: float
    false_alarms: float
    by_kind: dict[str, float]


def read_traces(directory: Path) -> list[Trace]:
    """The traces in a directory, by name.

    Raises:
        FileNotFoundError: if there are none.
    """
    files = sorted(directory.glob("*.json"))
    if not files:
        raise FileNotFoundError(f"No traces (*.json) in {directory}")
    traces = []
    for file in files:
        content = json.loads(file.read_text())
        traces.append(Trace(file.stem, content["norms"], {int(i): kind for i, kind in content["faults"].items()}))
    return traces


def let_in_whole(norms: list[float]) -> Flags:
    """Mean + 3 standard deviations, with spikes in the statistics as they are."""
    moments, flags = Moments.empty(), []
    for norm in torch.tensor(norms, dtype=torch.float64).unbind():
        judged = moments.count >= WARMUP
        flags.append(bool(judged & (norm > moments.mean + 3 * moments.std)))
        moments = moments.include(norm)
    return flags


def detect(rule: Callable[[], ThresholdRule]) -> Callable[[list[float]], Flags]:
    """A function that runs a :class:`SpikeDetector` with a fresh rule over norms."""

    def run(norms: list[float]) -> Flags:
        detector, flags = SpikeDetector(rule()), []
        for norm in torch.tensor(norms, dtype=torch.float64).unbind():
            verdict = detector.judge(norm)
            detector.observe(verdict)
            flags.append(verdict.spike)
        return torch.stack(flags).tolist()

    return run


RULES = {
    "mean + 3 std, spikes let in whole": let_in_whole,
    "`MeanStdThreshold()`": detect(MeanStdThreshold),
    "`MeanStdThreshold(k=6, decay=0.99)`": detect(lambda: MeanStdThreshold(k=6.0, decay=0.99)),
    "`RobustThreshold()`": detect(RobustThreshold),
}


def score(flags: Flags, trace: Trace) -> Score:
    found = {kind: [flags[i] for i, k in trace.faults.items() if k == kind] for kind in FAULTS}
    false_alarms = sum(flag for i, flag in enumerate(flags) if i not in trace.faults)
    return Score(
        fmean(flags[i] for i in trace.faults),
        1000 * false_alarms / len(flags),
        {kind: fmean(hits) if hits else math.nan for kind, hits in found.items()},
    )


def mean_score(scores: list[Score]) -> Score:
    kinds = {kind: [s.by_kind[kind] for s in scores if not math.isnan(s.by_kind[kind])] for kind in FAULTS}
    return Score(
        fmean(s.recall for s in scores),
        fmean(s.false_alarms for s in scores),
        {kind: fmean(recalls) if recalls else math.nan for kind, recalls in kinds.items()},
    )


def print_row(name: str, result: Score) -> None:
    cells = [name, f"{result.recall:.2f}", f"{result.false_alarms:.1f}", *(f"{r:.2f}" for r in result.by_kind.values())]
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Recall and false alarms of the threshold rules.")
    parser.add_argument("directories", type=Path, nargs="*", metavar="DIRECTORY", help="of traces (*.json)")
    parser.add_argument("--each", action="store_true", help="a row for every trace too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        if not args.directories:
            record_all(Path(temporary), seed=1, iterations=2000, only=SHORT)
        directories = args.directories or [Path(temporary)]
        traces = [trace for directory in directories for trace in read_traces(directory)]
    print(f"\n{len(traces)} traces, {sum(len(t.norms) for t in traces)} iterations, ", end="")
    print(f"{sum(len(t.faults) for t in traces)} faults\n")
    print(f"| rule | recall | false alarms per 1,000 | {' | '.join(kind.replace('_', ' ') for kind in FAULTS)} |")
    print(f"|{'---|' * (3 + len(FAULTS))}")
    for name, rule in RULES.items():
        scores = [score(rule(trace.norms), trace) for trace in traces]
        print_row(name, mean_score(scores))
        if args.each:
            for trace, result in zip(traces, scores, strict=True):
                print_row(f"&nbsp; {trace.name}", result)


if __name__ == "__main__":
    main()
