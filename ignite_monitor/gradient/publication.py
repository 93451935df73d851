"""Publication of an iteration's gradient, and description of its spike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.detection.recurring import RecurringSpikes
from ignite_monitor.detection.spikes import Detection, may_be_true
from ignite_monitor.events.monitor_events import NonFiniteSource, Spike
from ignite_monitor.gradient.detector import GradientDetection
from ignite_monitor.model.names import tags

_ACTIONS = {"skipped_count": "optimizer step skipped", "clipped_count": "gradient scaled to its threshold"}
_RECURRING = (
    "isolated spikes of a similar size in iterations {}; from now on steps at such spikes, as of rare data, are made"
)


@dataclass
class IterationState:
    """State and publication of the gradients of one iteration; tensors may be on a device."""

    number: int = -1
    seen: bool = False  # whether there was a gradient
    scale: Tensor | None = None  # of the last backward, 0-dim; None for 1
    stepped: bool | Tensor = False  # whether a step was made
    actions: dict[str, Tensor] = field(default_factory=dict)  # name of a count -> whether a step is counted
    published: GradientDetection | None = None
    is_published: Tensor | None = None  # on a device: whether ``published`` is to be; None for True
    is_described: bool = False  # whether the log has named its culprits
    deferred: dict[str, Tensor] = field(default_factory=dict)  # to be read with the published values

    def publish(self, monitor: Any, detection: GradientDetection | None) -> None:
        """Publish a detection; None for nothing but that no step was made with the iteration's gradient."""
        if monitor.metrics:  # of an earlier gradient of this iteration
            monitor.clear_metrics()
        self.published = detection
        if detection is None:
            self.is_published = None
            monitor.publish(**({"stepped": 0.0} if self.stepped is False else {}))
            return
        norm, (spikes, nonfinite, _) = detection.norm, monitor._counts
        values = monitor._action.counts | {"spike_count": spikes, "nonfinite_count": nonfinite}
        values |= {"norm": norm.value, "threshold": norm.applied_threshold, "mean": norm.mean, "std": norm.std}
        scale = {} if self.scale is None else {"scale": self.scale}
        monitor.publish(**values, **scale, spike=detection.spike, stepped=self.stepped)

    def locate(self, monitor: Any, nonfinite: Tensor, is_spike: bool | None) -> None:
        """Locate the source of a backward's non-finite gradient, if it is known whether that is a spike."""
        locator, source, handles_overflow = monitor._locator, monitor._source, monitor.scaler is not None
        if is_spike is None:
            locator.calls.backward_ended()
            return
        # Without a scaler what is no spike is finite, and needs no further synchronization.
        text = locator.locate(not ((handles_overflow or is_spike) and torch.is_nonzero(nonfinite)), handles_overflow)
        found = locator.source
        source.nonfinite_source = found or source.nonfinite_source
        if text is not None:
            kind, names = ("not_located", ()) if found is None else (found.kind, (found.name,))
            monitor.report(f"nonfinite_{kind}", text, names=names, once=False)

    def defer(self, recurring: RecurringSpikes) -> list[Tensor]:
        """Return what :meth:`resolve` needs on the host."""
        detection = self.published
        tensors = {} if self.is_published is None else {"is_published": self.is_published}
        if detection is not None and (detection.names or self.actions) and may_be_true(detection.spike):
            tensors |= {"spike": detection.spike, "numbers": numbers_of(detection)}
            tensors |= {"recurring": recurring.iterations(self.number), **self.actions}
        self.deferred = tensors
        return [*tensors.values()]

    def resolve(self, monitor: Any, numbers: Sequence[list[float]]) -> dict[str, float]:
        """Report what the deferred tensors show; return the culprits' shares by key."""
        known = dict(zip(self.deferred, numbers, strict=True))
        if not known.get("is_published", [1.0])[0]:
            self.publish(monitor, None)
        if recurring := ", ".join(f"{at:.0f}" for at in sorted(at for at in known.get("recurring", ()) if at == at)):
            monitor.report("recurring_spikes", _RECURRING.format(recurring))
        detection = self.published
        if detection is None or not known.get("spike", [0.0])[0]:
            return {}
        spike = to_spike(known["numbers"], detection.names, monitor)
        for name, text in _ACTIONS.items():
            if known.get(name, [0.0])[0]:
                text += f"; {monitor.prefix}/{name} counts the next ones"
                monitor.report(name.removesuffix("_count"), f"{describe(spike)}; {text}", severity="note")
        if detection.names and not self.is_described:
            self.is_described = True
            monitor.warn(f"{describe(spike)}.")
        tag_of = dict(zip(detection.names, tags(detection.names), strict=True))
        return {f"culprit/{tag_of[name]}": share for name, share in spike.culprits.items()}


def numbers_of(detection: GradientDetection) -> Tensor:
    """Collect the numbers that :func:`to_spike` needs in a vector, without synchronization."""
    norm, parameters = detection.norm, detection.parameters
    numbers = torch.stack((norm.value, norm.applied_threshold))
    if parameters is None:
        return numbers
    # None is named if only those of another rank are above their thresholds.
    return torch.cat((numbers, culprits(parameters) * (norm.spike | parameters.spike.any())))


def to_spike(numbers: Sequence[float], names: Sequence[str], monitor: Any) -> Spike:
    """Convert :func:`numbers_of`, read on the host."""
    value, threshold, *shares = numbers
    threshold = math.inf if math.isnan(threshold) else threshold
    source: NonFiniteSource | None = monitor._locator.source
    return Spike(monitor, f"{monitor.prefix}/norm", value, threshold, named(shares, names), source)


def describe(spike: Spike) -> str:
    """Describe a spike of a gradient in words."""
    text = f"gradient norm {spike.value:.3g}"
    if 0 < spike.threshold < spike.value < math.inf:
        text += f", {spike.value / spike.threshold:.3g} x its threshold"
    shares = ", ".join(f"{100 * share:.0f} % of the excess in {name}" for name, share in spike.culprits.items())
    return f"{text}; {shares}" if shares else text


def culprits(detection: Detection) -> Tensor:
    """Return the three largest shares in the excess of all norms over their thresholds, then the parameters' indices.

    Norms that are not finite share it equally. If all norms are within their thresholds, it is the excess over the
    means.
    """
    huge = torch.finfo(detection.value.dtype).max ** 0.5
    bounds = torch.stack((detection.applied_threshold, detection.mean)).nan_to_num(math.inf)
    excess, beyond = (detection.value - bounds).nan_to_num(nan=huge, posinf=huge).clamp(min=0.0).unbind()
    excess = torch.where(excess.any(), excess, beyond)
    shares, indices = (excess / excess.sum()).topk(min(3, len(excess)))
    return torch.cat((shares, indices))


def named(culprits: Sequence[float], names: Sequence[str]) -> dict[str, float]:
    """Convert :func:`culprits`, read on the host, to name -> share; shares below 5 % are omitted."""
    half = len(culprits) // 2
    shares = zip(culprits[half:], culprits[:half], strict=True)
    return {names[int(index)]: share for index, share in shares if share >= 0.05}
