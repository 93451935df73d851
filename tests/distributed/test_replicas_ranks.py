"""One bit of difference between two ranks is found at once and named; equal ranks are in sync."""

from __future__ import annotations

import pytest
import torch

from tests.distributed._launch import launched
from tests.distributed._replicas_worker import AT, CHANGES, COUNT, LOOKS, SCENARIOS

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launched("_replicas_worker", tmp_path_factory.mktemp("replicas"), SCENARIOS)


CHANGED = [name for name in SCENARIOS if name.split()[-1] in CHANGES]
HEALTHY = ["ddp healthy", "ddp seeds", "ddp excluded", "hybrid healthy", "fsdp healthy"]


@pytest.mark.parametrize("name", CHANGED)
def test_a_difference_is_found_at_the_next_check_and_named(results, name):
    named = CHANGES[name.split()[1]][1]
    for result in results(name):
        assert result["in_sync"][:AT] == [1.0] * (AT - 1) + [0.0]
        # An item that not all ranks have can't be counted.
        assert result["differing"][:AT] == [0.0] * (AT - 1) + [None if name.endswith("new") else 1.0]
        (warned, *_) = [message for message in result["said"] if "differ in" in message]
        assert named in warned


@pytest.mark.parametrize("name", HEALTHY)
def test_without_a_difference_nothing_is_warned(results, name):
    """RNG state differs on purpose in one of them, and an excluded weight in another."""
    for result in results(name):
        assert result["in_sync"] == [1.0] * len(result["in_sync"])
        assert result["differing"] == [0.0] * len(result["differing"])
        assert result["said"] == []


def test_an_error_on_one_rank_leaves_no_other_waiting_and_nothing_is_reported(results):
    for rank, result in enumerate(results("ddp error")):
        assert result["in_sync"] == [1.0] * (AT - 1) + [None] * (COUNT - AT + 1)
        assert result["differing"] == [0.0] * (AT - 1) + [None] * (COUNT - AT + 1)
        assert len(result["said"]) == rank
        assert all("out of memory (a stand-in)" in message for message in result["said"])


@pytest.mark.parametrize(("name", "count"), [("ddp healthy", LOOKS), ("ddp weight", COUNT), ("fsdp healthy", COUNT)])
def test_one_collective_in_a_check_and_one_more_in_the_first_second_fourth(results, name, count):
    for result in results(name):
        assert result["all_reduces"] == count + count.bit_length()


def test_the_rank_that_waits_longest_for_its_data(results):
    for rank, result in enumerate(results("waits")):
        assert result["ms"] == pytest.approx([50.0 if rank else 3.0] * 2)
        assert result["max_ms"] == pytest.approx([50.0] * 2)
        assert result["rank"] == [1.0, 1.0]
