"""Scenarios of a test module run once, on two ranks or ``RANKS`` of a module, for all of its tests."""

from __future__ import annotations

import pytest
import torch

from tests._ranks import WORLD, launched

collect_ignore_glob = [] if torch.distributed.is_available() else ["test_*.py"]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Name of a scenario -> what it came to on each rank.

    ``RUN`` of a module are those that run, by default all; ``APART`` those that break their process group, and have
    processes of their own.
    """
    module = request.module
    names = getattr(module, "RUN", module.SCENARIOS)
    apart = getattr(module, "APART", ())

    def run(scenarios):
        folder = tmp_path_factory.mktemp("ranks")
        return launched(request.path.stem, folder, scenarios, world=getattr(module, "RANKS", WORLD))

    loads = {name: run([name]) for name in apart}
    together = run([name for name in names if name not in apart])
    return lambda name: loads.get(name, together)(name)
