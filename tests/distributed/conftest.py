"""Scenarios of a test module run once, on two ranks or ``RANKS`` of a module, for all of its tests."""

from __future__ import annotations

import pytest
import torch

from tests._ranks import WORLD, launched

collect_ignore_glob = [] if torch.distributed.is_available() else ["test_*.py"]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Name of a scenario -> what it came to on each rank. ``RUN`` of a module are those that run, by default all."""
    module = request.module
    names = getattr(module, "RUN", module.SCENARIOS)
    world = getattr(module, "RANKS", WORLD)
    return launched(request.path.stem, tmp_path_factory.mktemp("ranks"), names, world=world)
