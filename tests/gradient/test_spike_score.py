"""The share of spikes among the last thousand values, against Python lists."""

from __future__ import annotations

import random

import pytest
import torch

from ignite_monitor.detection.judge import SpikeScore


def test_the_share_of_spikes_among_the_last_thousand_values():
    chance, score, seen = random.Random(0), SpikeScore(), []
    assert score.value().isnan()
    for i in range(2500):
        spike, when = chance.random() < 0.1 + 0.5 * (i > 1500), chance.random() < 0.8
        score.observe(torch.tensor(spike), None if i % 2 and when else torch.tensor(when))
        if when:
            seen.append(spike)
        if seen:
            last = seen[-1000:]
            assert score.value().item() == sum(last) / len(last)
    resumed = SpikeScore()
    resumed.load_state_dict(score.state_dict())
    resumed.observe(torch.tensor(True))
    assert resumed.value().item() == sum([*seen, True][-1000:]) / 1000
    assert score.value().item() == sum(seen[-1000:]) / 1000  # it has a state of its own


@pytest.mark.parametrize("state", [{}, {"recent": torch.zeros(5)}, {"other": torch.zeros(2000)}])
def test_the_state_of_something_else_is_refused(state):
    with pytest.raises(ValueError, match="recent"):
        SpikeScore().load_state_dict(state)


def test_nothing_is_read_on_the_host():
    score = SpikeScore()
    score.observe(torch.zeros((), dtype=torch.bool, device="meta"))
    assert score.value().is_meta
