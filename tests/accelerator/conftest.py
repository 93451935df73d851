from __future__ import annotations

import pytest

from tests.accelerator._device import Device, wanted


@pytest.fixture
def device() -> Device:
    return Device(wanted())
