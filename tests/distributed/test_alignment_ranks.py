"""Alignment, and the learning rates that follow it, on two ranks."""

from __future__ import annotations

import pytest
import torch

from tests.distributed._alignment_worker import COUNT, SCENARIOS, train
from tests.distributed._launch import launched

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")


def test_both_ranks_publish_what_one_process_does(tmp_path):
    first, second = launched("_alignment_worker", tmp_path / "ranks", SCENARIOS)("ddp")
    assert first == second
    whole = train(None)["published"]
    assert any(name.startswith("alignment/dZ_w0/") for name in whole[-1])
    for i in range(COUNT):
        assert first["published"][i] == pytest.approx(whole[i], rel=1e-3), i
