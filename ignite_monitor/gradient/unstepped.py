"""Finding out that the optimizer that a monitor was given never makes a step."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer


class Unstepped:
    """Counts gradients until the optimizer makes its first step.

    An accumulation over 50 iterations and more would look the same, but is told as what it may be.
    """

    PATIENCE = 50

    def __init__(self, optimizer: Optimizer | None) -> None:
        self._over = optimizer is None  # of None every optimizer that shares parameters is the own one
        self._own = type(optimizer).__name__
        self._gradients = 0
        self._others: dict[str, None] = {}

    def step(self, optimizer: Optimizer, is_own: bool, shares: Callable[[Optimizer], bool]) -> None:
        """An optimizer makes its step; whether it is the own one, and what says if it holds the model's parameters."""
        if self._over:
            return
        if is_own:
            self._over = True
        elif shares(optimizer):
            self._others[type(optimizer).__name__] = None

    def gradient(self) -> str | None:
        """An iteration had a gradient; what to say of it, once."""
        if self._over:
            return None
        self._gradients += 1
        if self._gradients < self.PATIENCE:
            return None
        self._over = True
        cause = (
            f"{', '.join(self._others)}, which holds parameters of the model too, makes steps: give that one as "
            "the argument optimizer"
            if self._others
            else "either nothing calls its step(), or another optimizer of other parameters makes the steps, or "
            f"gradients are accumulated over more than {self.PATIENCE} iterations"
        )
        return (
            f"{self.PATIENCE} iterations had a gradient, but {self._own}, the optimizer that the monitor was given, "
            f"has made no step, so no norm has entered the statistics and nothing is judged. The likely cause: {cause}."
        )
