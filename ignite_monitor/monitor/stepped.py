"""Which parameters an iteration's optimizer steps were to move."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from ignite_monitor.model._torch import versions
from ignite_monitor.model.devices import upload


class SteppedParameters:
    """Finds out, from one iteration's optimizer steps, which parameters had one.

    A parameter had a step if it has ``requires_grad``, lies in a group whose learning rate is not 0, and the optimizer
    met a gradient, of this parameter or of any other it holds: one that gets none stands still. Who wants a step to do
    nothing hides the gradients for as long as it lasts, or sets the ``found_inf`` of a fused optimizer; when, depends
    on the order of the handlers. So both are looked at when the step starts, when it ends, and at each backward that a
    closure runs in between.

    Args:
        indices: id of a parameter -> its index; parameters that are not in it do not count.

    Attributes:
        any: whether a step was made for any parameter, if only with a learning rate of 0.
    """

    def __init__(self, indices: Mapping[int, int]) -> None:
        self.any = False
        self._indices = indices
        self._certain: set[int] = set()
        self._depending: list[tuple[list[int], Tensor]] = []
        self._groups: list[tuple[list[tuple[int, Tensor, int]], Tensor | bool]] = []
        self._with_gradient: set[int] = set()
        self._found_inf: list[Tensor] = []

    def __bool__(self) -> bool:
        return bool(self._certain or self._depending)

    def started(self, optimizer: Optimizer) -> list[int]:
        """An optimizer is about to make its step; the indices of its parameters."""
        self._found_inf = []
        self._groups = []
        for group in optimizer.param_groups:
            rate = group.get("lr")
            moves: Tensor | bool = rate != 0
            own = [each for each in group["params"] if id(each) in self._indices and each.requires_grad]
            indices = [self._indices[id(each)] for each in own]
            self._groups.append((list(zip(indices, own, versions(own), strict=True)), moves))
        self.met_gradients(optimizer)
        return [index for members, _ in self._groups for index, _, _ in members]

    def met_gradients(self, optimizer: Optimizer) -> None:
        """The optimizer is about to use the gradients that are there now."""
        self._with_gradient = {
            index for members, _ in self._groups for index, parameter, _ in members if parameter.grad is not None
        }
        self._look_for_inf(optimizer)

    def completed(self, optimizer: Optimizer) -> list[int]:
        """The optimizer's step has returned; the indices for which it was made, if only with a learning rate of 0."""
        self._look_for_inf(optimizer)
        made = ~torch.stack([found != 0 for found in self._found_inf]).any() if self._found_inf else None
        stepped: list[int] = []
        for members, _ in self._groups:
            # A hook of the user's may have zeroed the gradients; only then the version, which fused steps do not
            # raise, has to tell.
            now = versions([parameter for _, parameter, _ in members])
            stepped += [
                index
                for (index, parameter, then), version in zip(members, now, strict=True)
                if index in self._with_gradient and (parameter.grad is not None or version != then)
            ]
        if stepped:
            for members, moves in self._groups:
                self._count([index for index, _, _ in members], moves, made)
        self._groups = []
        self.any = self.any or bool(stepped)
        return stepped

    def mask(self, masks: HostMasks) -> Tensor:
        """For each parameter, whether it had a step: a bool tensor."""
        mask = masks.of(self._certain)
        for indices, moves in self._depending:
            mask = mask | (masks.of(indices) & moves.reshape(()).to(mask.device, non_blocking=True))
        return mask

    def _count(self, indices: list[int], moves: Tensor | bool, made: Tensor | None) -> None:
        if not indices or moves is False:
            return
        if made is not None:
            moves = made if moves is True else moves.to(made.device, non_blocking=True) & made
        if moves is True:
            self._certain.update(indices)
        else:
            self._depending.append((indices, moves))

    def _look_for_inf(self, optimizer: Optimizer) -> None:
        found = getattr(optimizer, "found_inf", None)
        if isinstance(found, Tensor):
            # It may be changed in place after the step.
            self._found_inf.append(found.detach().clone().reshape(()))


class HostMasks:
    """Sets of indices, known on the host, as bool tensors on the device.

    Iterations tend to ask for the same sets, which are kept; a copy to a device may otherwise have to wait for it.
    """

    _KEPT = 16

    def __init__(self, size: int, device: torch.device) -> None:
        self._size = size
        self._device = device
        self._masks: dict[frozenset[int], Tensor] = {}

    def of(self, indices: Iterable[int]) -> Tensor:
        """True at the indices; not to be changed."""
        key = frozenset(indices)
        if key not in self._masks:
            if len(self._masks) >= self._KEPT:
                self._masks.clear()
            mask = torch.tensor([index in key for index in range(self._size)], dtype=torch.bool, device="cpu")
            self._masks[key] = upload(mask, self._device)
        return self._masks[key]
