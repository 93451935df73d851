"""Two ranks see what one process with the whole batch sees, and agree."""

from __future__ import annotations

import pytest
import torch

from tests.distributed._launch import launched
from tests.distributed._rcc_worker import COUNT, SCENARIOS, branch, moved, net, train

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launched("_rcc_worker", tmp_path_factory.mktemp("ranks"), SCENARIOS)


@pytest.mark.parametrize("name", ["ddp", "ddp static", "ddp uneven", "fsdp", "fsdp of both"])
def test_both_ranks_publish_what_one_process_does(results, name):
    whole = train(moved(), None, 3, reference=net()) if name == "ddp uneven" else train(net(), None)
    assert whole["published"][-1]["rcc/weight_update_max"] > 0.1
    first, second = results(name)
    assert first == second
    for i in range(COUNT):
        assert first["published"][i] == pytest.approx(whole["published"][i], rel=1e-3, abs=1e-5), i


def test_a_sharded_model_needs_a_module(results):
    for result in results("fsdp refused"):
        assert result["refused"].startswith("Argument reference should be a module, since the model")


def test_a_rank_that_cannot_measure_holds_nobody_up(results):
    first, second = results("failing")
    assert [bool(values) for values in first["published"]] == [True] * COUNT
    assert second == first


def test_a_layer_that_one_rank_alone_reaches_is_published_by_both(results):
    first, second = results("branch")
    assert first == second
    whole = branch(None)["published"]
    assert ["rcc/input/inner" in values for values in whole] == [True, True, False]
    assert first["published"] == [pytest.approx(values) for values in whole]
