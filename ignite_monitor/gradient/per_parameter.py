"""Spikes of single parameters, by their own earlier gradient norms."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ignite_monitor.detection.robust import RobustThreshold
from ignite_monitor.detection.spikes import Detection, SpikeDetector
from ignite_monitor.model.devices import move_like, upload
from ignite_monitor.model.names import tags

_SHARED = 0.7
_MOST, _LEAST = 3, 0.05  # number of culprits, and the smallest share of one


class PerParameterDetector:
    r"""Compares one gradient norm per parameter with its own :class:`RobustThreshold`, all in one vector.

    A change that all parameters share is no fault of one of them. So if most norms are above their means, each is
    divided by :math:`\max(1, m)^{0.7}` first, with the median m of norm / mean (``docs/detection.md``). Parameters are
    identified by name. A norm of zero, as of a parameter without a gradient, updates nothing.

    Args:
        k: number of upper spreads above the mean.
        options: those of :class:`SpikeDetector`.
    """

    def __init__(self, k: float = 8.0, **options: Any) -> None:
        self.names: tuple[str, ...] = ()
        self._options = {"rule": RobustThreshold(k=k), **options}
        self.detector = SpikeDetector(**self._options)

    def detect(self, names: tuple[str, ...], norms: Tensor) -> Detection:
        """Compare norms.

        Args:
            names: of the parameters.
            norms: of their gradients, one-dimensional; 0 for none.

        Returns:
            A detection of all parameters in :attr:`names`, which start with the given ones.
        """
        if names != self.names[: len(names)]:
            known = set(names)
            self._arrange((*names, *(name for name in self.names if name not in known)), norms)
        if len(self.names) > len(names):
            norms = pad(norms, (0, len(self.names) - len(names)))
        if self.detector.rule.state["mean"].device != norms.device:
            self.detector.to(norms)
        means = self.detector.rule.state["mean"]  # 0 before the first
        ratios = (norms / means).masked_fill(torch.minimum(norms, means) <= 0.0, math.nan)
        common = ratios.nanmedian().nan_to_num(1.0).clamp(min=1.0)
        return self.detector.detect(norms, norms / common**_SHARED)

    def observe(self, detection: Detection, when: Tensor | None = None) -> None:
        """Update the statistics, where a 0-dim bool tensor is True; None for True."""
        if len(detection.value) == len(self.names):  # else another state has been loaded since
            self.detector.observe(detection, when)

    def reset_threshold(self) -> None:
        """Discard all earlier norms."""
        self.detector.reset_threshold()

    def named(self, culprits: Sequence[float]) -> dict[str, float]:
        """Convert :func:`culprits`, read on the host, to name -> share; small shares are omitted."""
        half = len(culprits) // 2
        shares = zip(culprits[half:], culprits[:half], strict=True)
        return {self.names[int(index)]: share for index, share in shares if share >= _LEAST}

    def keys(self, culprits: Sequence[float]) -> dict[str, float]:
        """Convert :func:`culprits`, read on the host, to published key -> share."""
        tag_of = dict(zip(self.names, tags(self.names), strict=True))
        return {f"culprit/{tag_of[name]}": share for name, share in self.named(culprits).items()}

    def copy(self) -> PerParameterDetector:
        """Return a detector of the same state, which changes independently."""
        twin = copy.copy(self)
        twin.detector = self.detector.copy()
        return twin

    def state_dict(self) -> dict[str, Any]:
        """Return names and the state of all parameters: vectors."""
        return {"names": list(self.names), "detector": self.detector.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state; a ValueError if it is of something else, and nothing has changed then."""
        if set(state_dict) != {"names", "detector"}:
            raise ValueError(f"Argument state_dict should hold names and detector, but given {[*state_dict]}")
        names = tuple(state_dict["names"])
        detector = self._make(torch.zeros(len(names), dtype=torch.float64, device="cpu"))
        detector.load_state_dict(state_dict["detector"])
        self.detector, self.names = detector, names

    def _make(self, reference: Tensor) -> SpikeDetector:
        detector = SpikeDetector(**copy.deepcopy(self._options))
        detector.to(reference)
        return detector

    def _arrange(self, names: tuple[str, ...], reference: Tensor) -> None:
        """Arrange the state for these names; new ones have an empty state."""
        index_of = {name: i for i, name in enumerate(self.names)}
        size = len(index_of)
        index = upload(torch.tensor([index_of.get(name, size) for name in names], device="cpu"), reference.device)

        def arranged(values: Tensor) -> Tensor:
            return pad(move_like(values.expand(size), reference), (0, 1))[index]

        state = self.detector.state_dict()
        rule = {name: arranged(value) for name, value in state.pop("rule").items()}
        self.detector, self.names = self._make(reference.new_zeros(len(names))), names
        self.detector.load_state_dict({name: arranged(value) for name, value in state.items()} | {"rule": rule})


def excess_shares(detection: Detection) -> Tensor:
    """Share of each parameter in the excess of all norms over their thresholds; NaN if there is none.

    Norms that are not finite share it equally. If all norms are within their thresholds, it is the share in the excess
    over the means.
    """
    huge = torch.finfo(detection.value.dtype).max ** 0.5
    bounds = torch.stack((detection.threshold, detection.mean)).nan_to_num(math.inf)
    excess, beyond = (detection.value - bounds).nan_to_num(nan=huge, posinf=huge).clamp(min=0.0).unbind()
    excess = torch.where(excess.any(), excess, beyond)
    return excess / excess.sum()


def culprits(detection: Detection, spike: Tensor | bool = True) -> Tensor:
    """Return the largest shares of the excess, then the parameters' indices, in one vector.

    Args:
        detection: of a vector of norms.
        spike: 0-dim bool: whether to report any.
    """
    shares, indices = excess_shares(detection).topk(min(_MOST, len(detection.value)))
    return torch.cat((shares * spike, indices))


def described(what: str, value: float, threshold: float, shares: Mapping[str, float]) -> str:
    """Describe a spike in words; ``shares`` are those of parameters in the excess, by name."""
    text = f"{what} {value:.3g}"
    if value <= threshold < math.inf:
        text += f", within its threshold {threshold:.3g}"
    elif 0 < threshold < math.inf > value:
        text += f", {value / threshold:.3g} x its threshold"
    listed = ", ".join(f"{100 * share:.0f} % of the excess in {name}" for name, share in shares.items())
    return f"{text}; {listed}" if listed else text
