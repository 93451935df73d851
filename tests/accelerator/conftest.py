from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.accelerator._device import VARIABLE, Device, wanted

if VARIABLE not in os.environ and not torch.cuda.is_available():
    # test_simulated.py runs the others in a process of its own.
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py") if path.stem != "test_simulated"]


@pytest.fixture
def device() -> Device:
    return Device(wanted())
