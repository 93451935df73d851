"""The norm of the whole matrix on every rank, however it is shared out."""

from __future__ import annotations

import pytest
import torch

from tests.distributed._launch import launched
from tests.distributed._spectral_worker import COUNT, SCENARIOS, net, train

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launched("_spectral_worker", tmp_path_factory.mktemp("ranks"), SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_rank_has_the_norm_of_the_whole_matrix(results, name):
    first, second = results(name)
    assert first["published"] == second["published"]
    for published, exact in zip(first["published"], first["exact"], strict=True):
        for key, value in exact.items():
            assert abs(published[key] / value - 1) <= published["spectral/error_max"] < 1e-2, key
        assert max(exact.values()) == pytest.approx(published["spectral/norm_max"], rel=1e-3)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "fsdp hybrid", "fsdp svd"])
def test_both_ranks_publish_what_one_process_does(results, name):
    whole = train(net(), None, "svd")["published"]
    for i in range(COUNT):
        for key, value in results(name)[0]["published"][i].items():
            if "error" not in key and "iterations" not in key:
                assert value == pytest.approx(whole[i][key], rel=2e-3), (i, key)


def test_resumed_run_publishes_what_the_uninterrupted_one_does(results):
    for resumed, whole in zip(results("fsdp resumed"), results("fsdp"), strict=True):
        assert resumed["published"] == whole["published"]
