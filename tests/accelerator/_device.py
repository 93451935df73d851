"""A device to train on, and the synchronizations of host and device."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch

from tests.accelerator import simulated

VARIABLE = "IGNITE_MONITOR_TEST_DEVICE"


class Device:
    """A CPU, a GPU, or the simulated device."""

    def __init__(self, name: str) -> None:
        self.name = name

    @contextlib.contextmanager
    def no_synchronization(self) -> Iterator[None]:
        """Nothing synchronizes host and device meanwhile, except in :meth:`may_synchronize`."""
        if self.name == "cuda":
            with _debug_mode("error"):
                yield
        else:
            with simulated.synchronizations() as synchronizations:
                yield
            assert not synchronizations, "\n".join(synchronizations)

    @contextlib.contextmanager
    def may_synchronize(self) -> Iterator[None]:
        """Allow what a train step does itself, or a test does to read something."""
        with _debug_mode("default") if self.name == "cuda" else simulated.synchronizations():
            yield

    @contextlib.contextmanager
    def counted_synchronizations(self) -> Iterator[list[str]]:
        """The synchronizations meanwhile."""
        if self.name != "cuda":
            with simulated.synchronizations() as synchronizations:
                yield synchronizations
            return
        result: list[str] = []
        with warnings.catch_warnings(record=True) as caught, _debug_mode("warn"):
            warnings.simplefilter("always")
            yield result
        result += [str(item.message) for item in caught if "synchroniz" in str(item.message)]


@contextlib.contextmanager
def _debug_mode(mode: str) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    _set_debug_mode(mode)
    try:
        yield
    finally:
        _set_debug_mode(before)


def _set_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)
