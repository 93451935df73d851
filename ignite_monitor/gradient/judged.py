"""A gradient that has been judged, and whether the one that lies there now is still it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import is_, sub

from torch import Tensor

from ignite_monitor.gradient.spikes import Verdict
from ignite_monitor.model._torch import version as own_version
from ignite_monitor.model.norms import any_sharded
from ignite_monitor.model.tensors import version


class JudgedGradient:
    """What is known of a gradient since backward, or since a train step set it by hand.

    It is told from another one by its tensors, held by weak references, and their version counters: clipping and
    unscaling change them in place; a train step that sets gradients by hand, or to None, replaces them. One more
    backward changes them too, and so does setting them to zero before it: which it was shows when the backward has got
    to the first of them. How often it changes them does not tell: reducing them over ranks adds to that.

    Args:
        tensors: the gradient, a tensor per parameter.
        shared: whether the backward that made it reached other monitored models too.

    Attributes:
        verdict: what the detector said of its norm.
        seen: whether it was seen in the current iteration.
        used: whether an optimizer has made its step with it.
        foreign: whether it may be what another optimizer's gradients have left over here.
        taken: whether another optimizer has made its step with the backward that made it.
        touched: whether it may have been set to zero, in place, since the train step.
        announced: whether it has been announced as a spike.
        statistics: what is published of it: name -> 0-dim tensor.
    """

    def __init__(self, verdict: Verdict, tensors: Sequence[Tensor], *, shared: bool = False) -> None:
        self.verdict = verdict
        self.seen = True
        self.used = False
        self.foreign = shared
        self.taken = self.touched = False
        self.announced = False
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self.statistics: dict[str, Tensor] = {}
        self._versions = self._latest = _versions(tensors)
        # Of DTensors the counters of the whole, which backward passes leave alone.
        self._wholes = list(map(own_version, tensors)) if any_sharded(tensors) else None
        self._replaced: bool | None = None  # whether the next backward has found something else in its place
        self._is_spike: bool | None = None

    def settle(self) -> None:
        """Take for its own what :meth:`changes` has found last."""
        self._versions = self._latest
        if self._wholes is not None:
            self._wholes = [
                0 if own is None else own_version(own) for own in (reference() for reference in self._tensors)
            ]

    def backward_started(self, parameter: Tensor) -> None:
        """A backward has accumulated into the first parameter it has got to."""
        if self._replaced is not None:
            return
        self._replaced = any(reference() is None for reference in self._tensors)
        if self._replaced:
            return
        known = self._versions if self._wholes is None else self._wholes
        by_backward = parameter.grad if self._wholes is None else None
        found = ((reference(), number) for reference, number in zip(self._tensors, known, strict=True))
        self._replaced = all(own is None or own_version(own) - number > (own is by_backward) for own, number in found)

    def is_made_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are its tensors, whatever has been done to them in place.

        Args:
            tensors: a tensor per parameter.
        """
        return len(tensors) == len(self._tensors) and all(map(is_, [own() for own in self._tensors], tensors))

    def changes(self, tensors: Sequence[Tensor]) -> int | None:
        """How often its tensors have been changed since it was judged or settled, at most; None if replaced.

        Args:
            tensors: a tensor per parameter.
        """
        if not self.is_made_of(tensors):
            return None
        self._latest = _versions(tensors)
        return max(map(sub, self._latest, self._versions), default=0)

    def grew_into(self, tensors: Sequence[Tensor]) -> bool:
        """Whether one more backward has been added to it, with no zeroing in between.

        Args:
            tensors: a tensor per parameter, of parameters too that had no gradient before.
        """
        if self.used or self.touched or self._replaced:
            return False
        own = [reference() for reference in self._tensors]
        return all(each is not None for each in own) and set(map(id, own)) <= set(map(id, tensors))

    def is_spike(self) -> bool:
        """Whether it is a spike, known on the host: the first call waits for the device."""
        if self._is_spike is None:
            self._is_spike = bool(self.verdict.spike)
        return self._is_spike


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [version(tensor) for tensor in tensors] if any_sharded(tensors) else list(map(own_version, tensors))
