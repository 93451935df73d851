"""The cases of test_matrix.py that take two ranks, one pair of processes for all of them."""

from __future__ import annotations

import pytest
import torch

from tests._trainers import assert_same
from tests.distributed._launch import launched
from tests.stress._matrix import cases
from tests.stress.test_matrix import FULL, compare

# By default those in which most pairs meet.
CASES = {case.name: case for case in cases(["ddp", "fsdp"], full=FULL)[: None if FULL else 6]}

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launched("_matrix_worker", tmp_path_factory.mktemp("ranks"), CASES, package="tests.stress", timeout=3000.0)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.timeout(3100)
def test_every_rank_publishes_the_float64_truth_and_training_is_bitwise_the_same(results, name):
    both = results(name)
    compare(CASES[name], both)
    assert_same(both[0]["state"]["parameters"], both[1]["state"]["parameters"])
