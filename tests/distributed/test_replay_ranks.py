"""Two ranks replay together: the same result on both, found wherever a bit flips, and training as without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ignite.engine import Engine

from ignite_monitor import DriftMonitor, MonitorEvents, ReplayCheckHandler
from ignite_monitor.model.isolation import is_reference_run
from tests._helpers import assert_same, make_batches, make_model, run_monitored, same
from tests.distributed import _models
from tests.distributed._launch import run_scenarios
from tests.distributed._models import ddp, fsdp, step_of

KEY = "replay/reproducible"
FAULT = 4  # iteration


def train(wrap, rank: int, is_watched: bool, faulty: int | None = None) -> dict[str, Any]:
    """Train with two micro-batches, of which only the last one is reduced over ranks where that is possible."""
    model = wrap()
    optimizer = torch.optim.AdamW(model.parameters())
    handler = ReplayCheckHandler(model, optimizer)

    def disturb(module, args, output):
        return output * 1.001 if is_reference_run() and state["iteration"] == FAULT else output

    if faulty == rank:
        model.register_forward_hook(disturb)
    step, state = step_of(model, optimizer, rank, micro=2, quiet=not getattr(model, "static_graph", False)), {}
    torch.manual_seed(rank)

    def train_step(engine, batch):
        state["iteration"] = engine.state.iteration
        step(engine, batch)

    rows = run_monitored(train_step, make_batches(6), *([handler] if is_watched else []))
    weights = {name: _models.whole(item) for name, item in model.state_dict().items()}
    return {"rows": rows, "weights": weights, "random": torch.rand(3)}


def drift(rank: int) -> dict[str, Any]:
    """A value that drifts on the first rank alone, and on both after a reduction."""
    detected = []
    generator = torch.Generator().manual_seed(rank)

    def value(engine):
        number = torch.randn((), generator=generator) + 0.05 * max(engine.state.iteration - 250, 0) * (rank == 0)
        torch.distributed.all_reduce(number)
        return number

    monitor, engine = DriftMonitor(value), Engine(lambda engine, batch: None)
    monitor.attach(engine)
    engine.add_event_handler(MonitorEvents.DRIFT_DETECTED, lambda engine: detected.append(engine.state.iteration))
    engine.run(range(400))
    return {"detected": detected, "counts": monitor.counts()}


WRAPS = {
    "ddp": lambda: ddp(make_model()),
    "views": lambda: ddp(make_model(), gradient_as_bucket_view=True),
    "static": lambda: ddp(make_model(), static_graph=True),
    "fsdp": lambda: fsdp(_models.net()),
}
SCENARIOS: dict[str, Any] = {}
for name, wrap in WRAPS.items():
    SCENARIOS[name] = lambda rank, wrap=wrap: train(wrap, rank, True)
    SCENARIOS[f"{name}, alone"] = lambda rank, wrap=wrap: train(wrap, rank, False)
    SCENARIOS[f"{name}, faulty"] = lambda rank, wrap=wrap: train(wrap, rank, True, faulty=1)
SCENARIOS["drift"] = drift


@pytest.mark.parametrize("name", WRAPS)
def test_ranks_replay_together_and_train_as_without(results, name):
    matches, alone = results(name), results(f"{name}, alone")
    for rank in range(2):
        assert matches[rank]["rows"] == [{}] + [{KEY: 1.0}] * 5
        assert_same(matches[rank]["weights"], alone[rank]["weights"])
        assert_same(matches[rank]["random"], alone[rank]["random"])


@pytest.mark.parametrize("name", WRAPS)
def test_a_fault_on_one_rank_is_reported_on_both(results, name):
    for result in results(f"{name}, faulty"):
        assert result["rows"] == [{}] + [{KEY: float(i != FAULT)} for i in range(2, 7)]


def test_a_drift_is_detected_on_both_ranks_alike(results):
    first, second = results("drift")
    assert len(first["detected"]) == 1
    assert same(first, second)


if __name__ == "__main__":
    run_scenarios(SCENARIOS)
