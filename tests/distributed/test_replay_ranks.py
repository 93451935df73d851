"""Two ranks are checked together: the same result on both, wherever a bit flips, and training as without."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from ignite.engine import Engine

from ignite_monitor import DriftMonitor, MonitorEvents, ReplayCheckHandler
from tests._helpers import assert_same, make_batches, make_step, mse_loss, same
from tests._models import make_model
from tests._ranks import ddp, run_scenarios, train

KEY = "replay/reproducible"
FAULT = 5  # iteration, after four equal pairs of passes


def replayed(wrap, rank: int, is_watched: bool = True, fault: str = "") -> dict[str, Any]:
    """Train with two micro-batches; the second rank's second pass in one iteration has a fault."""
    calls: list[Any] = []
    checks: list[Any] = []

    def loss(model: Any, batch: Any) -> torch.Tensor:
        calls.append(batch)
        is_faulty = rank == 1 and len(calls) == 2 * FAULT
        if is_faulty and fault == "error":
            raise RuntimeError("no second pass")
        return mse_loss(model, batch) * (1.001 if is_faulty and fault else 1.0)

    def monitors(model, optimizer):
        checks.extend([ReplayCheckHandler(model, loss=loss)] if is_watched else [])
        return [*checks, lambda engine: torch.manual_seed(rank)]

    def step(model, optimizer):
        return make_step(model, optimizer, 2, reduce_last=not getattr(model, "static_graph", False))

    run = train(make_model, wrap, rank, make_batches(6), monitors, optimizer=adamw, step=step)
    texts = [report.text for check in checks for report in check.reports]
    return {"rows": run.rows, "weights": dict(run.model.state_dict()), "random": torch.rand(3), "texts": texts}


def adamw(model):
    return torch.optim.AdamW(model.parameters())


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


WRAPS: dict[str, Any] = {
    "ddp": ddp,
    "views": functools.partial(ddp, gradient_as_bucket_view=True),
    "static": functools.partial(ddp, static_graph=True),
}
SCENARIOS: dict[str, Any] = {"drift": drift}
for name, wrap in WRAPS.items():
    SCENARIOS[name] = functools.partial(replayed, wrap)
    SCENARIOS[f"{name}, alone"] = functools.partial(replayed, wrap, is_watched=False)
for fault in ("bit", "error"):
    SCENARIOS[f"ddp, {fault}"] = functools.partial(replayed, ddp, fault=fault)


@pytest.mark.parametrize("name", WRAPS)
def test_ranks_are_checked_together_and_train_as_without(results, name):
    matches, alone = results(name), results(f"{name}, alone")
    for rank in range(2):
        assert matches[rank]["rows"] == [{KEY: 1.0}] * 6
        assert_same(matches[rank]["weights"], alone[rank]["weights"])
        assert_same(matches[rank]["random"], alone[rank]["random"])


@pytest.mark.parametrize(("fault", "after"), [("bit", [{KEY: 0.0}, {}]), ("error", [{}, {}])])
def test_a_fault_or_an_error_on_one_rank_is_one_on_both(results, fault, after):
    for result, alone in zip(results(f"ddp, {fault}"), results("ddp, alone"), strict=True):
        assert result["rows"] == [{KEY: 1.0}] * (FAULT - 1) + after
        assert_same(result["weights"], alone["weights"])


def test_a_rank_without_a_difference_says_nothing_of_its_passes(results):
    (first,), (second,) = (result["texts"] for result in results("ddp, bit"))
    assert first.startswith(f"two passes gave different gradients: on another rank. {FAULT - 1} earlier pairs")
    assert "They left parameters, buffers and known generators the same" in second


def test_a_drift_is_detected_on_both_ranks_alike(results):
    first, second = results("drift")
    assert len(first["detected"]) == 1
    assert same(first, second)


if __name__ == "__main__":
    run_scenarios(SCENARIOS)
