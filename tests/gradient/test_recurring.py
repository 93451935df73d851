"""Isolated spikes that recur at a similar size."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine
from torch import nn

from ignite_monitor import GradMonitor
from ignite_monitor.detection.recurring import RecurringSpikes


def observe(spikes):
    """The iterations of spikes that recur, after each one of them."""
    recurring, seen, last = RecurringSpikes(), [], None
    for iteration, size in spikes:
        isolated = torch.tensor(last != iteration - 1)
        recurs = recurring.observe(iteration, torch.tensor(size, dtype=torch.float64), isolated)
        iterations, last = recurring.iterations(iteration), iteration
        seen.append(sorted(iterations[~iterations.isnan()].tolist()))
        assert bool(recurs) == (iteration in seen[-1])
    return seen, recurring


@pytest.mark.parametrize(
    ("spikes", "shown"),
    [
        ([(i, 3.0) for i in range(0, 200, 40)], [0, 40, 80, 120, 160]),
        ([(i, 3.0) for i in range(0, 1240, 310)], None),  # four within 1,000 iterations
        ([(i, 3.0) for i in range(0, 1245, 249)], [0, 249, 498, 747, 996]),
        ([(i, 3.0) for i in range(40)], None),  # in a row
        ([(40 * i, 1.0 * 1.18**i) for i in range(5)], [0, 40, 80, 120, 160]),  # within a factor of 1.94
        ([(40 * i, 1.0 * 1.2**i) for i in range(5)], None),  # of 2.07
        ([(40 * i, (3.0, 90.0)[i % 2]) for i in range(9)], [0, 80, 160, 240, 320]),  # others between them
        ([(1100 * i, 3.0) for i in range(5)] + [(50, 3.0)], None),  # of an earlier run
    ],
)
def test_five_isolated_spikes_within_a_factor_of_two(spikes, shown):
    seen, _ = observe(spikes)
    assert not any(seen[:-1])
    assert seen[-1] == (shown or [])


@pytest.mark.parametrize("size", [1.8, 1.9, 6.4, 6.6])
@pytest.mark.parametrize("iteration", [999, 1041])
def test_a_spike_recurs_if_four_before_it_are_within_a_factor_of_two_and_1000_iterations(size, iteration):
    _, recurring = observe([(40 * i, 3.0 + i / 4) for i in range(5)])
    copy = RecurringSpikes()
    copy.load_state_dict(recurring.state_dict())
    for one in (recurring, copy):
        recurs = one.observe(iteration, torch.tensor(size, dtype=torch.float64), torch.tensor(True))
        assert bool(recurs) == (iteration == 999 and size in (1.9, 6.4))


@pytest.mark.parametrize("fused", [False, True])
def test_a_rare_domain_is_learnt(fused):
    """The targets of one batch in 20 lie far away; the steps of the first four such batches are skipped."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    moved = []

    def train_step(engine, batch):
        x, y = batch
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        before = model.weight.detach().clone()
        optimizer.step()
        moved.append(not torch.equal(before, model.weight))

    trainer = Engine(train_step)
    monitor = GradMonitor(model, optimizer, on_spike="skip", threshold=20.0)
    monitor.attach(trainer)
    draws = torch.Generator().manual_seed(1)
    rare = range(59, 300, 20)
    batches = [
        (torch.randn(16, 4, generator=draws), torch.randn(16, 1, generator=draws) + (20.0 if i in rare else 0.0))
        for i in range(300)
    ]
    trainer.run(batches, max_epochs=1)
    assert [i for i in range(300) if not moved[i]] == [*rare[:4]]
    assert float(monitor.metrics["grad/skipped_count"]) == 4.0
    [report] = [report for report in monitor.reports if report.kind == "recurring_spikes"]
    assert (report.iteration, report.severity) == (140, "warning")
    assert ", ".join(str(i + 1) for i in rare[:5]) in report.text
