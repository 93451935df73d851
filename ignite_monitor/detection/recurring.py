"""Isolated spikes that recur at a similar size: rare data, which a skipped step would never learn."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ignite_monitor.detection.thresholds import State, loaded
from ignite_monitor.model.devices import move_like

_COUNT = 5  # isolated spikes of a similar size that are data
_RATIO = 2.0  # largest by smallest of them
_WINDOW = 1000  # iterations in which they occur
_KEPT = 16  # of the latest isolated spikes


class RecurringSpikes:
    """Recognizes isolated spikes of a similar size: five of the last 16, within 1,000 iterations.

    Of spikes in a row only the first counts. Nothing is read on the host.
    """

    def __init__(self) -> None:
        empty = torch.full((2, _KEPT), math.nan, dtype=torch.float64, device="cpu")
        # Iterations and norms of the isolated spikes, latest first; and the iteration of the latest spike.
        self._state: State = {"spikes": empty, "latest": empty[0, 0]}

    def observe(self, iteration: int, norm: Tensor, spike: Tensor) -> Tensor:
        """Note the norm of an iteration if it is a spike, a 0-dim bool tensor; return whether that recurs."""
        self._state = {name: move_like(value, norm) for name, value in self._state.items()}
        spikes, latest = self._state.values()
        first = torch.stack((torch.full_like(norm, iteration), norm)).view(2, 1)
        is_isolated = spike & (latest != iteration - 1)
        spikes = torch.where(is_isolated, torch.cat((first, spikes[:, :-1]), 1), spikes)
        recurs = spike & self.covers(iteration, norm)
        self._state = {"spikes": spikes, "latest": torch.where(spike, float(iteration), latest)}
        return recurs

    def covers(self, iteration: int, norm: Tensor) -> Tensor:
        """Return whether a norm is within a factor of two of spikes that recur, a 0-dim bool tensor."""
        smallest, largest = self._groups(iteration)[:2]
        return ((norm >= smallest / _RATIO) & (norm <= largest * _RATIO)).any()

    def iterations(self, iteration: int) -> Tensor:
        """The iterations of the spikes that recur; NaN for others."""
        smallest, largest, sizes = self._groups(iteration)
        recurs = ((sizes.view(-1, 1) >= smallest) & (sizes.view(-1, 1) <= largest)).any(1)
        return self._state["spikes"][0].masked_fill(~recurs, math.nan)

    def _groups(self, iteration: int) -> tuple[Tensor, Tensor, Tensor]:
        """Smallest and largest norm of each five that recur, NaN for other fives; and the norms within the window."""
        at, norms = self._state["spikes"]
        age = iteration - at
        norms = norms.masked_fill((age < 0) | (age >= _WINDOW), math.nan)
        by_size = norms.sort().values  # NaN last
        smallest, largest = by_size[: 1 - _COUNT], by_size[_COUNT - 1 :]
        return smallest.masked_fill(largest > _RATIO * smallest, math.nan), largest, norms

    def state_dict(self) -> State:
        """Return the state, name -> tensor."""
        return dict(self._state)

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Continue from a saved state; a ValueError if it is of another kind."""
        self._state = loaded(self._state, state_dict)
