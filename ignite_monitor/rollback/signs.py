"""The signs of trouble that no other monitor gives: the level of the loss, and running statistics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.judging.spikes import SpikeDetector
from ignite_monitor.judging.thresholds import MeanStdThreshold, ThresholdRule
from ignite_monitor.model._torch import foreach_norm, local_part
from ignite_monitor.model.devices import wide_dtype


class AboveLevel(MeanStdThreshold):
    """A logarithm is a spike if it is more than k deviations and a factor above the mean."""

    def __init__(self, k: float = 2.0, factor: float = 1.5, warmup: int = 20, decay: float = 0.95) -> None:
        super().__init__(k, warmup, decay)
        self.factor = factor

    def __call__(self, mean: Tensor, std: Tensor, count: Tensor) -> Tensor:
        return torch.maximum(super().__call__(mean, std, count), mean + math.log(self.factor))


class TimesMean(ThresholdRule):
    """A number is a spike if it is more than so many times the mean."""

    def __init__(self, factor: float = 3.0, warmup: int = 20, decay: float = 0.95) -> None:
        super().__init__(warmup=warmup, decay=decay)
        self.factor = factor

    def __call__(self, mean: Tensor, std: Tensor, count: Tensor) -> Tensor:
        return self.factor * mean


class LossLevel:
    """Whether the loss lies above its level, judged on the host.

    Args:
        patience: how many losses in a row above it mean trouble.
    """

    def __init__(self, patience: int) -> None:
        self._detector = SpikeDetector(AboveLevel(), max_consecutive_spikes=patience)

    def observe(self, loss: float) -> tuple[bool, bool]:
        """Whether a loss is above the level, and whether as many in a row are that it is trouble.

        A loss of zero or less has no logarithm, and is not judged.
        """
        if not 0.0 < loss < math.inf:
            return False, False
        verdict = self._detector.judge(torch.tensor(math.log(loss), dtype=torch.float64, device="cpu"))
        self._detector.observe(verdict)
        return bool(verdict.spike), bool(verdict.level_changed)

    def start_afresh(self) -> None:
        """Forget the level."""
        self._detector.start_afresh()

    def state_dict(self) -> dict[str, Any]:
        """That of its detector."""
        return self._detector.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state_dict: what :meth:`state_dict` returned.
        """
        self._detector.load_state_dict(state_dict)


class RunningStatistics:
    r"""Whether a normalization's running statistics lie far above their level.

    Of each module one number is judged, the second moment that its statistics stand for,
    :math:`\lVert\mu\rVert_2^2 + \lVert\sigma^2\rVert_1`: a mean is not large where it is small against the deviation.
    More than three times its exponentially weighted mean, three times in a row, is trouble.
    """

    _PATIENCE = 3

    def __init__(self) -> None:
        self._modules: list[Any] = []
        self._make(0)

    def _make(self, count: int) -> None:
        self._judged = count
        self._detector = SpikeDetector(TimesMean(), max_consecutive_spikes=self._PATIENCE)
        self._detector.to(torch.zeros(count, dtype=torch.float64, device="cpu"))

    def look_for(self, modules: Iterable[nn.Module]) -> None:
        """Find the modules that keep running statistics."""
        inner = {id(inner): inner for module in modules for inner in module.modules()}
        statistics = ("running_mean", "running_var")
        self._modules = [
            each for each in inner.values() if all(isinstance(getattr(each, n, None), Tensor) for n in statistics)
        ]

    def observe(self) -> Tensor | None:
        """Whether any is not finite, above its threshold, and trouble: three numbers on their device; None if none."""
        means, variances = (
            [tensor if (part := local_part(tensor)) is None else part for tensor in tensors]
            for tensors in (
                [each.running_mean for each in self._modules if each.running_mean is not None],
                [each.running_var for each in self._modules if each.running_var is not None],
            )
        )
        if not means or len(means) != len(variances):
            return None
        device = means[0].device
        dtype = wide_dtype(device)
        sum_in = max(torch.float32, *(each.dtype for each in means), key=lambda dtype: dtype.itemsize)
        norms = [foreach_norm(means, 2.0, dtype=sum_in), foreach_norm(variances, 1.0, dtype=sum_in)]
        roots, moments = (torch.stack([each.to(device, dtype) for each in values]) for values in norms)
        if len(means) != self._judged:
            self._make(len(means))
        verdict = self._detector.judge(torch.addcmul(moments, roots, roots))
        self._detector.observe(verdict)
        return torch.stack((verdict.nonfinite, verdict.spike, verdict.level_changed)).any(1)

    def start_afresh(self) -> None:
        """Forget the levels."""
        self._detector.start_afresh()

    def state_dict(self) -> dict[str, Any]:
        """That of its detector: vectors."""
        return self._detector.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state_dict: what :meth:`state_dict` returned.
        """
        self._make(len(torch.as_tensor(state_dict["restarts"])))
        self._detector.load_state_dict(state_dict)
