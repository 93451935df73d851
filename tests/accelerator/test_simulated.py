"""Tests on a simulated GPU, in a process of its own, because a device can't be removed from a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.accelerator import simulated
from tests.accelerator._device import VARIABLE


@pytest.mark.skipif(VARIABLE in os.environ, reason="this is that process")
def test_on_a_simulated_device():
    try:
        simulated.build()
    except simulated.NoDeviceError as error:
        pytest.skip(str(error))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:randomly", str(Path(__file__).parent)]
    environment = os.environ | {VARIABLE: simulated.NAME}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    assert " passed" in done.stdout
