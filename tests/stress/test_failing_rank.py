"""A rank that fails, lags or leaves does not leave the other one hanging in a monitor's collective."""

from __future__ import annotations

import pytest
import torch

from tests.distributed._launch import launched
from tests.stress._failing_worker import CONDITIONAL, FAILING, FAILS, LAGGING, SCENARIOS

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the scenarios came to; a rank that hangs is killed, and fails all tests."""
    return launched("_failing_worker", tmp_path_factory.mktemp("ranks"), SCENARIOS, package="tests.stress")


@pytest.mark.parametrize("name", FAILING)
def test_the_other_rank_ends_with_an_error_and_nothing_is_left_on_either(results, name):
    """Within the time that the process group gives a collective: a rank waits for nothing else."""
    waiting, failed = results(name)
    assert waiting["ended"] == "RuntimeError"  # of the collective that the other one did not come to
    if "terminate" in name:
        assert failed["ended"] is None
    else:
        assert f"rank 1 failed: {name.partition(' ')[2]}" in failed["message"]
    assert failed["iteration"] == FAILS
    assert waiting["iteration"] in (FAILS, FAILS + 1)
    assert waiting["left"] == failed["left"] == []


@pytest.mark.parametrize("name", LAGGING)
def test_a_rank_that_lags_is_waited_for(results, name):
    both = results(name)
    assert [item["ended"] for item in both] == [None, None]
    assert both[0]["published"] == both[1]["published"]


@pytest.mark.parametrize("name", CONDITIONAL)
def test_no_collective_is_added_where_only_some_ranks_come(results, name):
    """In no iteration does a monitor make more or fewer of them on one rank than on the other."""
    first, second = results(name)
    assert first == second
    added = {with_them - without for with_them, without in zip(first["monitored"], first["plain"], strict=True)}
    assert 0 < max(added) <= min(added) + 1  # one more where the replica check exchanges names


def test_ranks_that_have_run_out_of_data_are_not_waited_for(results):
    families = ["grad", "gradient", "monitor", "parameter", "spectral", "step"]
    assert [result["published"] for result in results("uneven inputs")] == [[families] * 3, [families] * 5]


def test_every_backward_of_a_model_without_a_wrapper_takes_one_collective(results):
    for result in results("plain"):
        assert result["monitored"] == [2] * len(result["monitored"])
        assert set(result["plain"]) == {0}
