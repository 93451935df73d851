"""The signs of trouble: the level of the loss, running statistics, what monitors count, and requests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ignite_monitor.model._torch import buffers_of_each, foreach_norm, part_of_rank
from ignite_monitor.model.devices import device_of, wide_dtype
from ignite_monitor.model.norms import any_sharded
from ignite_monitor.monitor.base import Monitor
from ignite_monitor.monitor.publisher import transfer
from ignite_monitor.monitor.ranks import sum_over_ranks
from ignite_monitor.rollback.levels import loss_levels, statistics_levels


class RunningStatistics:
    r"""What the running statistics of normalizations stand for.

    Of each module it is one number, its second moment :math:`\lVert\mu\rVert_2^2 + \lVert\sigma^2\rVert_1`: a mean is
    not large where it is small against the deviation.
    """

    _NAMES = ("running_mean", "running_var")

    def __init__(self) -> None:
        self._buffers: list[dict[str, Any]] = []

    def look_for(self, modules: Iterable[nn.Module]) -> None:
        """Find the modules that keep running statistics."""
        inner = {id(inner): inner for module in modules for inner in module.modules()}
        self._buffers = [each for each in buffers_of_each(inner.values()) if each.keys() >= set(self._NAMES)]

    def norms(self) -> list[Tensor]:
        """The norms of all means, and then of all variances: on each device a vector."""
        mean, variance = self._NAMES
        kept = [each for each in self._buffers if each[mean] is not None and each[variance] is not None]
        found = []
        for device in {each[mean].device: None for each in kept}:
            here = [each for each in kept if each[mean].device == device]
            means, variances = ([each[name] for each in here] for name in self._NAMES)
            if any_sharded(means):
                means, variances = ([part_of_rank(each) for each in tensors] for tensors in (means, variances))
            dtype = max(torch.float32, *(each.dtype for each in means), key=lambda dtype: dtype.itemsize)
            norms = [*foreach_norm(means, 2.0, dtype=dtype), *foreach_norm(variances, 1.0, dtype=dtype)]
            found.append(torch.stack(norms))
        return found

    @staticmethod
    def moments(norms: Sequence[Sequence[float]]) -> list[float]:
        """The second moment of each module, from the vectors that :meth:`norms` gave."""
        halves = [(each[: len(each) // 2], each[len(each) // 2 :]) for each in norms]
        return [mean * mean + variance for pair in halves for mean, variance in zip(*pair, strict=True)]


@dataclass
class Signs:
    """What an iteration's signs are, on one rank or on all of them.

    Attributes:
        loss: the sum of the ranks' losses.
        losses: how many there are.
        reasons: which trouble, on this rank.
        look: something is not finite: is the state?
        nonfinite: a loss or gradient is not finite, and nobody looks after it.
        spike: something is above its threshold.
        trouble: something is trouble by itself.
    """

    loss: float
    losses: float
    reasons: list[str] = field(default_factory=list)
    look: bool = False
    nonfinite: bool = False
    spike: bool = False
    trouble: bool = False

    def is_trouble(self, reason: str) -> None:
        """There is trouble, and why."""
        self.trouble = True
        self.reasons.append(reason)

    def summed(self, device: torch.device) -> Signs:
        """The signs of all ranks."""
        own = [self.loss, self.losses, self.look, self.nonfinite, self.spike, self.trouble]
        loss, losses, *flags = sum_over_ranks(torch.tensor(own, dtype=wide_dtype(device), device=device)).tolist()
        return Signs(loss, losses, self.reasons, *map(bool, flags))


class Watch:
    """Collects the signs of every iteration, in one transfer from each device.

    Args:
        patience: how many losses in a row above their level mean trouble.
        modules: whose running statistics are looked at, the first of which lies where ranks communicate.

    Attributes:
        has_signs: whether there has ever been anything to judge by.
    """

    def __init__(self, patience: int, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._statistics = RunningStatistics()
        self.look_for_statistics()
        self._levels = {"loss": loss_levels(patience), "statistics": statistics_levels()}
        self._counts: WeakKeyDictionary[Monitor, list[float]] = WeakKeyDictionary()
        self._request: str | None = None
        self.has_signs = False

    def request(self, reason: str) -> None:
        """There is trouble in this iteration, or the next."""
        self._request = reason

    def meet(self, monitors: Iterable[Monitor]) -> None:
        """What monitors who are new have counted so far is no sign."""
        for monitor in monitors:
            if monitor not in self._counts and (counts := monitor.counts()) is not None:
                self._counts[monitor] = counts.tolist()

    def look_for_statistics(self) -> None:
        """Modules may have come, or gone."""
        self._statistics.look_for(self._modules)

    def signs(self, loss: float | Tensor | None, monitors: Iterable[Monitor], ranks: int = 1) -> Signs:
        """Of the iteration that ends, the same on every rank but for the reasons.

        Args:
            loss: a number or a tensor with one element; None where there is none.
            ranks: how many there are.
        """
        counts = {each: counts for each in monitors if (counts := each.counts()) is not None}
        asked = [[loss] if isinstance(loss, Tensor) else [], [*counts.values()], self._statistics.norms()]
        losses, numbers, norms = transfer(asked) if any(asked) else [[], [], []]
        number = losses[0][0] if isinstance(loss, Tensor) else loss
        self.has_signs = self.has_signs or number is not None or any(asked)
        signs = Signs(0.0 if number is None else number, number is not None)
        self._look_at_counts(signs, dict(zip(counts, numbers, strict=True)))
        self._look_at_statistics(signs, self._statistics.moments(norms))
        if self._request is not None:
            signs.is_trouble(self._request)
            self._request = None
        if ranks > 1:
            signs = signs.summed(device_of(self._modules[0]))
        if signs.losses:
            self._look_at_loss(signs, signs.loss / signs.losses)
        return signs

    def _look_at_counts(self, signs: Signs, counts: Mapping[Monitor, list[float]]) -> None:
        for monitor, now in counts.items():
            spikes, nonfinite, restarts = (a > b for a, b in zip(now, self._counts.get(monitor, now), strict=True))
            self._counts[monitor] = now
            signs.spike |= spikes
            signs.look |= nonfinite
            signs.nonfinite |= nonfinite and spikes  # what a GradScaler looks after is no spike
            if restarts:
                signs.is_trouble(f"{monitor.prefix} has had so many spikes in a row that its level has changed")

    def _look_at_statistics(self, signs: Signs, found: list[float]) -> None:
        if not all(map(math.isfinite, found)):
            signs.look = True
        spike, trouble = self._levels["statistics"].observe(found)
        signs.spike |= spike
        if trouble:
            signs.is_trouble("running statistics are far above their level")

    def _look_at_loss(self, signs: Signs, loss: float) -> None:
        if not math.isfinite(loss):
            signs.look = signs.nonfinite = True
        if not 0.0 < loss < math.inf:  # it has no logarithm
            return
        spike, trouble = self._levels["loss"].observe([math.log(loss)])
        signs.spike |= spike
        if trouble:
            signs.is_trouble(f"the loss has been above its level {self._levels['loss'].patience} times in a row")

    def start_afresh(self) -> None:
        """Forget the levels."""
        for levels in self._levels.values():
            levels.start_afresh()

    def state_dict(self) -> dict[str, Tensor]:
        """The levels."""
        return {name: levels.state() for name, levels in self._levels.items()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Continue from a saved state.

        Args:
            state_dict: what :meth:`state_dict` returned.
        """
        for name, levels in self._levels.items():
            levels.load(state_dict[name])
