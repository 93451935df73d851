from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.accelerator import simulated
from tests.accelerator._device import VARIABLE, Device

NAME = os.environ.get(VARIABLE, "cuda" if torch.cuda.is_available() else "")
if not NAME:
    # test_simulated.py runs the others in a process of its own.
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py") if path.stem != "test_simulated"]


@pytest.fixture
def device() -> Device:
    if not NAME:
        pytest.skip("there is no GPU; test_simulated.py runs it on a simulated device")
    if NAME == simulated.NAME:
        simulated.load()
    return Device(NAME)
