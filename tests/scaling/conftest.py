from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def frozen():
    """``parametrize`` collects garbage, which need not be looked for among all that torch.export has imported."""
    gc.freeze()
