"""The action at a spike: skip the optimizer step, or clip its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.checks import check_function
from ignite_monitor.detection.spikes import may_be_true
from ignite_monitor.gradient.detector import GradientDetection, gradients_of
from ignite_monitor.gradient.skip import StepSkipper, check_step, hides_gradients, skips_on_device
from ignite_monitor.gradient.window import Taken
from ignite_monitor.model._torch import foreach_scale, sparse_parts
from ignite_monitor.model.devices import move, move_like
from ignite_monitor.model.norms import is_dtensor

_CHOICES = "None, 'skip', 'clip' or a function of the engine and the norm"
_DONE = {"skipped_count": "optimizer step skipped", "clipped_count": "gradient scaled to its threshold"}


class SpikeAction:
    """Skips steps or clips gradients, and counts that.

    Clipping multiplies the gradients of a step by the smallest ratio threshold / norm, on the device. A non-finite
    gradient cannot be clipped: its step is skipped if that takes no synchronization, on the CPU and in fused optimizers
    of ``torch.optim``.
    """

    def __init__(self, on_spike: Any, optimizer: Optimizer | None) -> None:
        self.kind = on_spike if isinstance(on_spike, str) else None  # "skip", "clip" or None
        if self.kind is None:
            check_function("on_spike", on_spike, "the engine", "the norm", described=_CHOICES)
        elif self.kind not in ("skip", "clip"):
            raise ValueError(f"Argument on_spike should be {_CHOICES}, but given {on_spike!r}")
        else:
            check_step(self.kind, optimizer)
        names = ["skipped_count", "clipped_count"] if self.kind == "clip" else ["skipped_count"]
        # Steps skipped, and with "clip" gradients clipped, so far: 0-dim.
        self.counts = {name: torch.zeros((), dtype=torch.float64, device="cpu") for name in names}
        self.skipper = StepSkipper()
        self._skipped: Tensor | None = None  # whether the step in progress is skipped
        self._read, self._in_run = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)  # counts as last read

    def at_step(
        self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], taken: Taken, read: Callable[[Tensor], bool]
    ) -> Callable[[], None] | None:
        """Return a function that acts on the gradients of a step that starts; ``read`` reads a flag on the host."""
        if self.kind == "skip":
            return lambda: self._skip(optimizer, taken.detection.spike, read)
        return (lambda: self._clip(optimizer, parameters, taken)) if self.kind == "clip" else None

    def made(self, optimizer: Optimizer, spike: Tensor) -> bool | Tensor:
        """Return whether the completed step was made, a 0-dim bool tensor if only the device may know."""
        skipped, self._skipped = self._skipped, None
        made = True if skipped is None else ~skipped
        found_inf = getattr(optimizer, "found_inf", None)  # with which fused optimizers skip
        return made if found_inf is None else (found_inf == 0).to(spike.device) & made

    def start_run(self) -> None:
        """Restore, and count the log lines of a run from zero."""
        self.skipper.restore()
        self._in_run = dict.fromkeys(self.counts, 0.0)

    def message(self, counts: Sequence[float]) -> str | None:
        """Describe the skips and clips since the last call, from :attr:`counts` on the host: ten, then each 100th."""
        parts = []
        for name, count in zip(self.counts, counts, strict=True):
            before = self._in_run[name]
            now = self._in_run[name] = before + count - self._read[name]
            if now > before and (before < 10 or now // 100 > before // 100):
                parts.append(f"{_DONE[name]} ({now:.0f} in this run).")
            self._read[name] = count
        return " ".join(parts) or None

    def load(self, counts: dict[str, Tensor]) -> None:
        """Continue from other :attr:`counts`."""
        self.counts, self._read = counts, {name: float(count) for name, count in counts.items()}

    def _clip(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], taken: Taken) -> None:
        norm, factor = taken.detection.norm, clip_factor(taken.detection)
        clipped = factor < 1.0
        if taken.updates and may_be_true(clipped):
            scale(gradients_of(parameters), factor)
            self._count("clipped_count", clipped)
        lost = norm.spike & norm.nonfinite
        if may_be_true(lost) and (skips_on_device(optimizer) or (lost.is_cpu and hides_gradients(optimizer))):
            self._skip(optimizer, lost, torch.is_nonzero)

    def _skip(self, optimizer: Optimizer, flag: Tensor, read: Callable[[Tensor], bool]) -> None:
        self.skipper.skip(optimizer, flag, read)
        self._skipped = flag
        if may_be_true(flag):
            self._count("skipped_count", flag)

    def _count(self, name: str, flag: Tensor) -> None:
        self.counts[name] = move_like(self.counts[name], flag.to(self.counts[name].dtype)) + flag


def clip_factor(detection: GradientDetection) -> Tensor:
    """Factor of a gradient after which no norm is above its threshold, 0-dim; 1 for a non-finite gradient."""
    parts = [part for part in (detection.norm, detection.parameters) if part is not None]
    ratios = [torch.where(part.above, part.threshold / part.compared, 1.0).amin() for part in parts]
    return torch.where(detection.norm.nonfinite, 1.0, torch.stack(ratios).amin())


def scale(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by a 0-dim tensor; a factor of 1 changes no bit."""
    by_device: dict[torch.device, list[Tensor]] = {}
    with torch.no_grad():
        for gradient in gradients:
            values = _values(gradient)
            by_device.setdefault(values.device, []).append(values)
        for device, group in by_device.items():
            foreach_scale(group, move(factor, device))


def _values(gradient: Any) -> Tensor:
    """The tensor of a gradient's numbers: of a DTensor this rank's part, of a sparse tensor its values."""
    if is_dtensor(gradient):
        gradient = gradient.to_local()
    if gradient.layout == torch.sparse_coo:
        return sparse_parts(gradient)[1]
    values: Tensor = gradient if gradient.layout == torch.strided else gradient.values()
    return values
