"""Adding up over ranks: what is asked of which backend; the ranks themselves are in tests/distributed."""

from __future__ import annotations

import ignite.distributed as idist
import pytest
import torch
from torch import nn

from ignite_monitor.monitor import ranks
from ignite_monitor.monitor.rank_reduction import RankReduction


@pytest.fixture
def other_backend(monkeypatch):
    """Two ranks of a backend of Ignite's, both of which have the same."""
    monkeypatch.setattr(idist, "model_name", lambda: "horovod-dist")
    monkeypatch.setattr(idist, "get_world_size", lambda: 2)
    monkeypatch.setattr(idist, "all_gather", lambda text: [text, text])
    monkeypatch.setattr(idist, "all_reduce", lambda values, op: values.mul_(2) if op == "SUM" else values)


def test_alone_nothing_is_communicated(monkeypatch):
    for name in ("all_gather", "all_reduce"):
        monkeypatch.setattr(idist, name, lambda *_: pytest.fail("there is nobody else"))
    values = torch.ones(2)
    assert ranks.world_size() == 1
    assert ranks.all_take_part(nn.Linear(2, 2))
    assert ranks.sum_over_ranks(values) is values
    assert ranks.max_over_ranks(values) is values
    assert ranks.from_every_rank({"a": 1}) == [{"a": 1}]


@pytest.mark.usefixtures("other_backend")
def test_other_backends_of_ignite():
    values = torch.tensor([1.0, -2.0])
    assert ranks.world_size() == 2
    assert ranks.all_take_part(nn.Linear(2, 2))
    assert ranks.sum_over_ranks(values).tolist() == [2.0, -4.0]
    assert ranks.max_over_ranks(values).tolist() == [1.0, -2.0]
    assert values.tolist() == [1.0, -2.0]
    assert ranks.from_every_rank(("a", torch.ones(2)))[1][1].tolist() == [1.0, 1.0]


@pytest.mark.usefixtures("other_backend")
def test_rows_by_name_over_another_backend():
    sums = {"kind": (["a", "b"], torch.tensor([[1.0, 2.0], [3.0, 4.0]]))}
    maxima = {"largest": (["a"], torch.tensor([[5.0]]))}
    sums, maxima = RankReduction()(sums, maxima, torch.device("cpu"))
    assert sums["kind"][0] == ["a", "b"]
    assert sums["kind"][1].tolist() == [[2.0, 4.0], [6.0, 8.0]]
    assert maxima["largest"][1].tolist() == [[5.0]]
