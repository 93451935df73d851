"""Ways to train, crossed: all monitors publish the float64 truth of each run, and leave the training bitwise alone.

The axes are the precision, accumulation, the optimizer, ``torch.compile``, the ranks,
clipping, skipping, and whether GradMonitor is attached first or last; every run has a spike, and one with a GradScaler
an overflow. By default there are cases in which every two values of two axes meet. With ``FULL_MATRIX=1`` in the
environment it is the product of the first five axes, with the other three spread over it:

    FULL_MATRIX=1 python -m pytest tests/stress/test_matrix.py

The truth of norms, thresholds, flags, counts, updates and spectra is computed from what the train step keeps by itself:
gradients after backward, and weights before and after the step. The run without monitors skips those steps that a
float64 threshold rule says are spikes.

A compiled model runs eagerly in iterations that hooks watch, which rounds otherwise than compiled code: the run without
monitors runs these iterations eagerly too, and the others compiled. Then the two are bitwise the same.
"""

from __future__ import annotations

import shutil

import pytest
import torch

from tests._helpers import assert_same
from tests._ranks import launched, run_scenarios
from tests.stress._matrix import AXES, FULL, both, cases, compare

CASES = {case.name: case for case in cases(["alone"], full=FULL)}
# By default those in which most pairs meet.
OF_RANKS = {case.name: case for case in cases(["ddp", "fsdp"], full=FULL)[: None if FULL else 3]}
COMPILED = next(case for case in cases(["alone"], full=True) if case.mode == "compiled" and case.skip)


@pytest.mark.parametrize("name", CASES)
def test_every_number_is_the_float64_truth_and_training_is_bitwise_the_same(name):
    compare(CASES[name], [both(CASES[name])])


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_with_inductor():
    compare(COMPILED, [both(COMPILED, backend="inductor")])


def test_every_two_values_of_two_axes_meet():
    chosen = cases(AXES["world"], full=False)
    for first, one in enumerate(AXES.values()):
        for second, other in list(enumerate(AXES.values()))[first + 1 :]:
            met = {(case[first], case[second]) for case in chosen}
            assert met == {(a, b) for a in one for b in other}


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.timeout(3100)
def test_every_rank_publishes_the_float64_truth_and_training_is_bitwise_the_same(tmp_path):
    results = launched("test_matrix", tmp_path, OF_RANKS, package="tests.stress", timeout=3000.0)
    for name, case in OF_RANKS.items():
        ranks = results(name)
        compare(case, ranks)
        assert_same(ranks[0]["state"]["parameters"], ranks[1]["state"]["parameters"])


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    run_scenarios({name: lambda rank, case=case: both(case, rank) for name, case in OF_RANKS.items()})
