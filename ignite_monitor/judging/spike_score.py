"""How often there were spikes lately."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ignite_monitor.model.devices import move


class SpikeScore:
    """The share of spikes among the last thousand values, OLMo's measure of a run's stability.

    (Team OLMo, "2 OLMo 2 Furious", arXiv:2501.00656, section 3.1.) Tensors on the flags' device; nothing is read on
    the host.
    """

    WINDOW = 1000

    def __init__(self) -> None:
        self._one = torch.ones(1, dtype=torch.float64, device="cpu")
        # In turn whether a value was a spike, and 1 for a value; zeros as long as there are fewer.
        self._recent = torch.zeros(2 * self.WINDOW, dtype=torch.float64, device="cpu")

    def observe(self, spike: Tensor, when: Tensor | None = None) -> None:
        """Count one value.

        Args:
            spike: 0-dim bool: whether it is a spike.
            when: 0-dim bool: whether to; None is true.
        """
        if spike.device != self._recent.device:
            self._one, self._recent = move(self._one, spike.device), move(self._recent, spike.device)
        recent = torch.cat((self._recent[2:], spike.view(1), self._one))
        self._recent = recent if when is None else torch.where(when, recent, self._recent)

    def value(self) -> Tensor:
        """The share, 0-dim; NaN before the first value."""
        spikes, values = self._recent.view(-1, 2).sum(0).unbind()
        return spikes / values

    def go_back(self, earlier: SpikeScore, when: Tensor) -> None:
        """Forget the values since a copy was made, where a 0-dim bool tensor is True."""
        self._recent = torch.where(when, move(earlier._recent, self._recent.device), self._recent)

    def state_dict(self) -> dict[str, Tensor]:
        """The last values, a tensor."""
        return {"recent": self._recent}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Continue from a saved state.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            ValueError: if it is none of a score.
        """
        recent = torch.as_tensor(state_dict["recent"], dtype=torch.float64) if set(state_dict) == {"recent"} else None
        if recent is None or recent.shape != self._recent.shape:
            raise ValueError(
                f"Argument state_dict should hold {2 * self.WINDOW} numbers as recent, but given {state_dict}"
            )
        self._one, self._recent = move(self._one, recent.device), recent
