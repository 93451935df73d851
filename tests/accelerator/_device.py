"""A device to train on, and the synchronizations of host and device."""

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
    def no_synchronization(self) -> Iterator[None]:
        """Nothing synchronizes host and device meanwhile, except in :meth:`may_synchronize`."""
        if self.name == "cuda":
            with _debug_mode("error"):
                yield
        elif self.name == "cpu":
            yield
        else:
            with simulated.synchronizations() as synchronizations:
                yield
            assert not synchronizations, "\n".join(synchronizations)

    @contextlib.contextmanager
    def may_synchronize(self) -> Iterator[None]:
        """What a train step does itself, or a test does to look at something."""
        if self.name == "cuda":
            with _debug_mode("default"):
                yield
        else:
            with simulated.synchronizations():
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
