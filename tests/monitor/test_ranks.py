"""Collectives of monitors: none without a process group, and rows by name over ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ignite_monitor.monitor import ranks
from ignite_monitor.monitor.transfer import NamedValues


def test_without_a_group_nothing_is_communicated(monkeypatch):
    for name in ("all_gather_object", "all_reduce"):
        monkeypatch.setattr(dist, name, lambda *_: pytest.fail("there is one rank"))
    values = torch.ones(2)
    assert (ranks.world_size(), ranks.own_rank()) == (1, 0)
    assert ranks.all_take_part(nn.Linear(2, 2))
    assert ranks.sum_over_ranks(values) is values
    assert ranks.max_over_ranks(values) is values
    assert ranks.from_every_rank({"a": 1}) == [{"a": 1}]


def test_rows_by_name_over_two_ranks_that_have_the_same(monkeypatch):
    monkeypatch.setattr(ranks, "from_every_rank", lambda value: [value, value])
    monkeypatch.setattr(ranks, "sum_over_ranks", lambda values: 2 * values)
    sums = {"kind": NamedValues(["a", "b"], torch.tensor([[1.0, 2.0], [3.0, 4.0]]))}
    maxima = {"largest": NamedValues(["a", "b"], torch.tensor([[5.0], [torch.nan]]))}
    sums, maxima = ranks.RankReduction()(sums, maxima, torch.device("cpu"))
    assert sums["kind"][0] == ["a", "b"]
    assert sums["kind"][1].tolist() == [[2.0, 4.0], [6.0, 8.0]]
    assert maxima["largest"][1].tolist() == [[5.0], [torch.inf]]  # the maximum of NaN depends on the order of ranks
