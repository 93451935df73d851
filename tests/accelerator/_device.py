"""A device to train on, and a look at who waits for it."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator

import pytest
import torch

from tests.accelerator import simulated

VARIABLE = "IGNITE_MONITOR_TEST_DEVICE"


class Device:
    """A CPU, a GPU, or the simulated device."""

    def __init__(self, name: str) -> None:
        self.name = name

    @contextlib.contextmanager
    def no_waits(self) -> Iterator[None]:
        """Nobody may wait for the device meanwhile, but for :meth:`may_wait`."""
        if self.name == "cuda":
            with _debug_mode("error"):
                yield
        elif self.name == "cpu":
            yield
        else:
            with simulated.waits() as waits:
                yield
            assert not waits, "\n".join(waits)

    @contextlib.contextmanager
    def may_wait(self) -> Iterator[None]:
        """What a train step does itself, or a test does to look at something."""
        if self.name == "cuda":
            with _debug_mode("default"):
                yield
        else:
            with simulated.waits():
                yield

    @contextlib.contextmanager
    def counted_waits(self) -> Iterator[list[str]]:
        """Who has waited for the device meanwhile."""
        if self.name != "cuda":
            with simulated.waits() as waits:
                yield waits
            return
        result: list[str] = []
        with warnings.catch_warnings(record=True) as caught, _debug_mode("warn"):
            warnings.simplefilter("always")
            yield result
        result += [str(item.message) for item in caught if "synchroniz" in str(item.message)]


def wanted() -> str:
    """The device that tests in this process are to run on.

    Raises:
        pytest.skip.Exception: if there is none.
    """
    name = os.environ.get(VARIABLE, "cuda" if torch.cuda.is_available() else "")
    if not name:
        pytest.skip("there is no GPU; test_simulated.py runs it on a simulated device")
    if name == simulated.NAME:
        simulated.load()
    return name


@contextlib.contextmanager
def _debug_mode(mode: str) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
