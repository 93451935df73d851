"""Finding: one thing that happened in a run, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

SEVERITIES = ("problem", "warning", "note")

KINDS = {
    "nonfinite_metric": "Find what overflowed: the first module and the first gradient that are not finite tell where.",
    "nonfinite_gradients": "Lower the learning rate, or leave these steps out: GradMonitor(on_spike='skip').",
    "no_step": "Give GradMonitor the optimizer whose step() the train step calls.",
    "ranks_differ": "Go back to a checkpoint from before, and look at that rank's hardware and its random seeds.",
    "spikes": "Look at these batches, or leave the steps out: GradMonitor(on_spike='skip').",
    "went_back": "Look at the batches that were left out, and at the learning rate there.",
    "early_norms": "Warm the learning rate up, and look at these batches: no rule judges the first norms.",
    "loss_rose": "Lower the learning rate, and go back to a checkpoint from before.",
    "loss_rose_again": "Go back to a checkpoint from before, with a lower learning rate.",
    "nonfinite_activations": "Look at that module first, and at what it is given.",
    "frozen_parameters": "See that the loss depends on them, and that their learning rate is not 0.",
    "attention_collapse": "Normalise queries and keys, or lower the learning rate and the initial weights of both.",
    "large_logits": "Normalise queries and keys (QK-norm), clip them (QK-clip), or lower their learning rate.",
    "dead_units": "Lower the learning rate or the bias, or use an activation that is nowhere flat.",
    "activation_outlier": "If it is raw inputs, scale them; else lower the initial weights or the learning rate there.",
    "level_change": "See what changed there (data, learning rate); if nothing did, treat it as a spike.",
    "overflows": "Give the GradScaler a larger growth_interval, or use bfloat16.",
    "large_curvature": "Lower the learning rate, or warm it up for longer.",
    "large_updates": "Lower the learning rate.",
    "small_updates": "Raise the learning rate, and see whether gradients arrive.",
    "stale_moments": "Lower beta2 (0.95), or clip updates as StableAdamW does.",
    "eps_rules": "Lower eps, or scale the loss up.",
    "lost_updates": "Keep the weights in float32 under torch.autocast, or have float32 copies of them.",
    "update_ratio_outlier": "handler.diagnostics tells which one; give it a learning rate of its own.",
    "weight_update_outlier": "Give these layers a learning rate of their own: ignite-monitor coord-check says which.",
    "exploding_gradients": "Clip the gradient, or scale loss and targets down.",
    "vanishing_gradients": "handler.diagnostics tells which; see that the loss depends on them.",
    "spectral_growth": "Lower the learning rate, or use more weight decay.",
    "not_judged": "",
    "small_batch": "Use larger batches if there are devices for it, with a learning rate to match.",
    "large_batch": "Use smaller batches if time on devices is what counts.",
    "batch_size": "",
    "near_curvature": "Do not raise the learning rate any further.",
    "untrained": "If that is not on purpose, set requires_grad and give them to the optimizer.",
    "frozen_for_a_while": "If that is not on purpose, see what the learning rate and the data were there.",
    "data_wait": "Give the loader more workers, or let it prepare batches ahead (prefetch_factor, pin_memory).",
    "gap": "Nothing to do if the run was resumed there.",
    "input_drift": "Usual of norms; of other layers, raise the learning rate, or lower that of the layers before them.",
}
"""The kinds of findings, what matters most first, and what to do about each."""


@dataclass(frozen=True)
class Finding:
    """One thing that happened in a run."""

    kind: str  # one of KINDS
    severity: str  # "problem" (the run is damaged), "warning" (it may be) or "note" (good to know)
    what: str  # what happened, in words
    metrics: tuple[str, ...] = ()  # the names of those that tell it
    iterations: tuple[int, ...] = ()  # where it happened
    values: dict[str, float] = field(default_factory=dict)  # the numbers in the words
    advice: str = ""  # what to do about it, where it is not what KINDS says

    @property
    def action(self) -> str:
        """What to do about it."""
        return self.advice or KINDS[self.kind]

    @property
    def text(self) -> str:
        """What happened, and what to do about it."""
        return f"{self.what} {self.action}"


def steps(of: Iterable[int]) -> tuple[int, ...]:
    """Steps of an array as Python's own numbers."""
    return tuple(int(step) for step in of)
