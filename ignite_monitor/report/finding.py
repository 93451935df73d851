"""Findings: events and conditions of a run, what to do about them, and their order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ignite_monitor.report.run import Array

SEVERITIES = ("problem", "warning", "note")

LOWER, RAISE = -1, 1

KINDS: dict[str, tuple[str, int]] = {
    # causes
    "not_monitored": ("", 0),
    "group_rate": ("Give this group a learning rate nearer to the others', or check that its updates are intended.", 0),
    "no_step": ("Give GradMonitor the optimizer whose step() the train step calls.", 0),
    "dead_units": ("Lower the learning rate, or use an activation without a flat part (GELU, LeakyReLU).", LOWER),
    "activation_outlier": ("If the module gets raw inputs, scale them; else scale its initial weights down.", 0),
    "large_updates": ("Lower the learning rate.", LOWER),
    "update_ratio_outlier": ("Give that parameter a learning rate of its own.", 0),
    "large_curvature": ("Lower the learning rate, or use a longer warm-up.", LOWER),
    "early_norms": ("Use a learning rate warm-up, and inspect these batches.", 0),
    "stale_moments": ("Lower beta2 (0.95), or clip updates as StableAdamW does.", 0),
    "large_logits": ("Normalize queries and keys (QK-norm), or clip the logits (QK-clip).", 0),
    "ranks_differ": ("Restore a checkpoint from before, and check that rank's hardware and random seeds.", 0),
    # events
    "spikes": ('Inspect these batches; GradMonitor(on_spike="skip") skips such steps.', 0),
    "loss_spikes": ("Inspect these batches.", 0),
    "nonfinite_activations": ("Inspect that module and its input first.", 0),
    "nonfinite_gradients": ('Lower the learning rate, or skip these steps: GradMonitor(on_spike="skip").', LOWER),
    "nonfinite_metric": ("Find the first non-finite value: the log names the module and the iteration.", 0),
    "regime_change": ("Check what changed there (data, learning rate); if nothing did, treat it as a spike.", 0),
    "rolled_back": ("Inspect the batches that were skipped, and the learning rate there.", 0),
    "overflows": ("Give the GradScaler a larger growth_interval, or use bfloat16.", 0),
    # consequences
    "attention_collapse": ("Normalize queries and keys, or scale their initial weights down.", 0),
    "exploding_gradients": ("Clip the gradient, or scale loss and targets down.", 0),
    "vanishing_gradients": ("Check that the loss depends on these parameters; handler.diagnostics names them.", 0),
    "frozen_parameters": ("Check that the loss depends on them, and that their learning rate is not 0.", 0),
    "small_updates": ("Raise the learning rate, and check that gradients arrive.", RAISE),
    "epsilon_dominated": ("Lower eps, or scale the loss up.", 0),
    "lost_updates": ("Keep the weights in float32 under torch.autocast, or keep a float32 copy of them.", 0),
    "weight_update_outlier": ("Give these layers a learning rate of their own.", 0),
    "spectral_growth": ("Lower the learning rate, or use more weight decay.", LOWER),
    "loss_rose": ("Restore a checkpoint from before, with a lower learning rate.", LOWER),
    "loss_rose_again": ("Restore a checkpoint from before, with a lower learning rate.", LOWER),
    # good to know
    "small_batch": ("Use larger batches if devices allow it, with a learning rate to match.", 0),
    "large_batch": ("Use smaller batches if device time matters.", 0),
    "batch_size": ("", 0),
    "near_curvature": ("Do not raise the learning rate any further.", LOWER),
    "frozen_for_a_while": ("If this is not intended, check the learning rate and the data there.", 0),
    "data_wait": ("Give the loader more workers, or let it prefetch (prefetch_factor, pin_memory).", 0),
}
"""Kinds of findings, causes before consequences: the advice, and whether it lowers or raises the learning rate."""

_OF_A_LOSS = {"group_rate", "spikes", "loss_spikes", "no_step", "nonfinite_gradients", "large_updates"}
FOLLOWS = {
    "frozen_parameters": {"dead_units", "no_step", "nonfinite_gradients"},
    "vanishing_gradients": {"dead_units", "frozen_parameters"},
    "small_updates": {"dead_units", "frozen_parameters", "no_step"},
    "epsilon_dominated": {"dead_units", "frozen_parameters"},
    "nonfinite_metric": {"nonfinite_gradients", "nonfinite_activations"},
    "loss_rose": _OF_A_LOSS,
    "loss_rose_again": _OF_A_LOSS,
}
"""Kind -> the kinds that explain it, where they precede it."""


@dataclass(frozen=True)
class Finding:
    """One event or condition of a run."""

    kind: str  # one of KINDS
    severity: str  # "problem" (the run is damaged), "warning" (it may be) or "note" (good to know)
    what: str  # what happened, in words
    metrics: tuple[str, ...] = ()  # names of the metrics that show it
    iterations: tuple[int, ...] = ()  # where it happened
    values: Mapping[str, float] = field(default_factory=dict)  # the numbers in the words
    advice: str = ""  # what to do about it, if not what KINDS says

    @property
    def action(self) -> str:
        """Advice."""
        return self.advice or KINDS[self.kind][0]

    @property
    def text(self) -> str:
        """Description and advice."""
        return f"{self.what} {self.action}".rstrip()


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings by iteration, causes before consequences, notes last; no advice contradicts an earlier one.

    A finding without iterations holds from the beginning.
    """
    kinds = list(KINDS)

    def place(finding: Finding) -> tuple[bool, int, int]:
        onset = finding.iterations[0] if finding.iterations else 0
        return finding.severity == "note", onset, kinds.index(finding.kind)

    ordered: list[Finding] = []
    direction = 0
    for finding in sorted(findings, key=place):
        own = 0 if finding.advice else KINDS[finding.kind][1]
        causes = FOLLOWS.get(finding.kind, set()) & {cause.kind for cause in ordered if cause.severity != "note"}
        if causes and finding.severity != "note":
            finding = replace(finding, advice="Probably a consequence of what comes before.")
        elif own and direction and own != direction:
            finding = replace(finding, advice="Follow the advice above first.")
        elif own:
            direction = direction or own
        ordered.append(finding)
    return ordered


def steps(of: Iterable[int] | Array) -> tuple[int, ...]:
    """Convert steps to Python's integers."""
    return tuple(np.asarray(of, int).tolist())


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
