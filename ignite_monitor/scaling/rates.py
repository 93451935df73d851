"""Learning rates of an optimizer's groups, and an optimizer whose learning rate is their prefactor."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ignite_monitor.checks import check_real
from ignite_monitor.scaling.parametrization import Parametrization

WeakMethod = weakref.WeakMethod[Callable[[], None]]


class LayerRates:
    """Learning rates of the groups that belong to a parametrization; groups without "layer_name" are not changed.

    Args:
        parametrization: the parametrization.
        optimizer: an optimizer with its groups.

    Attributes:
        solution: the exponents.
        prefactor: an optimizer with one group, whose "lr" is the prefactor; to set that sets all learning rates.

    Raises:
        ValueError: if the optimizer has other groups, or decays weights by an L2 penalty.
    """

    def __init__(self, parametrization: Parametrization, optimizer: Optimizer) -> None:
        self._parametrization = parametrization
        self._optimizer = optimizer
        names = {group["layer_name"] for group in self._groups}
        if not names or not names <= {*parametrization.layers, "_other"}:
            raise ValueError("Argument optimizer should be made of the parametrization's param_groups")
        if parametrization.weight_decay and any(g.get("decoupled_weight_decay") is False for g in self._groups):
            raise ValueError(
                "Argument optimizer should decay weights apart from gradients, as AdamW does, for a parametrization "
                f"with weight_decay, but {type(optimizer).__name__} adds an L2 penalty to gradients"
            )
        self.solution = parametrization.solution
        self._known = [parametrization.lr_prefactor * self._factor(group)[1] for group in self._groups]
        self.prefactor = PrefactorOptimizer(parametrization.lr_prefactor, weakref.WeakMethod(self.apply))

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [group for group in self._optimizer.param_groups if group.get("layer_name") is not None]

    def _factor(self, group: Mapping[str, Any]) -> tuple[float, float]:
        """C and n^-c of a group."""
        name, layers = group["layer_name"], self._parametrization.layers
        c = self._parametrization.exponent(name, bias=group.get("bias", False), solution=self.solution)
        return c, float(layers[name].fan_in if name in layers else 1) ** -c

    def apply(self) -> None:
        """Set each group's "lr" to prefactor * fan_in ** -c, its "c", and its "weight_decay" inversely."""
        prefactor = check_real("lr_prefactor", self.prefactor.param_groups[0]["lr"], least=0.0)
        self._known = []
        decay = self._parametrization.weight_decay
        for group in self._groups:
            group["c"], factor = self._factor(group)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(prefactor * factor)
            else:
                group["lr"] = prefactor * factor
            if decay and group.get("weight_decay"):  # not where the user has set it to 0
                group["weight_decay"] = decay / factor
            self._known.append(prefactor * factor)

    def are_changed(self) -> bool:
        """Return True if other code has set a learning rate; tensors are not read, as that would synchronize."""
        pairs = zip(self._groups, self._known, strict=False)
        return any(not isinstance(group["lr"], Tensor) and group["lr"] != lr for group, lr in pairs)

    def values(self) -> dict[str, float]:
        """Return the learning rates of ``{layer}``, ``{layer}.bias`` and ``_other``."""
        return {
            f"{group['layer_name']}{'.bias' * bool(group.get('bias'))}": (
                lr if isinstance(group["lr"], Tensor) else group["lr"]
            )
            for group, lr in zip(self._groups, self._known, strict=False)
        }


class PrefactorGroup(dict[str, Any]):
    """A group of an optimizer that calls a function when a value is set."""

    def __init__(self, values: Mapping[str, Any], changed: WeakMethod) -> None:
        super().__init__(values)
        self._changed = changed

    def __setitem__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Set values as a dict does; an invalid value changes nothing."""
        before = dict(self)
        super().update(*args, **kwargs)
        try:
            _call(self._changed)
        except (TypeError, ValueError):
            self.clear()
            super().update(before)
            raise


class PrefactorOptimizer(Optimizer):
    """An optimizer without weights to train, and one group, whose "lr" is the prefactor.

    Args:
        lr: the prefactor.
        changed: called when the group is changed, while its object lives.
    """

    def __init__(self, lr: float, changed: WeakMethod) -> None:
        self._changed = changed
        super().__init__([torch.zeros(1, device="cpu")], {"lr": lr})
        self.param_groups = [PrefactorGroup(group, changed) for group in self.param_groups]
        self._opt_called = True  # torch's schedulers warn if they step before their optimizer does

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the learning rate of a saved state."""
        super().load_state_dict(state_dict)
        self.param_groups = [PrefactorGroup(group, self._changed) for group in self.param_groups]
        _call(self._changed)

    def step(self, closure: Any = None) -> Any:
        """Do nothing."""
        return None


def _call(method: WeakMethod) -> None:
    function = method()
    if function is not None:
        function()
