"""Two ranks see what one process with the whole batch and the whole parameters sees, and agree."""

from __future__ import annotations

import pytest
import torch

from tests.distributed._launch import launched
from tests.distributed._weight_update_worker import COUNT, SCENARIOS, STILL, net, train

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launched("_weight_update_worker", tmp_path_factory.mktemp("ranks"), SCENARIOS)


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "fsdp skipped"])
def test_both_ranks_publish_what_one_process_does(results, name):
    whole = train(net(), None, None if "exact" in name else 20)
    for result in results(name):
        for i in range(COUNT):
            # AdamW divides by gradients that are sums of another order
            assert result["published"][i] == pytest.approx(whole["published"][i], rel=1e-3), i
            for parameter, values in whole["diagnostics"][i].items():
                assert result["diagnostics"][i][parameter] == pytest.approx(values, rel=1e-3), (i, parameter)


@pytest.mark.parametrize("name", SCENARIOS)
def test_both_ranks_agree_to_the_last_bit(results, name):
    first, second = results(name)
    assert repr(first) == repr(second)  # NaN is not equal to itself


def test_one_of_the_parameters_freezes(results):
    for result in results("fsdp"):
        frozen = [values["monitor/frozen_count"] for values in result["published"]]
        assert frozen == [float(i == STILL[-1]) for i in range(1, COUNT + 1)]
        assert [values["still"][-1] for values in result["diagnostics"]] == frozen


def test_a_skipped_step_is_none_on_either_rank(results):
    for result in results("fsdp skipped"):
        assert any("monitor/grad_max" in values for values in result["published"])
        assert not any("monitor/frozen_count" in values for values in result["published"])


@pytest.mark.parametrize(("name", "collectives"), [("ddp", 0), ("fsdp", 2 * COUNT), ("fsdp exact", 2 * COUNT)])
def test_each_handler_makes_one_collective_for_all_sharded_parameters(results, name, collectives):
    for result in results(name):
        assert result["all_reduces"] == collectives
