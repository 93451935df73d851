"""The prefactor of all learning rates, as what schedulers take: an optimizer's group, or an optimizer."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.optim import Optimizer


class HasPrefactor(Protocol):
    """What has a prefactor that may be set."""

    lr_prefactor: float


class PrefactorGroup(dict[str, Any]):
    """A group of an optimizer, whose "lr" is a prefactor."""

    def __init__(self, owner: HasPrefactor) -> None:
        super().__init__(lr=owner.lr_prefactor)
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        return self._owner.lr_prefactor if name == "lr" else super().__getitem__(name)

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if name == "lr":
            self._owner.lr_prefactor = value


class PrefactorOptimizer(Optimizer):
    """An optimizer with nothing to optimize, and one group, whose "lr" is a prefactor."""

    def __init__(self, owner: HasPrefactor) -> None:
        super().__init__([torch.zeros(1)], {"lr": owner.lr_prefactor})
        self.param_groups = [PrefactorGroup(owner)]
        self._opt_called = True  # torch's schedulers warn of steps of theirs before one of the optimizer's

    def step(self, closure: Any = None) -> Any:
        """Do nothing."""
        return None
