"""Each rank keeps its own part of a spike, and looks by itself for where the first NaN came from."""

from __future__ import annotations

import pytest
import torch

from tests.distributed._launch import launched
from tests.distributed._spike_worker import SCENARIOS

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launched("_spike_worker", tmp_path_factory.mktemp("ranks"), SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_rank_has_a_file_of_its_own(results, name):
    for rank, result in enumerate(results(name)):
        assert result["files"] == [f"grad-00000003-rank{rank}.spike.pt"]
        assert result["own"]
        assert result["finite"]


def test_each_rank_can_make_its_step_again(results):
    assert [(each["same"], each["losses"], each["source"]) for each in results("spike")] == [(True, True, None)] * 2


def test_what_begins_on_both_ranks_is_named_on_both(results):
    assert [(each["source"]["name"], each["source"]["kind"]) for each in results("nan on both")] == [
        ("norm", "forward")
    ] * 2


def test_what_begins_on_another_rank_is_not_named(results):
    first, second = results("nan on one")
    assert first["source"] is None
    assert ["all values of this rank are finite" in text for text in first["said"]] == [True]
    assert (second["source"]["name"], second["source"]["kind"]) == ("norm", "forward")


@pytest.mark.parametrize(("name", "reason"), [("communicating", "communicates"), ("fsdp", "sharded")])
def test_nobody_communicates_for_it(results, name, reason):
    for result in results(name):
        assert result["source"] is None
        assert [reason in text for text in result["said"]] == [True]
