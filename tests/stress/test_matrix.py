"""Ways to train, crossed: all monitors publish the float64 truth of each run, and leave the training bitwise alone.

The axes are the precision, accumulation, the optimizer, ``torch.compile``, the ranks (in test_matrix_ranks.py),
clipping, skipping, and whether GradMonitor is attached first or last; every run has a spike, and one with a GradScaler
an overflow. By default there are cases in which every two values of two axes meet. With ``FULL_MATRIX=1`` in the
environment it is the product of the first five axes, with the other three spread over it:

    FULL_MATRIX=1 python -m pytest tests/stress/test_matrix.py tests/stress/test_matrix_ranks.py

The truth of norms, thresholds, flags, counts, updates and spectra is computed from what the train step keeps by itself:
gradients after backward, and weights before and after the step. The twin leaves out those steps that a float64
threshold rule says are spikes.

A compiled model runs eagerly in iterations that hooks watch, which rounds otherwise than compiled code: its twin is
told to run these iterations eagerly too, and the others compiled. Then the two are bitwise the same.
"""

from __future__ import annotations

import shutil

import pytest

from tests.stress._matrix import AXES, FULL, both, cases
from tests.stress._matrix_truth import compare

CASES = {case.name: case for case in cases(["alone"], full=FULL)}
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
