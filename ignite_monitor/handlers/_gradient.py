"""A gradient that has been judged, and whether the one that lies there now is still it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor

from ignite_monitor.functional.spikes import Verdict


class JudgedGradient:
    """What is known of a gradient since backward, or since a train step set it by hand.

    It is told from another one by the identity of its tensors, held by weak references: clipping and unscaling
    change them in place, a train step that sets gradients by hand, or sets them to None, replaces them.

    Args:
        verdict: what the detector said of its norm.
        tensors: the gradient, a tensor per parameter.
        known: how many norms the verdict is based on, as far as the host knows.

    Attributes:
        verdict: what the detector said of its norm.
        known: how many norms the verdict is based on, as far as the host knows.
        seen: whether it was seen in the current iteration.
        used: whether an optimizer has made its step with it.
        counted: 0-dim bool, whether the detector has observed it already; None if not.
        announced: whether it has been announced as a spike.
    """

    def __init__(self, verdict: Verdict, tensors: Sequence[Tensor], known: int) -> None:
        self.verdict = verdict
        self.known = known
        self.seen = True
        self.used = False
        self.counted: Tensor | None = None
        self.announced = False
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._versions = [tensor._version for tensor in tensors]
        self._is_spike: bool | None = None

    def is_made_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are its tensors, whatever has been done to them in place.

        Args:
            tensors: a tensor per parameter.
        """
        return len(tensors) == len(self._tensors) and all(
            own() is tensor for own, tensor in zip(self._tensors, tensors, strict=True)
        )

    def grew_into(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are its tensors and one more backward has been added to them, with no zeroing in between.

        Args:
            tensors: a tensor per parameter.
        """
        return (
            not self.used
            and self.is_made_of(tensors)
            and all(tensor._version - version <= 1 for tensor, version in zip(tensors, self._versions, strict=True))
        )

    def is_spike(self) -> bool:
        """Whether it is a spike, known on the host: the first call waits for the device."""
        if self._is_spike is None:
            self._is_spike = bool(self.verdict.spike)
        return self._is_spike
