"""Findings: events and conditions of a run, what to do about them, and their order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from ignite_monitor.report.run import Array

SEVERITIES = ("problem", "warning", "note")
LOWER, RAISE = -1, 1


class Kind(NamedTuple):
    """A kind of finding: the advice, whether it lowers or raises the learning rate, and kinds that may explain it."""

    advice: str = ""
    direction: int = 0
    follows: frozenset[str] = frozenset()


_CHECKPOINT = "Restore a checkpoint from before, and check what changed there (data, learning rate)."
_RATE = frozenset({"group_rate", "rate_rose", "early_norms", "large_updates"})
_EVENTS = _RATE | {"spikes", "loss_spikes", "nonfinite_gradients", "nonfinite_activations", "no_step"}
_STILL = _RATE | {"dead_units", "no_step", "nonfinite_gradients", "frozen_parameters", "weights_shrank"}

KINDS: dict[str, Kind] = {
    # causes
    "not_monitored": Kind(),
    "group_rate": Kind(
        "Give this group a learning rate nearer to the others', or check that its updates are intended."
    ),
    "rate_rose": Kind("Lower the learning rate, or let it rise more slowly.", LOWER),
    "no_step": Kind("Give GradMonitor the optimizer whose step() the train step calls."),
    "weights_shrank": Kind("Lower the weight decay, or scale the initial weights down if they were too large."),
    "large_updates": Kind("Lower the learning rate.", LOWER),
    "large_curvature": Kind("Lower the learning rate, or use a longer warm-up.", LOWER),
    "early_norms": Kind("Lower the learning rate, at least in a warm-up, and inspect these batches.", LOWER),
    "stale_moments": Kind("Lower beta2 (0.95), or clip updates as StableAdamW does."),
    "large_logits": Kind("Normalize queries and keys (QK-norm), or clip the logits (QK-clip)."),
    "ranks_differ": Kind("Restore a checkpoint from before, and check that rank's hardware and random seeds."),
    # events
    "spikes": Kind('Inspect these batches; GradMonitor(on_spike="skip") skips such steps.', 0, _RATE),
    "loss_spikes": Kind("Inspect these batches.", 0, _RATE | {"spikes"}),
    "nonfinite_activations": Kind("Inspect that module and its input.", 0, _RATE | {"nonfinite_gradients", "spikes"}),
    "nonfinite_gradients": Kind(
        'Inspect these batches; GradMonitor(on_spike="skip") skips such steps.',
        *(0, _RATE | {"spikes", "nonfinite_activations"}),
    ),
    "nonfinite_metric": Kind(
        "Find the first non-finite value: the log names the module and the iteration.",
        *(0, _RATE | {"nonfinite_gradients", "nonfinite_activations"}),
    ),
    "rolled_back": Kind("Inspect the batches that were skipped, and the learning rate there.", 0, _RATE),
    "overflows": Kind("Give the GradScaler a larger growth_interval, or use bfloat16."),
    # consequences
    "dead_units": Kind(
        "Lower the learning rate, or use an activation without a flat part (GELU, LeakyReLU).",
        *(LOWER, _RATE | {"spikes", "nonfinite_gradients"}),
    ),
    "activation_outlier": Kind(
        "If the module gets raw inputs, scale them; else scale its initial weights down.", 0, _EVENTS
    ),
    "attention_collapse": Kind("Normalize queries and keys, or scale their initial weights down."),
    "exploding_gradients": Kind("Clip the gradient, or scale loss and targets down.", 0, _EVENTS),
    "frozen_parameters": Kind("Check that the loss depends on them, and that their learning rate is not 0.", 0, _STILL),
    "vanishing_gradients": Kind(
        "Check that the loss depends on these parameters; handler.diagnostics names them.", 0, _STILL
    ),
    "small_updates": Kind("Raise the learning rate, and check that gradients arrive.", RAISE, _STILL),
    "epsilon_dominated": Kind("Lower eps, or scale the loss up.", 0, _STILL),
    "lost_updates": Kind("Keep the weights in float32 under torch.autocast, or keep a float32 copy of them."),
    "spectral_growth": Kind("Lower the learning rate, or use more weight decay.", LOWER, _RATE),
    "loss_rose": Kind(_CHECKPOINT, 0, _EVENTS | {"weights_shrank"}),
    "loss_rose_again": Kind(_CHECKPOINT, 0, _EVENTS | {"weights_shrank"}),
    "loss_peak": Kind("Inspect the batches and the learning rate there.", 0, _EVENTS | {"rolled_back"}),
    # good to know
    "batch_size": Kind(),
    "near_curvature": Kind("Do not raise the learning rate any further.", LOWER),
    "data_wait": Kind("Give the loader more workers, or let it prefetch (prefetch_factor, pin_memory)."),
}
"""Kinds of findings, causes before consequences."""


@dataclass(frozen=True)
class Finding:
    """One event or condition of a run."""

    kind: str  # one of KINDS
    severity: str  # "problem" (the run is damaged), "warning" (it may be) or "note" (good to know)
    what: str  # what happened, in words
    metrics: tuple[str, ...] = ()  # names of the metrics that show it
    iterations: Iterable[int] | Array = ()  # where it happened; converted to a tuple
    values: Mapping[str, float] = field(default_factory=dict)  # the numbers in the words
    advice: str = ""  # fix, if it differs from that of KINDS
    onset: int = -1  # its place in the order; by default the first iteration, or 0 if there is none

    def __post_init__(self) -> None:
        steps = tuple(np.asarray(self.iterations, int).tolist())
        object.__setattr__(self, "iterations", steps)
        object.__setattr__(self, "onset", self.onset if self.onset >= 0 else next(iter(steps), 0))

    @property
    def action(self) -> str:
        """Advice."""
        return self.advice or KINDS[self.kind].advice

    @property
    def text(self) -> str:
        """Description and advice."""
        return f"{self.what} {self.action}".rstrip()


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings by iteration, causes before consequences, notes last; no advice contradicts an earlier one."""
    kinds = list(KINDS)
    ordered: list[Finding] = []
    direction = 0
    for finding in sorted(findings, key=lambda it: (it.severity == "note", it.onset, kinds.index(it.kind))):
        own = 0 if finding.advice else KINDS[finding.kind].direction
        causes = KINDS[finding.kind].follows & {cause.kind for cause in ordered if cause.severity != "note"}
        if causes and finding.severity != "note":
            finding = replace(finding, advice="Probably a consequence of what comes before.")
        elif own and direction and own != direction:
            finding = replace(finding, advice="Follow the advice above first.")
        elif own:
            direction = direction or own
        ordered.append(finding)
    return ordered


def number(value: float, digits: int = 4) -> str:
    """Format a number; whole numbers without a decimal point."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.{digits}g}"


def times(factor: float) -> str:
    """Format a factor: ``3.5 times``."""
    return f"{factor:{'.0f' if 10 <= factor < 1e6 else '.2g'}} times"


def plural(count: int, what: str) -> str:
    """Format a count: ``1 step``, ``2 steps``."""
    return f"{count} {what}{'s' * (count != 1)}"


def listed(words: Iterable[str], at_most: int = 5) -> str:
    """Join words: ``a, b and 3 more``."""
    words = list(words)
    if len(words) > at_most + 1:
        return f"{', '.join(words[:at_most])} and {len(words) - at_most} more"
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def iterations(steps: Array) -> str:
    """Format ascending steps: ``iteration 7``, ``iterations 7, 20-25 and 90``."""
    starts = np.flatnonzero(np.diff(steps, prepend=steps[:1] - 2) != 1)
    ranges = zip(steps[starts].tolist(), steps[np.append(starts[1:], len(steps)) - 1].tolist(), strict=True)
    words = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return f"iteration{'s' * (len(steps) > 1)} {listed(words, 6)}"
