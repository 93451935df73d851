"""Warnings if gradients, losses or optimizer steps are missing."""

from __future__ import annotations

LOSS_PATIENCE = 20

NO_GRADIENT = (
    "iteration %d: no gradient of the model was seen, so nothing is published. Either no backward() reached the "
    "monitored parameters, and model or optimizer is not the one of the train step; or backward() is called in an "
    "event handler, which is not monitored; or the model is not trained in every iteration: then attach with a filter."
)
NO_LOSS = (
    f"iteration %d: {LOSS_PATIENCE} gradients, but no loss was seen, so losses are not compared and loss_spike is not "
    "reported. Likely cause: the train step computes its loss by another module, by a function, or inside a compiled "
    "one: give a function of the engine that returns the loss."
)


class MissingStep:
    """Counts consecutive gradients without an optimizer step.

    Attributes:
        other: name of another optimizer of the model's parameters that has stepped since.

    Args:
        optimizer: name of the optimizer.
    """

    PATIENCE = 50

    def __init__(self, optimizer: str) -> None:
        self.other: str | None = None
        self._optimizer = optimizer
        self._count = self._first = 0

    def note(self, iteration: int, is_missing: bool, is_spike: bool, has_scaler: bool) -> str | None:
        """An iteration with a gradient has ended: return a warning at the 50th in a row without a step."""
        if not is_missing:
            self._count, self.other = 0, None
            return None
        self._first = self._first if self._count else iteration
        self._count += 1
        if self._count != self.PATIENCE:
            return None
        return (
            f"{self.PATIENCE} gradients in a row met no step of {self._optimizer}, so the model is not trained and the "
            f"threshold statistics are not updated. Likely cause: {self._cause(iteration, is_spike, has_scaler)}."
        )

    def _cause(self, iteration: int, is_spike: bool, has_scaler: bool) -> str:
        if self.other is not None:
            return f"{self.other}, which holds parameters of the model too, makes the steps: give it as optimizer"
        if is_spike:
            return (
                "the train step returns at a spike while it accumulates gradients, without zero_grad(). They keep "
                "accumulating, and every later gradient is a spike: call optimizer.zero_grad() before that return"
            )
        causes = ["step() is not called"]
        if iteration - self._first >= self.PATIENCE:
            causes.append("steps are made in iterations that the filter given to attach() excludes")
        if has_scaler:
            causes.append("every gradient overflows, and the GradScaler skips the steps")
        causes.append("another optimizer makes the steps")
        return ", or ".join([*causes, f"gradients are accumulated over more than {self.PATIENCE} iterations"])
