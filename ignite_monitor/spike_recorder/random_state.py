"""The state of all default random number generators, kept and put back."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from ignite_monitor.reference.rng import cuda_devices

_WORDS = 624  # of a Mersenne Twister
_BYTES = 4 * (_WORDS + 1)  # these and the place in them


class RandomState:
    """Looks at the state of torch's, Python's and NumPy's default generators, in some ten microseconds."""

    def __init__(self) -> None:
        self._numpy: Any = None
        self._seen: bytes | None = None

    def now(self) -> dict[str, Any]:
        """The state as it is, for :func:`restore`."""
        state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
        # Its state lies on the host: nothing waits.
        cuda = {each.index: torch.cuda.default_generators[each.index].get_state() for each in cuda_devices()}
        numpy = self._of_numpy()
        return state | ({"cuda": cuda} if cuda else {}) | ({} if numpy is None else {"numpy": numpy})

    def _of_numpy(self) -> Any:
        module = sys.modules.get("numpy.random")
        if module is None:  # nobody has drawn from what is not imported
            return None
        if not hasattr(module, "get_bit_generator"):  # before NumPy 1.24
            return module.get_state()
        generator = module.get_bit_generator()
        if type(generator).__name__ != "MT19937":
            return None
        # Asked for, the state takes forty microseconds. Drawing leaves a trace in memory, but where a normal number is
        # taken that has been drawn before.
        seen = ctypes.string_at(generator.ctypes.state_address, _BYTES)
        if seen != self._seen or self._numpy is None or self._numpy[3]:
            self._seen, self._numpy = seen, module.get_state()
        return self._numpy


def saved(state: Mapping[str, Any]) -> dict[str, Any]:
    """The same in tensors, numbers, tuples and dictionaries."""
    found = dict(state)
    if "numpy" in found:
        _, words, *rest = found["numpy"]
        found["numpy"] = (torch.from_numpy(words.astype("int64")), *rest)
    return found


def restore(state: Mapping[str, Any]) -> None:
    """Have the generators draw what they drew from a saved state on; those of devices that are not there are left."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "numpy" in state:
        import numpy as np

        words, *rest = state["numpy"]
        np.random.set_state(("MT19937", words.numpy().astype("uint32"), *rest))
    for index, each in state.get("cuda", {}).items():
        if index < torch.cuda.device_count():
            torch.cuda.set_rng_state(each, index)
