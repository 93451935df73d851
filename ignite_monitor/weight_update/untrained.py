"""Which parameters no optimizer holds, and which never have a gradient."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

from ignite_monitor.model.names import tags

NOT_OPTIMIZED, NO_GRADIENT = "not_optimized", "no_gradient"


class UntrainedParameters:
    """What the monitored train steps have shown so far of a model's parameters, by name.

    Args:
        patience: how many train steps to look at before anything is said.
        top_k: how many names to give of each kind at most.
    """

    def __init__(self, patience: int, top_k: int) -> None:
        self._patience = patience
        self._top_k = top_k
        self._steps = 0
        self._seen: dict[str, set[str]] = {NOT_OPTIMIZED: set(), NO_GRADIENT: set()}

    def gradients_found(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Gradients are there."""
        seen = self._seen[NO_GRADIENT]
        if not parameters.keys() <= seen:
            seen.update(name for name, each in parameters.items() if name not in seen and each.grad is not None)

    def step_made(self, parameters: Mapping[str, nn.Parameter], held: Collection[int]) -> None:
        """An optimizer makes a step, which holds parameters by these ids."""
        seen = self._seen[NOT_OPTIMIZED]
        if not parameters.keys() <= seen:
            seen.update(name for name, each in parameters.items() if id(each) in held)

    def observe(self, names: Iterable[str]) -> dict[str, float]:
        """A train step has been made: kind and name -> how many parameters of that name there are.

        The names are those of all parameters that can be trained.
        """
        self._steps += 1
        if self._steps < self._patience:
            return {}
        held, reached = self._seen[NOT_OPTIMIZED], self._seen[NO_GRADIENT]
        if held.issuperset(names) and reached.issuperset(names):
            return {}
        kinds = {NOT_OPTIMIZED: [each for each in names if each not in held]}
        kinds[NO_GRADIENT] = [each for each in names if each in held and each not in reached]
        return {
            f"{kind}/{tag}": float(count)
            for kind, untrained in kinds.items()
            for tag, count in _together(untrained, self._top_k).items()
        }

    def state_dict(self) -> OrderedDict[str, Any]:
        """A count and lists of names."""
        return OrderedDict(steps=self._steps, **{kind: sorted(names) for kind, names in self._seen.items()})

    def load_state_dict(self, state_dict: Any) -> None:
        """Continue from a saved state.

        Raises:
            TypeError: if it is something else.
        """
        try:
            steps = int(state_dict["steps"])
            seen = {kind: {str(name) for name in state_dict[kind]} for kind in self._seen}
        except (TypeError, KeyError, ValueError) as error:
            raise TypeError(
                f"Argument state_dict should hold a count and lists of names in 'untrained': {error!r}"
            ) from error
        self._steps, self._seen = steps, seen


def _together(names: Collection[str], most: int) -> dict[str, int]:
    """Names of parameters, or where those are more than ``most`` of the modules they are in -> how many they are."""
    depth = max((name.count(".") for name in names), default=0) + 1
    counts: Counter[str] = Counter()
    while depth:
        counts = Counter(".".join(name.split(".")[:depth]) for name in names)
        if len(counts) <= most:
            break
        depth -= 1
    largest = dict(counts.most_common(most))
    return dict(zip(tags(largest), largest.values(), strict=True))
