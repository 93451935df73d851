"""Finding out that the optimizer that a monitor was given never makes a step."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer


class Unstepped:
    """Counts gradients until the optimizer makes its first step.

    An accumulation over 50 iterations and more would look the same, but is told as what it may be.

    Attributes:
        over: whether there is nothing more to find out.
    """

    PATIENCE = 50

    def __init__(self, optimizer: Optimizer | None) -> None:
        self.over = optimizer is None  # of None every optimizer that shares parameters is the own one
        self._own = type(optimizer).__name__
        self._gradients = self._first = 0
        self._others: dict[str, None] = {}

    def step(self, optimizer: Optimizer, is_own: bool, shares: Callable[[Optimizer], bool]) -> None:
        """An optimizer makes its step; whether it is the own one, and what says if it holds the model's parameters."""
        if is_own:
            self.over = True
        elif shares(optimizer):
            self._others[type(optimizer).__name__] = None

    def gradient(self, iteration: int, has_scaler: bool) -> str | None:
        """An iteration had a gradient; what to say of it, once.

        Args:
            iteration: its number.
            has_scaler: whether a GradScaler leaves out the steps of gradients that are not finite.
        """
        self._first = self._first or iteration
        self._gradients += 1
        if self._gradients < self.PATIENCE:
            return None
        self.over = True
        causes = ["nothing calls its step()"]
        if iteration - self._first >= self.PATIENCE:
            causes.append("its steps are made in iterations that the filter given to attach() leaves out")
        if has_scaler:
            causes.append("every gradient overflows, so that the GradScaler makes no step")
        causes.append("another optimizer of other parameters makes the steps")
        causes.append(f"gradients are accumulated over more than {self.PATIENCE} iterations")
        cause = (
            f"{', '.join(self._others)}, which holds parameters of the model too, makes steps: give that one as "
            "the argument optimizer"
            if self._others
            else f"either {', or '.join(causes)}"
        )
        return (
            f"{self.PATIENCE} iterations had a gradient, but {self._own}, the optimizer that the monitor was given, "
            f"has made no step, so no norm has entered the statistics and nothing is judged. The likely cause: {cause}."
        )
