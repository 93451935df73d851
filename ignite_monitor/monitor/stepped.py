"""Parameters that the optimizer steps of one train step were to move."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from ignite_monitor.model.devices import move, upload


class SteppedParameters:
    """Collects the parameters that optimizer steps were to move.

    A step moves the parameters with ``requires_grad`` in groups with a learning rate other than 0, if its optimizer has
    a gradient of any of them, and no fused step is told by ``found_inf`` to do nothing.

    Args:
        indices: id of a parameter -> its index; other parameters do not count.

    Attributes:
        any: whether a step was made for any parameter, possibly with a learning rate of 0.
    """

    def __init__(self, indices: Mapping[int, int]) -> None:
        self.any = False
        self._indices = indices
        self._certain: set[int] = set()
        self._depending: list[tuple[list[int], Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._certain or self._depending)

    def started(self, optimizer: Optimizer) -> list[int]:
        """Note a step that is about to be made, once gradients that it is not to use are hidden; its indices."""
        groups = [
            [each for each in group["params"] if id(each) in self._indices and each.requires_grad]
            for group in optimizer.param_groups
        ]
        if all(each.grad is None for members in groups for each in members):
            return []
        self.any = True
        found_inf = getattr(optimizer, "found_inf", None)
        made = found_inf == 0 if isinstance(found_inf, Tensor) else None
        indices = [[self._indices[id(each)] for each in members] for members in groups]
        for group, members in zip(optimizer.param_groups, indices, strict=True):
            moves = [each for each in (group.get("lr") != 0, made) if isinstance(each, Tensor)]
            if members and moves:
                first, *others = (each.reshape(()) for each in moves)
                self._depending.append((members, first & move(others[0], first.device) if others else first))
            elif group.get("lr") != 0:
                self._certain.update(members)
        return [index for members in indices for index in members]

    def mask(self, size: int, device: torch.device) -> Tensor:
        """Whether each parameter was to move: a bool tensor."""
        mask = _mask(self._certain, size, device)
        for indices, moves in self._depending:
            mask = mask | (_mask(indices, size, device) & move(moves, device))
        return mask


def _mask(indices: Iterable[int], size: int, device: torch.device) -> Tensor:
    members = set(indices)
    return upload(torch.tensor([index in members for index in range(size)], dtype=torch.bool, device="cpu"), device)
