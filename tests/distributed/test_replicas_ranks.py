"""Two ranks that hold the same are never said to differ; one bit of difference is found at once, and named."""

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


@pytest.mark.parametrize("name", CHANGED)
def test_a_difference_is_found_at_the_next_look_and_named(results, name):
    named = CHANGES[name.split()[1]][1]
    for result in results(name):
        assert result["agree"][:AT] == [1.0] * (AT - 1) + [0.0]
        assert result["differing"][: AT - 1] == [0.0] * (AT - 1)
        assert result["differing"][AT - 1] == 1.0
        (said, *_) = [each for each in result["said"] if "differ in" in each]
        assert named in said


@pytest.mark.parametrize("name", ["ddp healthy", "ddp seeds", "hybrid healthy", "fsdp healthy"])
def test_what_is_the_same_is_never_said_to_differ(results, name):
    for result in results(name):
        assert result["agree"] == [1.0] * len(result["agree"])
        assert not any(result["differing"])
        assert not any("differ in" in each for each in result["said"])


def test_random_state_that_is_another_one_from_the_beginning_is_left_out(results):
    for result in results("ddp seeds"):
        (said,) = result["said"]
        assert "torch's random state" in said
        assert "left out" in said


@pytest.mark.parametrize(("name", "count"), [("ddp healthy", LOOKS), ("ddp weight", COUNT), ("fsdp healthy", COUNT)])
def test_one_collective_at_each_look(results, name, count):
    for result in results(name):
        assert result["all_reduces"] == count


def test_the_rank_that_waits_longest_for_its_data(results):
    for rank, result in enumerate(results("waits")):
        assert result["ms"] == pytest.approx([50.0 if rank else 3.0] * 2)
        assert result["max_ms"] == pytest.approx([50.0] * 2)
        assert result["rank"] == [1.0, 1.0]
