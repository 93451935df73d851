"""What becomes of an optimizer's step whose gradient is a spike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ignite_monitor.checks import check_function
from ignite_monitor.detection.spikes import Detection, may_be_true
from ignite_monitor.gradient.skip import StepSkipper, check_hooks, check_skippable, hides_gradients, skips_on_device
from ignite_monitor.model._torch import foreach_scale, sparse_parts
from ignite_monitor.model.devices import move, move_like
from ignite_monitor.model.norms import is_sharded

_CHOICES = "None, 'skip', 'clip' or a function of the engine and the norm"


class Reaction:
    """Leaves the step out, clips its gradient to the threshold, or does nothing; and counts that.

    To clip is to multiply the gradients by threshold / norm on the device, in the step, whatever has become of them
    since backward; where single tensors are judged too, by the smallest of these ratios. A gradient that is not finite
    can't be clipped: its step is left out where that takes no waiting, on the CPU and in fused optimizers of
    ``torch.optim``, and made elsewhere.

    Args:
        on_spike: "skip", "clip", a function, or None.
        optimizer: whose steps they are.

    Raises:
        TypeError: if ``on_spike`` is of another type.
        ValueError: if it is another string, or the optimizer does not allow it.
    """

    def __init__(self, on_spike: Any, optimizer: Optimizer | None) -> None:
        self.kind = on_spike if isinstance(on_spike, str) else None
        if self.kind is None:
            check_function("on_spike", on_spike, "the engine", "the norm", described=_CHOICES)
        elif self.kind not in ("skip", "clip"):
            raise ValueError(f"Argument on_spike should be {_CHOICES}, but given {on_spike!r}")
        if self.kind == "skip":
            check_skippable(optimizer)
        elif self.kind == "clip":
            if optimizer is None:
                raise ValueError("on_spike='clip' needs the argument optimizer, in whose step the gradient is clipped")
            check_hooks("clip", optimizer)
        zero = torch.zeros((), dtype=torch.float64, device="cpu")
        self.counts = {"skipped_count": zero} | ({"clipped_count": zero} if self.kind == "clip" else {})
        self.device = zero.device
        self._optimizer = optimizer
        self._skipper = StepSkipper()
        self._skipped: Tensor | None = None  # whether the step that is going on is left out
        self._logged: dict[str, float] = {}  # the counts at the last log line
        self._in_run = dict.fromkeys(self.counts, 0.0)

    def contexts(self, completed: Callable[[Optimizer], None]) -> list[AbstractContextManager[None]]:
        """What has to be around the train step for steps to be left out, of which ``completed`` is told."""
        return [] if self._optimizer is None else [self._skipper.around(self._optimizer, completed)]

    def load(self, counts: dict[str, Tensor]) -> None:
        """Continue from counts that :meth:`counts_of` returned."""
        self.counts, self.device = counts, torch.device("cpu")
        self._logged = {name: float(count) for name, count in counts.items()}

    def to(self, reference: Tensor) -> None:
        """Move the counts to where a tensor is."""
        self.device = reference.device
        self.counts = {name: move_like(count, reference) for name, count in self.counts.items()}

    def start(
        self,
        optimizer: Optimizer,
        gradients: Sequence[Tensor],
        detection: Detection,
        is_first: bool,
        read: Callable[[], bool],
    ) -> None:
        """The optimizer starts its step.

        Args:
            gradients: those that it is about to use.
            detection: on them.
            is_first: whether it is the first step that uses them.
            read: reads on the host whether they are a spike.
        """
        if self.kind == "skip":
            self._skip(optimizer, detection.spike, read)
        elif self.kind == "clip":
            factor = clip_factor(detection)
            clipped = factor < 1.0
            if is_first and may_be_true(clipped):
                scale(gradients, factor)
                self.counts["clipped_count"] = self.counts["clipped_count"] + clipped
            lost = detection.spike & detection.nonfinite
            on_device = skips_on_device(optimizer)
            if may_be_true(lost) and (on_device or (lost.is_cpu and hides_gradients(optimizer))):
                self._skip(optimizer, lost, lambda: True)

    def _skip(self, optimizer: Optimizer, flag: Tensor, read: Callable[[], bool]) -> None:
        self._skipped = self._skipper.skip(optimizer, flag, read)
        self.counts["skipped_count"] = self.counts["skipped_count"] + self._skipped

    def made(self, optimizer: Optimizer, detection: Detection) -> bool | Tensor:
        """Whether the step that is completed has been made, a 0-dim bool tensor where only the device may know."""
        skipped, self._skipped = self._skipped, None
        made = True if skipped is None else ~skipped
        found_inf = getattr(optimizer, "found_inf", None)  # which tells fused optimizers to make none
        return made if found_inf is None else (found_inf == 0).to(detection.spike.device) & made

    def restore(self) -> None:
        """Put back what leaving out a step has changed."""
        self._skipper.restore()

    def new_run(self) -> None:
        """Count the log lines of a run anew."""
        self._in_run = dict.fromkeys(self.counts, 0.0)

    def message(self, counts: Sequence[float]) -> str | None:
        """What the log says of steps skipped and clipped since the last call: the first ten of a run, and hundredths.

        Args:
            counts: :attr:`counts`, read on the host.
        """
        parts = []
        for name, count in zip(self.counts, counts, strict=True):
            before = self._in_run[name]
            self._in_run[name] = now = before + count - self._logged.get(name, 0.0)
            self._logged[name] = count
            if now > before and (before < 10 or now // 100 > before // 100):
                action = "optimizer step skipped" if name == "skipped_count" else "gradient scaled to its threshold"
                parts.append(f"{action} ({now:.0f} in this run)")
        return ", ".join(parts) or None

    def counts_of(self, state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
        """The counts in a saved state, 0 for those that it does not hold; what is no number is a ValueError."""
        counts = {
            name: torch.as_tensor(state_dict.get(name, 0.0), dtype=torch.float64, device="cpu") for name in self.counts
        }
        for name, count in counts.items():
            if count.ndim:
                raise ValueError(f"Argument state_dict should hold a number as {name}, but given {count}")
        return counts


def clip_factor(detection: Detection) -> Tensor:
    """What to multiply a gradient by so that no norm is above its threshold, 0-dim; 1 where one is not finite."""
    factor = _ratio(detection)
    for other in detection.others:
        if other.norm.ndim:  # and no loss
            factor = torch.minimum(factor, _ratio(other).amin())
    return torch.where(detection.nonfinite, 1.0, factor)


def _ratio(detection: Detection) -> Tensor:
    return torch.where(detection.norm > detection.threshold, detection.threshold / detection.norm, 1.0)


def scale(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by a 0-dim tensor; by 1 changes no bit of them."""
    by_device: dict[torch.device, list[Tensor]] = {}
    with torch.no_grad():
        for gradient in gradients:
            values = _values(gradient)
            by_device.setdefault(values.device, []).append(values)
        for device, group in by_device.items():
            foreach_scale(group, move(factor, device))


def _values(gradient: Any) -> Tensor:
    """What a gradient's numbers lie in: of a DTensor this rank's part, of a sparse tensor its values."""
    if is_sharded(gradient):
        gradient = gradient.to_local()
    if gradient.layout == torch.sparse_coo:
        return sparse_parts(gradient)[1]
    values: Tensor = gradient if gradient.layout == torch.strided else gradient.values()
    return values
