"""The cases of test_matrix.py that take two ranks, one pair of processes for all of them."""

from __future__ import annotations

import pytest
import torch

from tests._helpers import assert_same
from tests.distributed._launch import launched, run_scenarios
from tests.stress._matrix import FULL, both, cases
from tests.stress._matrix_truth import compare

# By default those in which most pairs meet.
CASES = {case.name: case for case in cases(["ddp", "fsdp"], full=FULL)[: None if FULL else 6]}

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launched(
        "test_matrix_ranks", tmp_path_factory.mktemp("ranks"), CASES, package="tests.stress", timeout=3000.0
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.timeout(3100)
def test_every_rank_publishes_the_float64_truth_and_training_is_bitwise_the_same(results, name):
    ranks = results(name)
    compare(CASES[name], ranks)
    assert_same(ranks[0]["state"]["parameters"], ranks[1]["state"]["parameters"])


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    run_scenarios({name: lambda rank, case=case: both(case, rank) for name, case in CASES.items()})
