"""The log line at the end of a run."""

from __future__ import annotations

import logging

import torch

from ignite_monitor.monitor.run_summary import RunSummary


def make():
    weight = torch.nn.Parameter(torch.zeros(2))
    return torch.optim.SGD([{"params": [weight], "lr": 0.1}, {"params": [torch.nn.Parameter(torch.zeros(1))]}], lr=0.1)


def test_the_line_has_steps_counts_and_learning_rates(caplog):
    optimizer = make()
    summary = RunSummary([optimizer])
    summary.steps = 990
    optimizer.param_groups[0]["lr"] = torch.tensor(0.001, dtype=torch.float64)
    with caplog.at_level(logging.INFO):
        summary.log(logging.getLogger("x"), "GradMonitor (grad)", [(12, "spikes"), (9, "skipped"), (0, "clipped")])
    assert [record.message for record in caplog.records] == [
        "GradMonitor (grad): end of run: 990 optimizer steps, 12 spikes, 9 skipped, learning rate 0.1 to 0.001, "
        "0.1 to 0.1."
    ]


def test_a_run_without_steps_has_no_line(caplog):
    with caplog.at_level(logging.INFO):
        RunSummary([make()]).log(logging.getLogger("x"), "GradMonitor (grad)", [])
    assert not caplog.records
