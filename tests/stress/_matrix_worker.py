"""One rank of the runs that test_matrix_ranks.py looks at: ``… FOLDER RANK CASE …``."""

from __future__ import annotations

import torch

from tests.distributed._launch import run_scenarios
from tests.stress._matrix import AXES, both, cases

CASES = {case.name: case for full in (True, False) for case in cases(AXES["world"], full=full)}

if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    run_scenarios({name: lambda rank, case=case: both(case, rank) for name, case in CASES.items()})
