"""The learning rates of an optimizer's groups, and their prefactor as schedulers take it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from ignite_monitor.scaling.parametrization import Parametrization
from ignite_monitor.scaling.solver import Solution


class LayerRates:
    """Learning rates of the groups that belong to a parametrization; others, without "layer_name", are left alone.

    Args:
        optimizer: an optimizer whose groups are made of its ``param_groups``.

    Raises:
        ValueError: if the optimizer has no such groups, or one of another layer.
    """

    def __init__(self, parametrization: Parametrization, optimizer: Optimizer) -> None:
        self._parametrization = parametrization
        self._optimizer = optimizer
        names = {group["layer_name"] for group in optimizer.param_groups if "layer_name" in group}
        if not names or not names <= {*parametrization.layers, "_other"}:
            raise ValueError("Argument optimizer should be made of the parametrization's param_groups")
        self._rates = self._computed(parametrization.solution, parametrization.lr_prefactor)

    def _computed(self, solution: Solution, prefactor: float) -> list[tuple[float, float] | None]:
        rates: list[tuple[float, float] | None] = []
        for group in self._optimizer.param_groups:
            name = group.get("layer_name")
            if name is None:
                rates.append(None)
                continue
            layer = self._parametrization.layers.get(name)
            c = self._parametrization.exponent(name, bias=group.get("bias", False), solution=solution)
            rates.append((c, prefactor * (1 if layer is None else layer.fan_in) ** -c))
        return rates

    def set(self, solution: Solution, prefactor: float) -> None:
        """Set each group's "lr" to prefactor * fan_in ** -c, and its "c"."""
        self._rates = self._computed(solution, prefactor)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            if rate is None:
                continue
            group["c"], lr = rate
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def are_changed(self) -> bool:
        """Whether someone else has set one since; of those that are tensors it is not known without waiting."""
        # Groups may have been added since.
        return any(
            rate is not None and not isinstance(group["lr"], Tensor) and group["lr"] != rate[1]
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=False)
        )

    def values(self) -> dict[str, float]:
        """The learning rates, of ``{layer}``, ``{layer}.bias`` and ``_other``."""
        return {
            f"{group['layer_name']}{'.bias' if group.get('bias') else ''}": (
                rate[1] if isinstance(group["lr"], Tensor) else group["lr"]
            )
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=False)
            if rate is not None
        }


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
