"""Base of the monitors that follow one number of the iteration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.checks import check_function
from ignite_monitor.detection.monitor import CountingMonitor
from ignite_monitor.events.monitor_events import Phase
from ignite_monitor.model.devices import wide_dtype
from ignite_monitor.monitor.base import Handlers


class ScalarMonitor(CountingMonitor):
    """Reads a function of the engine after the train step, when the other monitors have published."""

    value: Callable[[Any], float | Tensor | None]
    _missing = 0  # iterations without a value, as long as there was none
    _PATIENCE = 50

    def handlers(self) -> Handlers:
        return [(Phase.VALUES_PUBLISHED, self._on_values_published)]  # the value may be one of theirs

    def _on_values_published(self, engine: Any) -> None:
        if self._is_running:
            self._detect(engine)

    def _detect(self, engine: Any) -> None:
        raise NotImplementedError

    def _set_value(self, value: Callable[[Any], float | Tensor | None]) -> None:
        check_function("value", value, "the engine", optional=False)
        self.value = value
        self._counts = torch.zeros(3, dtype=torch.float64, device="cpu")  # as those of :meth:`counts`

    def counts(self) -> Tensor:
        return self._counts

    @staticmethod
    def _saved_counts(state_dict: Mapping[str, Any]) -> Tensor:
        return torch.as_tensor(state_dict["counts"], dtype=torch.float64, device="cpu").reshape(3).clone()

    def _read(self, engine: Any) -> Tensor | None:
        """Return the value as a 0-dim tensor; None without one."""
        value = self.value(engine)
        if value is None:
            self._missing += 1
            if self._missing == self._PATIENCE:
                self.report(
                    "no_value",
                    f"{self._PATIENCE} iterations had no value, so nothing can be detected. Check that the function "
                    "given as value reads a name that these iterations publish, and that the train step returns it.",
                )
            return None
        self._missing = self._PATIENCE
        return _as_number(value)


def _as_number(value: Any) -> Tensor:
    """Convert a number to a 0-dim tensor of the widest dtype of its device; a TypeError if it is not one number."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().reshape(()).to(wide_dtype(value.device))
    try:
        if isinstance(value, Tensor):
            raise TypeError("not one real number")
        return torch.tensor(float(value), dtype=torch.float64, device="cpu")
    except (TypeError, ValueError) as error:
        raise TypeError(f"Argument value should return one number or None, but it returned {value!r}") from error
