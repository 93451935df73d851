"""Findings: events and conditions of a run, what to do about them, and their order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ignite_monitor.report.run import Array

SEVERITIES = ("problem", "warning", "note")
LOWER, RAISE = -1, 1


class Kind(NamedTuple):
    """A kind of finding.

    Attributes:
        advice: what to do.
        explained_by: kinds of causes that may explain it.
        is_cause: whether it rests on evidence of a cause; otherwise it is a symptom.
        direction: whether the advice lowers or raises the learning rate.
    """

    advice: str = ""
    explained_by: frozenset[str] = frozenset()
    is_cause: bool = True
    direction: int = 0


_RATE = frozenset({"large_updates", "group_rate", "rate_rose"})
_DATA = frozenset({"bad_batches", "periodic_spikes", "input_scale", "loss_scale"})
SETUP = frozenset(
    [
        "not_in_optimizer",
        "no_gradients",
        "unused_parameters",
        "gradients_not_zeroed",
        "stale_optimizer",
        "zero_learning_rate",
        "evaluation_mode",
        "batch_repeats",
        "wrapper_bypassed",
        "scaler_not_given",
        "low_precision_updates",
        "no_step",
    ]
)
_SOURCES = frozenset({"nonfinite_loss", "nonfinite_input", "nonfinite_forward", "nonfinite_backward"})
_DAMAGE = _RATE | _DATA | SETUP | _SOURCES | {"weight_changed", "wrong_sign"}
_STILL = _RATE | SETUP | {"rate_vanished", "clipped_away", "weights_shrank", "small_updates", "nonfinite_loss"}
_NOT_FINITE = _DAMAGE | {"nonfinite_activations", "nonfinite_gradients"}
_INSPECT = 'Inspect these batches; GradMonitor(on_spike="skip") skips such steps.'
_CHECKPOINT = "Restore a checkpoint from before, and check what changed there (data, learning rate)."


def _symptom(advice: str, *explained_by: Iterable[str], direction: int = 0) -> Kind:
    return Kind(advice, frozenset().union(*explained_by), False, direction)


KINDS: dict[str, Kind] = {
    # causes; reports of SetupCheck and other monitors have advice of their own
    **dict.fromkeys(SETUP - {"no_step"}, Kind()),
    "no_step": Kind("Give GradMonitor the optimizer whose step() the train step calls.", SETUP - {"no_step"}),
    "requires_grad_false": Kind(),
    "nonfinite_input": Kind("Inspect this batch, and the code that makes it."),
    "nonfinite_loss": Kind("Look for log, sqrt or a division near 0 in the loss."),
    "nonfinite_forward": Kind("Inspect that module and its input.", _RATE | {"weight_changed"}),
    "nonfinite_backward": Kind("Look for sqrt, norm or a division at 0 in that module.", _RATE | {"weight_changed"}),
    "nonfinite_not_located": _symptom("", _RATE | {"weight_changed"}),
    "input_scale": Kind("Normalize the inputs.", frozenset({"bad_batches", "periodic_spikes"})),
    "loss_scale": Kind(
        'Scale the targets (or rewards) to about 1, or average the loss (reduction="mean").', frozenset({"input_scale"})
    ),
    "weight_changed": Kind("Look for code that writes to weights: initialization, loading, clipping, hardware.", _RATE),
    "clipped_away": Kind("Clip to about the usual norm.", SETUP),
    "rate_vanished": Kind("Let the schedule end with the training; step it per epoch if it counts epochs."),
    "group_rate": Kind(
        "Give this group a learning rate nearer to the others', or check that its updates are intended.", SETUP
    ),
    "rate_rose": Kind("Lower the learning rate, or let it rise more slowly.", SETUP, direction=LOWER),
    "large_updates": Kind(
        "Lower the learning rate; or the loss is summed, or gradients are added up, over many items.",
        SETUP | _DATA | {"group_rate", "rate_rose", "weight_changed", "nonfinite_loss"},
        direction=LOWER,
    ),
    "small_updates": Kind(
        "Raise the learning rate.",
        (_STILL | {"weight_changed", "input_scale"}) - {"small_updates"},
        direction=RAISE,
    ),
    "weights_shrank": Kind("Lower the weight decay, or scale the initial weights down if they were too large.", _RATE),
    "bounded_outputs": Kind("Give the loss logits: cross_entropy and BCEWithLogitsLoss apply softmax or sigmoid."),
    "wrong_sign": Kind("Check the sign of the loss, and the optimizer's maximize.", _RATE | _DATA | SETUP),
    "overfitting": Kind("Use more data or augmentation, regularize, or stop at the best value."),
    "not_learning": Kind(
        "Check that inputs and targets belong together, and that the model can fit ten examples.", _STILL
    ),
    "bad_batches": Kind(_INSPECT, _DAMAGE - {"bad_batches"}),
    "periodic_spikes": Kind("Check for a batch or event with this period.", _DAMAGE - {"periodic_spikes"}),
    "large_curvature": Kind("Lower the learning rate, or use a longer warm-up.", direction=LOWER),
    "lost_updates": Kind("Keep the weights in float32 under torch.autocast, or keep a float32 copy of them.", _STILL),
    "overflows": Kind("Give the GradScaler a larger growth_interval, or use bfloat16."),
    "ranks_differ": Kind("Restore a checkpoint from before, and check that rank's hardware and random seeds."),
    "data_wait": Kind("Give the loader more workers, or let it prefetch (prefetch_factor, pin_memory)."),
    # symptoms
    "not_monitored": _symptom(""),
    "early_norms": _symptom("Use a warm-up, and inspect these batches.", _DAMAGE, direction=LOWER),
    "stale_moments": _symptom("Lower beta2 (0.95), or clip updates as StableAdamW does.", _DAMAGE),
    "large_logits": _symptom("Normalize queries and keys (QK-norm), or clip the logits (QK-clip).", _DAMAGE),
    "spikes": _symptom(_INSPECT, _DAMAGE, {"wrong_sign", "large_curvature"}),
    "loss_spikes": _symptom("Inspect these batches.", _DAMAGE, {"spikes"}),
    "nonfinite_activations": _symptom("Inspect that module and its input.", _NOT_FINITE, {"spikes"}),
    "nonfinite_gradients": _symptom(_INSPECT, _NOT_FINITE, {"spikes"}),
    "nonfinite_metric": _symptom(
        "Find the first non-finite value: the log names the module and the iteration.", _NOT_FINITE, {"spikes"}
    ),
    "rolled_back": _symptom("Inspect the batches that were skipped, and the learning rate there.", _DAMAGE, {"spikes"}),
    "dead_units": _symptom(
        "Use an activation without a flat part (GELU, LeakyReLU), or a lower learning rate.",
        *(_DAMAGE, {"spikes", "nonfinite_gradients", "weights_shrank"}),
        direction=LOWER,
    ),
    "activation_outlier": _symptom("Scale that module's weights down, or normalize its input.", _DAMAGE, {"spikes"}),
    "attention_collapse": _symptom(
        "Normalize queries and keys, or scale their initial weights down.", _DAMAGE, {"large_logits"}
    ),
    "exploding_gradients": _symptom("Clip the gradient, or scale loss and targets down.", _DAMAGE, {"spikes"}),
    "frozen_parameters": _symptom(
        "Check that the loss depends on them, and that their learning rate is not 0.",
        *(_STILL, _NOT_FINITE, {"dead_units", "lost_updates", "requires_grad_false", "vanishing_gradients"}),
    ),
    "vanishing_gradients": _symptom(
        "Use another activation (ReLU, GELU), residual connections, or normalization layers.",
        *(_DAMAGE, {"dead_units", "requires_grad_false", "weights_shrank"}),
    ),
    "epsilon_dominated": _symptom(
        "Lower eps, or scale the loss up.", _STILL, _DAMAGE, {"vanishing_gradients", "dead_units"}
    ),
    "spectral_growth": _symptom("Lower the learning rate, or use more weight decay.", _DAMAGE, direction=LOWER),
    "loss_rose": _symptom(_CHECKPOINT, _DAMAGE, {"spikes", "weights_shrank", "overfitting"}),
    "loss_rose_again": _symptom(_CHECKPOINT, _DAMAGE, {"spikes", "weights_shrank", "overfitting"}),
    "loss_peak": _symptom("Inspect the batches and the learning rate there.", _DAMAGE, {"spikes", "rolled_back"}),
    # good to know
    "batch_size": _symptom(""),
    "near_curvature": _symptom("Do not raise the learning rate any further.", direction=LOWER),
}
"""Kinds of findings, causes before symptoms. Reports may have other kinds."""
_OTHER = _symptom("", _DAMAGE, _STILL)  # reports of other kinds


@dataclass(frozen=True)
class Finding:
    """One event or condition of a run."""

    kind: str  # one of KINDS, or that of a report
    severity: str  # "problem" (the run is damaged), "warning" (it may be) or "note" (good to know)
    what: str  # what happened, in words
    metrics: tuple[str, ...] = ()  # names of the metrics that show it
    iterations: Iterable[int] | Array = ()  # where it happened; converted to a tuple
    values: Mapping[str, float] = field(default_factory=dict)  # the numbers in the words
    advice: str = ""  # fix, if it differs from that of KINDS
    onset: int = -1  # its place in the order; by default the first iteration, or 0 if there is none
    initially: bool = False  # whether a symptom was there before the first optimizer step

    def __post_init__(self) -> None:
        steps = tuple(np.asarray(self.iterations, int).tolist())
        object.__setattr__(self, "iterations", steps)
        object.__setattr__(self, "onset", self.onset if self.onset >= 0 else next(iter(steps), 0))

    @property
    def about(self) -> Kind:
        """What is known of its kind."""
        return KINDS.get(self.kind, _OTHER)

    @property
    def is_cause(self) -> bool:
        """True if there is evidence of a cause: of a symptom, that it was there before the first step."""
        return self.about.is_cause or self.initially

    @property
    def evidence(self) -> dict[str, Any]:
        """What it rests on."""
        return {"metrics": self.metrics, "iterations": self.iterations, "values": self.values}

    @property
    def action(self) -> str:
        """Advice."""
        return self.advice or self.about.advice

    @property
    def text(self) -> str:
        """Description and advice."""
        return f"{self.what} {self.action}".rstrip()


def in_order(findings: Iterable[Finding], slack: int) -> list[Finding]:
    """Sort findings: by iteration, each cause before the symptoms that it explains, notes last.

    No advice contradicts an earlier one.

    Args:
        slack: iterations by which a symptom may have been measured before its cause.
    """
    kinds = list(KINDS)

    def place(it: Finding) -> tuple[int, int]:
        return it.onset, kinds.index(it.kind) if it.kind in KINDS else len(kinds)

    notes = sorted((it for it in findings if it.severity == "note"), key=place)
    rest = sorted((it for it in findings if it.severity != "note"), key=place)

    def explains(cause: Finding, it: Finding) -> bool:
        known = cause.kind in it.about.explained_by and cause.onset <= it.onset + slack
        return known and not it.initially and not (it.kind in cause.about.explained_by and place(it) < place(cause))

    explained = [it for it in rest if any(explains(cause, it) for cause in rest if cause is not it)]
    roots = [it for it in rest if all(it is not other for other in explained)] or rest[:1]
    ordered: list[Finding] = []
    direction = 0
    for finding in [*roots, *(it for it in explained if all(it is not other for other in roots)), *notes]:
        own = 0 if finding.advice else finding.about.direction
        cause = next((it for it in ordered if explains(it, finding)), None) if finding.severity != "note" else None
        if cause is not None:
            finding = replace(finding, advice=f"Probably a consequence of {cause.kind} above.")
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
