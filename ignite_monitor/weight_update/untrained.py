"""Trainable parameters that no optimizer uses, or that no backward reaches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from ignite_monitor.model.optimizers import held_by

_NAMED = 10


class UntrainedParameters:
    """Finds, within the first measured steps, parameters with ``requires_grad`` that can't learn.

    Args:
        patience: after how many steps to report.
    """

    def __init__(self, patience: int) -> None:
        self._left = patience
        self._held: set[int] = set()
        self._reached: set[int] = set()

    def gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note which parameters have a gradient."""
        if self._left:
            self._reached.update(id(parameter) for parameter in parameters if parameter.grad is not None)

    def step(self, optimizer: Optimizer) -> None:
        """Note which parameters an optimizer that makes a step holds."""
        if self._left:
            self._held |= held_by(optimizer)

    def completed(self, parameters: Mapping[str, nn.Parameter]) -> str:
        """Count a step: what there is to report once it is the last one, else nothing."""
        if not self._left:
            return ""
        self._left -= 1
        if self._left:
            return ""
        trainable = {id(each): name for name, each in parameters.items() if each.requires_grad}
        without = {
            "in no optimizer that has made a step": trainable.keys() - self._held,
            "without a gradient so far": (trainable.keys() & self._held) - self._reached,
        }
        return "; ".join(
            f"{what}: {_list([name for key, name in trainable.items() if key in keys])}"
            for what, keys in without.items()
            if keys
        )


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
