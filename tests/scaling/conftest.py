from __future__ import annotations

import functools
import gc

import pytest
from torch.export import exported_program

# torch looks for the same operations among all in each export, a fifth of the time of a small one.
if hasattr(exported_program, "_collect_all_valid_cia_ops"):
    exported_program._collect_all_valid_cia_ops = functools.cache(exported_program._collect_all_valid_cia_ops)


@pytest.fixture(autouse=True)
def frozen():
    """``parametrize`` collects garbage, which need not be looked for among all that torch.export has imported."""
    gc.freeze()
