"""The signs of trouble: the level of the loss, running statistics, what monitors count, and requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ignite_monitor.detection.spikes import Kind, outcome
from ignite_monitor.model._torch import buffers_of_each, foreach_norm, part_of_rank
from ignite_monitor.model.devices import device_of, wide_dtype
from ignite_monitor.monitor.base import Monitor
from ignite_monitor.monitor.publisher import transfer
from ignite_monitor.monitor.ranks import sum_over_ranks

_MEAN, _VARIANCE = "running_mean", "running_var"


class Levels:
    """Which of some numbers exceed their levels: a ``SpikeDetector`` for each, in Python's floats.

    ``limit`` gives, of the mean and deviation of the earlier ones, exponentially weighted with 0.95, the largest that
    is no spike. ``patience`` spikes in a row mean trouble.
    """

    _WARMUP, _DECAY = 20, 0.95
    _START = (0.0,) * 6  # count, weight, squared weight, mean, spread (see ``Moments``), and the state of ``outcome``

    def __init__(self, limit: Callable[[float, float], float], patience: int) -> None:
        self._limit = limit
        self.patience = patience
        self._rows: list[tuple[float, ...]] = []

    def observe(self, values: Sequence[float]) -> tuple[bool, bool]:
        """Whether any is above its level, and whether any has been so often enough in a row; takes all of them in."""
        if len(values) != len(self._rows):
            self._rows = [self._START] * len(values)
        spike = trouble = False
        for place, value in enumerate(values):
            *moments, state = self._rows[place]
            limit = self._limit_of(moments)
            found = outcome(int(state), _kind(value, limit), self.patience, overflow_is_spike=False)
            spike, trouble = spike or bool(found.spike), trouble or bool(found.threshold_reset)
            if found.threshold_reset:
                moments = [0.0] * 5
            if not math.isnan(found.entry):
                moments = self._with(moments, min(value, limit + found.entry))
            self._rows[place] = (*moments, found.state)
        return spike, trouble

    def _limit_of(self, moments: list[float]) -> float:
        count, weight, weight_squared, mean, spread = moments
        if count < self._WARMUP:
            return math.inf
        return self._limit(mean, math.sqrt(spread / (weight - weight_squared / weight)))

    def _with(self, moments: list[float], value: float) -> list[float]:
        count, weight, weight_squared, mean, spread = moments
        weight, weight_squared = self._DECAY * weight + 1.0, self._DECAY**2 * weight_squared + 1.0
        delta = value - mean
        mean += delta / weight
        return [count + 1.0, weight, weight_squared, mean, self._DECAY * spread + delta * (value - mean)]

    def reset_threshold(self) -> None:
        """Forget the levels."""
        self._rows = [self._START] * len(self._rows)

    def state(self) -> Tensor:
        """What is known of each number, a row of a tensor."""
        return torch.tensor(self._rows, dtype=torch.float64, device="cpu").view(-1, len(self._START))

    def load(self, state: Tensor) -> None:
        """Continue from a saved state."""
        self._rows = [tuple(row) for row in state.tolist()]


def _kind(value: float, limit: float) -> Kind:
    if not math.isfinite(value):
        return Kind.NONFINITE
    if limit == math.inf:
        return Kind.WITHOUT_LIMIT
    return Kind.ABOVE if value > limit else Kind.WITHIN


def loss_levels(patience: int) -> Levels:
    """Of a loss's logarithm: it may be two deviations, or log 1.5, above its mean."""
    return Levels(lambda mean, std: mean + max(2.0 * std, math.log(1.5)), patience)


def statistics_levels() -> Levels:
    """Of second moments: they may be three times their mean, and are trouble three times in a row above."""
    return Levels(lambda mean, std: 3.0 * mean, patience=3)


def statistics_in(modules: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """The buffers of those modules in them that keep running statistics."""
    inner = {id(inner): inner for module in modules for inner in module.modules()}
    return [each for each in buffers_of_each(inner.values()) if each.keys() >= {_MEAN, _VARIANCE}]


def second_moments(statistics: Iterable[Mapping[str, Any]]) -> list[Tensor]:
    r"""What running statistics stand for, :math:`\lVert\mu\rVert_2^2 + \lVert\sigma^2\rVert_1`, on each device.

    A mean is not large where it is small against the deviation.
    """
    found = []
    kept = [each for each in statistics if each[_MEAN] is not None and each[_VARIANCE] is not None]
    for device in dict.fromkeys(each[_MEAN].device for each in kept):
        here = [each for each in kept if each[_MEAN].device == device]
        means, variances = ([part_of_rank(each[name]) for each in here] for name in (_MEAN, _VARIANCE))
        dtype = max(torch.float32, *(each.dtype for each in means), key=lambda dtype: dtype.itemsize)
        norms = [*foreach_norm(means, 2.0, dtype=dtype), *foreach_norm(variances, 1.0, dtype=dtype)]
        mean, variance = torch.stack(norms).to(wide_dtype(device)).chunk(2)
        found.append(torch.addcmul(variance, mean, mean))
    return found


@dataclass
class Signs:
    """What an iteration's signs are, on one rank or on all of them."""

    loss: float  # the sum of the ranks' losses
    losses: float  # how many there are
    trouble: list[str] = field(default_factory=list)  # what is trouble by itself
    look: bool = False  # something is not finite: is the state?
    nonfinite: bool = False  # a loss or gradient is not finite, and nobody looks after it
    spike: bool = False  # something is above its threshold

    def summed(self, device: torch.device) -> Signs:
        """The signs of all ranks."""
        own = [self.loss, self.losses, bool(self.trouble), self.look, self.nonfinite, self.spike]
        all_ranks = sum_over_ranks(torch.tensor(own, dtype=wide_dtype(device), device=device))
        loss, losses, trouble, *flags = all_ranks.tolist()
        words = self.trouble or ["another rank has trouble"] * bool(trouble)
        return Signs(loss, losses, words, *map(bool, flags))


class Watch:
    """Collects the signs of every iteration, in one transfer from each device.

    The running statistics of the modules are looked at; the first of them lies where ranks communicate.
    """

    def __init__(self, patience: int, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self.look_for_statistics()
        self._levels = {"loss": loss_levels(patience), "statistics": statistics_levels()}
        self._counts: WeakKeyDictionary[Monitor, list[float]] = WeakKeyDictionary()
        self.request: str | None = None  # why somebody asks to go back in this iteration, or the next
        self.has_signs = False  # whether there has ever been anything to judge by

    def meet(self, monitors: Iterable[Monitor]) -> None:
        """What monitors who are new have counted so far is no sign."""
        for monitor in monitors:
            if monitor not in self._counts and (counts := monitor.counts()) is not None:
                self._counts[monitor] = counts.tolist()

    def look_for_statistics(self) -> None:
        """Modules may have come, or gone."""
        self._statistics = statistics_in(self._modules)

    def signs(self, loss: float | Tensor | None, monitors: Iterable[Monitor], ranks: int = 1) -> Signs:
        """Of the iteration that ends, the same on every rank but for the reasons; a loss has one element."""
        counts = {each: counts for each in monitors if (counts := each.counts()) is not None}
        asked = [[loss] if isinstance(loss, Tensor) else [], [*counts.values()], second_moments(self._statistics)]
        losses, numbers, moments = transfer(asked) if any(asked) else [[], [], []]
        number = losses[0][0] if isinstance(loss, Tensor) else loss
        self.has_signs = self.has_signs or number is not None or any(asked)
        signs = Signs(0.0 if number is None else number, number is not None)
        self._look_at_counts(signs, dict(zip(counts, numbers, strict=True)))
        self._look_at_statistics(signs, [*chain.from_iterable(moments)])
        if self.request is not None:
            signs.trouble.append(self.request)
            self.request = None
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
                signs.trouble.append(f"{monitor.prefix} has had so many spikes in a row that its level has changed")

    def _look_at_statistics(self, signs: Signs, found: list[float]) -> None:
        if not all(map(math.isfinite, found)):
            signs.look = True
        spike, trouble = self._levels["statistics"].observe(found)
        signs.spike |= spike
        if trouble:
            signs.trouble.append("running statistics are far above their level")

    def _look_at_loss(self, signs: Signs, loss: float) -> None:
        if not math.isfinite(loss):
            signs.look = signs.nonfinite = True
        if not 0.0 < loss < math.inf:  # it has no logarithm
            return
        spike, trouble = self._levels["loss"].observe([math.log(loss)])
        signs.spike |= spike
        if trouble:
            signs.trouble.append(f"the loss has been above its level {self._levels['loss'].patience} times in a row")

    def reset_threshold(self) -> None:
        """Forget the levels."""
        for levels in self._levels.values():
            levels.reset_threshold()

    def state_dict(self) -> dict[str, Tensor]:
        """The levels."""
        return {name: levels.state() for name, levels in self._levels.items()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Continue from a saved state."""
        for name, levels in self._levels.items():
            levels.load(state_dict[name])
