"""Warnings if gradients or optimizer steps are missing."""

from __future__ import annotations

from ignite_monitor.detection.spikes import may_be_true
from ignite_monitor.gradient.detector import GradientDetection
from ignite_monitor.monitor.transfer import is_on_host

NO_GRADIENT = (
    "iteration %d: no gradient of the model was seen, so nothing is published. Either no backward() reached the "
    "monitored parameters, and model or optimizer is not the one of the train step; or backward() is called in an "
    "event handler, which is not monitored; or the model is not trained in every iteration: then attach with a filter."
)


class MissingStep:
    """Counts consecutive gradients without a step of an optimizer, whose name is given.

    Attributes:
        other: name of another optimizer of the model's parameters that has stepped since.
    """

    PATIENCE = 50

    def __init__(self, optimizer: str) -> None:
        self.other: str | None = None
        self._optimizer = optimizer
        self._count = self._first = 0

    def note(self, iteration: int, is_missing: bool, detection: GradientDetection | None, scaled: bool) -> str | None:
        """An iteration with a gradient has ended: return a warning at the 50th in a row without a step."""
        if not is_missing:
            self._count, self.other = 0, None
            return None
        self._first = self._first if self._count else iteration
        self._count += 1
        if self._count != self.PATIENCE:
            return None
        cause = f"step() is not called, or gradients are accumulated over more than {self.PATIENCE} iterations"
        if self.other is not None:
            cause = f"{self.other}, which holds parameters of the model too, makes the steps: give it as optimizer"
        elif detection is not None and is_on_host(detection.spike) and detection.spike:
            cause = (
                "the train step returns at a spike while it accumulates gradients, without zero_grad(). They keep "
                "accumulating, and every later gradient is a spike: call optimizer.zero_grad() before that return"
            )
        elif iteration - self._first >= self.PATIENCE:
            cause = "steps are made in iterations that the filter given to attach() excludes"
        elif scaled and (detection is None or may_be_true(detection.norm.nonfinite)):
            cause = "every gradient overflows, and the GradScaler skips the steps"
        return (
            f"{self.PATIENCE} gradients in a row met no step of {self._optimizer}, so the model is not trained and the "
            f"threshold statistics are not updated. Likely cause: {cause}."
        )
