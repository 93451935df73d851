"""One call of a module in the model and in the reference, and the interface of monitors that compare the two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


class NotComparableError(Exception):
    """Reason why a call is not compared; its message completes "it is not compared: ..."."""


class FailedFunctionError(RuntimeError):
    """Error of a user's function, which is not caught."""


@dataclass(slots=True)
class Call:
    """One call of a module, of the model or of the reference.

    Attributes:
        name: the module's name in the model.
        module: the module.
        args: its positional arguments.
        kwargs: its keyword arguments.
        output: its output; None before it returns.
        kept: what :meth:`Comparison.keep` returned for the same call of the reference.
        entered: what :meth:`Comparison.enter` returned.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    kept: list[Tensor | None] = field(default_factory=list)
    entered: Any = None


class Comparison:
    """Comparison of each call of the model with the same call of the reference.

    :meth:`keep` and :meth:`enter` run in the model's grad mode, :meth:`leave` without gradients. An error excludes the
    module, with a warning; a :class:`FailedFunctionError` is raised.

    Attributes:
        by_weights: whether weights are compared, so that a call with other weights than the module's is excluded.
    """

    by_weights = True

    def keep(self, call: Call) -> Sequence[Tensor | None]:
        """Return the tensors of a reference call to copy for the model's call."""
        raise NotImplementedError

    def enter(self, call: Call) -> Any:
        """Handle the start of a call of the model; the result becomes ``call.entered``."""

    def leave(self, call: Call) -> Any:
        """Return the result of a call of the model, for :meth:`passed`; None for no result."""
        return call.entered

    def passed(self, results: dict[str, list[Any]]) -> None:
        """Take the results of a complete forward pass: for each name, one per call."""
        raise NotImplementedError

    def clear(self) -> None:
        """Forget all results."""
