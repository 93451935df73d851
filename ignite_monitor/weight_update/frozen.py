"""Which parameters have stopped to move, how much is lost to rounding, and telling the user of either."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.model.devices import upload
from ignite_monitor.model.updates import count_still
from ignite_monitor.monitor.deferred_flag import DeferredFlag

_MOST = 0.5  # of the updates


class FrozenParameters:
    """In how many measured steps in a row each parameter has stood still.

    Args:
        patience: after how many such steps a parameter is frozen.

    Attributes:
        still: the counts, a float64 tensor.
    """

    def __init__(self, names: Sequence[str], threshold: float, patience: int) -> None:
        self.still = torch.zeros(len(names), dtype=torch.float64, device="cpu")
        self._names = list(names)
        self._threshold = threshold
        self._patience = patience
        self._reported: set[str] = set()
        self._rounded: set[str] = set()
        self._changed = DeferredFlag()

    def rename(self, names: Sequence[str], like: Tensor) -> None:
        """Go over to other parameters, with ratios like a tensor; those with a known name keep their count."""
        still = self.still.to(like.dtype)
        if still.device != like.device:
            still = upload(still, like.device) if still.device.type == "cpu" else still.to(like.device)
        if list(names) != self._names:
            indices = {name: index for index, name in enumerate(self._names)}
            # A name that is not there takes the zero at the end.
            taken = torch.tensor([indices.get(name, len(indices)) for name in names], device="cpu")
            still = torch.cat([still, still.new_zeros(1)])[upload(taken, still.device)]
            self._names = list(names)
        self.still = still

    def observe(self, ratios: Tensor, moved: Tensor) -> Tensor:
        """Count one step, and give for each parameter whether it had that step and is frozen."""
        before = self.still >= self._patience
        self.still = count_still(self.still, ratios, self._threshold, moved)
        after = self.still >= self._patience
        self._changed.set((before != after).any())
        return after & moved

    def is_frozen(self, ratio: float, still: float) -> bool:
        """Whether a parameter had a step, without which its ratio is NaN, and is frozen, by numbers on the host."""
        return not math.isnan(ratio) and still >= self._patience

    def changed(self, wait: bool = False) -> bool:
        """Whether, as far as is known, a parameter has frozen or thawed since this was last true."""
        return self._changed.take(wait)

    def is_still(self, still: Sequence[float] | None = None) -> list[bool]:
        """For each parameter whether it is frozen, whether it had the last step or not."""
        if still is not None:
            return [count >= self._patience for count in still]
        return on_host(self.still >= self._patience)

    def report(self, logger: logging.Logger, prefix: str, is_still: Sequence[bool], is_rounded: Sequence[bool]) -> None:
        """Warn of parameters that have frozen since the last time, and once of each that rounding may freeze."""
        frozen = {
            name: rounded for name, still, rounded in zip(self._names, is_still, is_rounded, strict=True) if still
        }
        new = [name for name in frozen if name not in self._reported]
        self._reported = set(frozen)
        others = [name for name in new if not frozen[name]]
        # Now and then one element of such a parameter moves.
        rounded = [name for name in new if frozen[name] and name not in self._rounded]
        self._rounded.update(rounded)
        rounding = (
            "; they have gradients, but rounding to their low precision leaves nothing of an update: "
            "keep float32 weights, or float32 copies of them"
        )
        for names, cause in ((others, ""), (rounded, rounding)):
            if names:
                logger.warning(
                    "%s: frozen, since %d monitored steps or more have not moved them: %s%s",
                    prefix,
                    self._patience,
                    ", ".join(names),
                    cause,
                )

    def state_dict(self) -> OrderedDict[str, Any]:
        """A list of names and a tensor of counts."""
        return OrderedDict(names=list(self._names), still=self.still)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state; parameters that it does not know start anew.

        Raises:
            TypeError: if its names are no list of strings.
            ValueError: if it is damaged or of another model.
        """
        names = state_dict["names"]
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"Argument state_dict should hold a list of names in 'names', but it holds {names!r}")
        counts = _counts(state_dict["still"])
        if counts.shape != (len(names),):
            raise ValueError("Argument state_dict should hold one count in 'still' for each name in 'names'")
        saved = dict(zip(names, counts.tolist(), strict=True))
        if saved.keys().isdisjoint(self._names):
            raise ValueError(f"Argument state_dict should be of this model, but its names are {list(names)[:3]} …")
        self.still = torch.tensor([saved.get(name, 0.0) for name in self._names], dtype=torch.float64, device="cpu")
        self._reported = {name for name, count in saved.items() if count >= self._patience}


class LostUpdates:
    """Warns once if most updates are lost in as many monitored steps in a row as it has patience for."""

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._in_a_row: Tensor | None = None
        self._flag = DeferredFlag()
        self._is_told = False

    def restart(self) -> None:
        """The steps to come are others, of a model that may lie on another device."""
        self._in_a_row = None

    def observe(self, fraction: Tensor) -> None:
        """A step has lost a fraction of its updates, a 0-dim tensor; NaN where it made none."""
        if self._is_told:
            return
        before = torch.zeros_like(fraction) if self._in_a_row is None else self._in_a_row
        self._in_a_row = torch.where(fraction > _MOST, before + 1, before * fraction.isnan())
        self._flag.set(self._in_a_row >= self._patience)

    def warn(self, logger: logging.Logger, prefix: str, wait: bool = False) -> None:
        """Warn, if that is known to be so by now, or once the device knows."""
        if not self._is_told and self._flag.take(wait):
            self._is_told = True
            logger.warning(
                "%s: more than half of the updates are lost to rounding, since the weights are in bfloat16 or float16 "
                "(lost_update_fraction). Keep the weights in float32 and use torch.autocast, or use an optimizer that "
                "keeps float32 copies of them, rounds stochastically or sums with compensation.",
                prefix,
            )


def _counts(still: Any) -> Tensor:
    try:
        counts = torch.as_tensor(still, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"Argument state_dict should hold a tensor of counts in 'still': {error}") from error
    if not bool((counts.isfinite() & (counts >= 0)).all()):
        raise ValueError("Argument state_dict should hold counts in 'still', finite and not negative")
    return counts


def on_host(mask: Tensor) -> list[bool]:
    """A mask as a list. From a CPU no value is read, which counts as waiting to whoever looks for that."""
    if mask.device.type == "cpu":
        return [len(each.nonzero()) > 0 for each in mask.split(1)] if len(mask) else []
    values: list[bool] = mask.tolist()
    return values
