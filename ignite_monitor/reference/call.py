"""A call of a module beside the same call of its reference, and what a monitor makes of the two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


class NotComparableError(Exception):
    """Why a call can't be compared; its message completes "it is not compared: …"."""


class FailedFunctionError(RuntimeError):
    """A function of the user's has raised an error, which training is told of."""


@dataclass(slots=True)
class Call:
    """One call of a module, of the model's or of the reference's.

    Attributes:
        name: the module's name in the model, the same in either.
        module: the module.
        args: its positional arguments.
        kwargs: its keyword arguments.
        output: what the module has returned; None before.
        kept: of a call of the model, what :meth:`Comparison.keep` gave for the reference's. What is taken out of the
            list is freed.
        entered: of a call of the model, what :meth:`Comparison.enter` gave.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    kept: list[Tensor | None] = field(default_factory=list)
    entered: Any = None


class Comparison:
    """What a monitor makes of each call of the model and the same call of the reference.

    :meth:`keep` and :meth:`enter` are called with gradients being recorded as in the model, :meth:`leave` with none.
    Errors leave the call's module out, with a warning, but for :class:`FailedFunctionError`.

    Attributes:
        by_weights: whether modules are compared by the weights that they hold, or run once more with these.
    """

    by_weights = True

    def keep(self, call: Call) -> Sequence[Tensor | None]:
        """A call of the reference has returned: what to keep of it until the model gets there."""
        raise NotImplementedError

    def enter(self, call: Call) -> Any:
        """A call of the model begins: what to remember of it until it returns."""
        return None

    def leave(self, call: Call) -> Any:
        """A call of the model has returned: what it has come to, for :meth:`passed`; None for nothing."""
        return call.entered

    def passed(self, results: dict[str, list[Any]]) -> None:
        """A forward pass of the whole model has returned: name -> what :meth:`leave` gave, one for each call."""
        raise NotImplementedError

    def clear(self) -> None:
        """Forget the results."""
