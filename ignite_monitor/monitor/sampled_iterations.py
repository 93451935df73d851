"""Choose the iterations that monitors measure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from ignite.base import Serializable
from ignite.engine import Engine
from torch.optim import Optimizer

from ignite_monitor.model.names import learning_rates

_FIRST = {1, 2, 3, 5, 10, 20, 50}  # iterations that are measured as well: they show a wrong learning rate
_RATE_JUMP = 2.0  # times the largest learning rate since the last iteration that is measured anyway


class SampledIterations(Serializable):
    """The monitored iterations: one in ``every``, the first ones, and jumps of a learning rate."""

    _state_dict_all_req_keys = ("rates",)

    def __init__(self, optimizer: Optimizer, every: int) -> None:
        self._optimizer, self._every = optimizer, every
        self._iteration, self._included = 0, False
        self._rates: list[float] = []  # by group, the largest since the last iteration that is measured anyway

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return what a resumed run needs to measure the same iterations."""
        return OrderedDict(rates=list(self._rates))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a saved state; ValueError if a part of it is absent."""
        super().load_state_dict(state_dict)
        self._rates = list(map(float, state_dict["rates"]))

    def includes(self, engine: Engine, iteration: int) -> bool:
        """Decide once for all monitors."""
        if iteration == self._iteration:
            return self._included
        self._iteration = iteration
        rates = [rate for rate in learning_rates(self._optimizer) if isinstance(rate, (int, float))]
        self._rates = self._rates or rates
        pairs = [*zip_longest(rates, self._rates, fillvalue=0.0)]
        jumped = any(rate > _RATE_JUMP * former for rate, former in pairs)
        regular = iteration % self._every == 0 or (iteration in _FIRST and iteration < self._every)
        self._included = regular or jumped
        if regular:
            self._rates = rates
        elif jumped:  # rates that alternate jump once
            self._rates = [max(pair) for pair in pairs]
        return self._included
