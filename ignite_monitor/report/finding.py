"""Findings: events and conditions of a run, what to do about them, and their order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from ignite_monitor.hdf5.layout import SEVERITIES as SEVERITIES
from ignite_monitor.hdf5.layout import printable
from ignite_monitor.report.run import Array


class Kind(NamedTuple):
    """A kind of finding: a cause explains later ones by damage, by stillness (parameters hardly move), or both."""

    advice: str = ""
    explains: tuple[str, ...] = ()
    explained_by: tuple[str, ...] = ()  # by what a cause may explain it
    is_cause: bool = True  # whether it rests on evidence of a cause; otherwise it is a symptom


DAMAGE, STILL = ("damage",), ("stillness",)
BOTH = DAMAGE + STILL
_INSPECT = 'Inspect these batches; GradMonitor(on_spike="skip") skips such steps.'
_CHECKPOINT = "Restore a checkpoint from before, and check what changed there (data, loss, learning rate)."


def _symptom(advice: str = "", explained_by: tuple[str, ...] = DAMAGE, explains: tuple[str, ...] = ()) -> Kind:
    return Kind(advice, explains, explained_by, False)


SETUP = {  # faults of the set-up; their reports have advice of their own
    "not_in_optimizer": Kind(explains=STILL),
    "stale_optimizer": Kind(explains=STILL),
    "no_gradients": Kind("Look for detach(), layers that are all 0, and a loss that is saturated or 0.", STILL, DAMAGE),
    "gradients_not_zeroed": Kind(explains=DAMAGE),
    "zero_learning_rate": Kind(explains=STILL),
    "large_momentum": Kind("Use 0.9, or a learning rate that is smaller by the same factor.", DAMAGE),
    "evaluation_mode": Kind(explains=DAMAGE),
    "batch_repeats": Kind(),
    "wrapper_bypassed": Kind(),
    "no_gradient": Kind(explains=STILL),
    "scaler_not_given": Kind(explains=DAMAGE),
    "unused_parameters": Kind(explains=STILL),
    "no_step": Kind("", STILL, BOTH),
}
KINDS: dict[str, Kind] = {
    # causes
    **SETUP,
    "requires_grad_false": Kind(),
    "nonfinite_input": Kind("Inspect this batch, and the code that makes it.", DAMAGE),
    "nonfinite_loss": Kind("Look for log, sqrt or a division near 0 in the loss, and for such targets.", BOTH),
    "nonfinite_forward": Kind("Inspect that module and its input.", DAMAGE, DAMAGE),
    "nonfinite_backward": Kind("Look for sqrt, norm or a division at 0 in that module.", DAMAGE, DAMAGE),
    "input_scale": Kind("Normalize the inputs, unless the model does so.", BOTH, DAMAGE),
    "loss_scale": Kind("Scale the targets (or rewards) to about 1, or average the loss.", DAMAGE, DAMAGE),
    "weight_changed": Kind("Look for code that writes to weights: initialization, loading, clipping.", BOTH, DAMAGE),
    "clipped_away": Kind("Clip to about the usual norm, or scale a large loss down.", STILL, DAMAGE),
    "rate_vanished": Kind("Let the schedule end with the training; step it per epoch if it counts epochs.", STILL),
    "group_rate": Kind("Give this group a learning rate nearer to the others', unless it is intended.", DAMAGE),
    "rate_rose": Kind("Lower the learning rate, or let it rise more slowly.", BOTH),
    "large_updates": Kind("Lower the learning rate, or average the loss or gradients over items.", BOTH, DAMAGE),
    "weights_shrank": Kind("Lower the weight decay, or scale large initial weights down.", BOTH, DAMAGE),
    "bounded_outputs": Kind("Give the loss logits: cross_entropy and BCEWithLogitsLoss apply softmax or sigmoid."),
    "wrong_sign": Kind(
        "Check that the train step returns the loss, its sign, maximize, and the learning rate.", DAMAGE, DAMAGE
    ),
    "overfitting": Kind("Use more data or augmentation, regularize, or stop at the best value."),
    "periodic_spikes": Kind("Check for a batch or event with this period.", DAMAGE, DAMAGE),
    "bad_batches": Kind(_INSPECT, DAMAGE, DAMAGE),
    "no_step_at_spikes": Kind("", BOTH, BOTH),
    "lost_updates": Kind("Keep the weights, or a copy of them, in float32 and use torch.autocast.", STILL, STILL),
    "small_updates": Kind("Raise the learning rate, unless the training has converged.", STILL, STILL),
    "not_learning": Kind("Check that inputs and targets match, and that the model can fit ten examples.", (), STILL),
    "overflows": Kind("Give the GradScaler a larger growth_interval, or use bfloat16."),
    "ranks_differ": Kind("Restore a checkpoint from before, and check that rank's hardware and random seeds."),
    "data_wait": Kind("Give the loader more workers, or let it prefetch (prefetch_factor, pin_memory)."),
    # symptoms
    "not_monitored": _symptom(),
    "nonfinite_not_located": _symptom(),
    "stale_moments": _symptom("Lower beta2 (0.95), or clip updates as StableAdamW does."),
    "large_logits": _symptom("Normalize queries and keys (QK-norm), clip the logits, or lower the learning rate."),
    "spikes": _symptom(_INSPECT),
    "loss_spikes": _symptom("Inspect these batches."),
    "nonfinite_activations": _symptom("Inspect that module and its input."),
    "nonfinite_gradients": _symptom(_INSPECT),
    "nonfinite_metric": _symptom("Find the first non-finite value: the log names the module and the iteration."),
    "rolled_back": _symptom("Inspect the batches that were skipped, and the learning rate there."),
    "dead_units": _symptom(
        "Use GELU or LeakyReLU, or a lower learning rate; re-initialize a layer that was dead from the start.",
        *(DAMAGE, STILL),
    ),
    "activation_outlier": _symptom("Scale that module's weights down, or normalize its input."),
    "exploding_gradients": _symptom("Clip the gradient, or scale loss and targets down."),
    "vanishing_gradients": _symptom("Use ReLU or GELU, residual connections, or normalization.", BOTH, STILL),
    "frozen_parameters": _symptom("Check that the loss depends on them, and that their learning rate is not 0.", BOTH),
    "epsilon_dominated": _symptom("Lower eps, or scale the loss up.", BOTH, STILL),
    "loss_rose": _symptom(_CHECKPOINT),
    "loss_rose_again": _symptom(_CHECKPOINT),
}
"""Kinds of findings, of those that begin together the first cause first. Reports may have other kinds."""
_OTHER = _symptom("", ())  # reports of other kinds
_BEFORE = "no_gradients", "evaluation_mode", "scaler_not_given", "input_scale", "loss_scale", "clipped_away"
"""Causes that act before the first optimizer step."""
_NONFINITE = "nonfinite_input", "nonfinite_loss", "nonfinite_forward", "nonfinite_backward"


@dataclass(frozen=True)
class Finding:
    """One event or condition of a run."""

    kind: str  # one of KINDS, or that of a report
    severity: str  # "problem" (the run is damaged), "warning" (it may be) or "note" (good to know)
    what: str  # what happened, in words; control characters are escaped
    metrics: tuple[str, ...] = ()  # names of the metrics that show it
    iterations: Iterable[int] | Array = ()  # where it happened; converted to a tuple
    values: Mapping[str, float] = field(default_factory=dict)  # the numbers in the words
    advice: str = ""  # fix, if it differs from that of KINDS
    onset: int = -1  # its place in the order; by default the first iteration, or 0 if there is none
    initially: bool = False  # whether a symptom was there before the first optimizer step

    def __post_init__(self) -> None:
        places = tuple(np.asarray(self.iterations, int).tolist())
        object.__setattr__(self, "what", printable(self.what))
        object.__setattr__(self, "iterations", places)
        object.__setattr__(self, "onset", self.onset if self.onset >= 0 else next(iter(places), 0))

    @property
    def about(self) -> Kind:
        """Its kind."""
        return KINDS.get(self.kind, _OTHER)

    @property
    def is_symptom(self) -> bool:
        """True if a cause is not known: a symptom that was not there before the first step."""
        return self.kind in KINDS and not (self.about.is_cause or self.initially)

    @property
    def action(self) -> str:
        """Advice."""
        return self.advice or self.about.advice

    @property
    def text(self) -> str:
        """Description and advice."""
        return f"{self.what} {self.action}".rstrip()

    @property
    def place(self) -> tuple[bool, int, int, int]:
        """Sort key: reports of other kinds last, then by the onset and what precedes steps, then as in KINDS."""
        order = 0 if self.kind in SETUP or self.kind in _BEFORE else 1 if self.initially else 2
        is_known = self.kind in KINDS
        return not is_known, self.onset, order, list(KINDS).index(self.kind) if is_known else 0

    def explains(self, other: Finding, slack: int) -> bool:
        """Return True if it is a cause of another finding, which may have been measured ``slack`` iterations before."""
        if other.kind == self.kind or self.is_symptom or self.onset > other.onset + slack:
            return False
        is_first = self.kind in _NONFINITE and self.onset <= next(iter(other.iterations), 0)
        if other.initially and not (self.initially or self.kind in _BEFORE or is_first):
            return False
        mutual = {*other.about.explains} & {*self.about.explained_by}
        known = {*self.about.explains} & {*other.about.explained_by}
        return bool(known) and (not mutual or self.place < other.place)


def in_order(findings: Iterable[Finding], slack: int) -> list[Finding]:
    """Sort findings: unexplained problems, then warnings, by iteration, causes first; what they explain; notes last.

    If the first of them is a symptom, the unexplained symptoms come first, by iteration: the cause is before them.

    Of several causes of a finding the one of the same iteration is named, otherwise the first.
    """
    ordered = sorted(findings, key=lambda it: it.place)
    notes = [it for it in ordered if it.severity == "note"]
    rest = [it for it in ordered if it.severity != "note"]
    roots = [it for it in rest if not any(cause.explains(it, slack) for cause in rest)] or rest[:1]
    explained = []
    for finding in rest:
        if not any(finding is root for root in roots):
            causes = [it for it in [*roots, *rest] if it.explains(finding, slack)]
            cause = next((it for it in causes if it.onset == finding.onset), causes[0])
            relation = "related to" if finding.about.is_cause else "a consequence of"
            explained.append(replace(finding, advice=f"Probably {relation} {cause.kind} above."))
    is_unknown = any(it.is_symptom for it in sorted(roots, key=lambda it: it.severity != "problem")[:1])
    roots.sort(key=lambda it: not it.is_symptom if is_unknown else it.severity != "problem")
    return [*roots, *sorted(explained, key=lambda it: it.is_symptom), *notes]


def number(value: float, digits: int = 4) -> str:
    """Format a number; whole numbers without a decimal point."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.{digits}g}"


def plural(count: int, what: str) -> str:
    """Format a count: ``1 step``, ``2 steps``."""
    return f"{count} {what}{'s' * (count != 1)}"


def listed(items: Iterable[str], at_most: int = 5) -> str:
    """Join items: ``a, b and 3 more``."""
    items = list(items)
    if len(items) > at_most + 1:
        return f"{', '.join(items[:at_most])} and {len(items) - at_most} more"
    return " and ".join(filter(None, [", ".join(items[:-1]), *items[-1:]]))


def iterations(at: Array) -> str:
    """Format ascending iterations: ``iteration 7``, ``iterations 7, 20-25 and 90``."""
    starts = np.flatnonzero(np.diff(at, prepend=at[:1] - 2) != 1)
    ranges = zip(at[starts].tolist(), at[np.append(starts[1:], len(at)) - 1].tolist(), strict=True)
    ranges_as_text = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return f"iteration{'s' * (len(at) > 1)} {listed(ranges_as_text, 6)}"
