"""Alignment, and the learning rates that follow it, on two ranks."""

from __future__ import annotations

import pytest
import torch

from tests.distributed._alignment_worker import COUNT, SCENARIOS, train
from tests.distributed._launch import launched

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return launched("_alignment_worker", tmp_path_factory.mktemp("ranks"), SCENARIOS)


@pytest.mark.parametrize("scenario", ["ddp", "own_seeds", "fsdp"])
def test_both_ranks_publish_what_one_process_does(ranks, scenario):
    """Ranks with seeds of their own start from the weights of rank 0, and compare with these."""
    first, second = ranks(scenario)
    assert first == second
    whole = train(None)["published"]
    assert any(name.startswith("alignment/dZ_w0/") for name in whole[-1])
    for i in range(COUNT):
        assert first["published"][i] == pytest.approx(whole[i], rel=1e-3), i


def test_ranks_that_have_run_out_of_data_are_not_waited_for(ranks):
    """Learning rates stay as they are, and what takes all ranks is absent."""
    results = ranks("join")
    assert [len(each["published"]) for each in results] == [2, 4]
    assert {name.split("/")[0] for each in results for names in each["published"] for name in names} == {"maxp"}
