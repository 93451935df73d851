"""Two ranks replay together: the same result on both, found wherever a bit flips, and training as without."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from ignite.engine import Engine, Events

from ignite_monitor import DriftMonitor, MonitorEvents, ReplayCheckHandler
from ignite_monitor.model.isolation import in_second_pass
from tests._helpers import assert_same, make_batches, make_step, mse_loss, same
from tests._models import Net, make_model
from tests._ranks import ddp, fsdp, run_scenarios, train, whole

KEY = "replay/reproducible"
FAULT = 5  # iteration, after three second passes


def replayed(wrap, rank: int, is_watched: bool, faulty: int | None = None, make: Any = make_model) -> dict[str, Any]:
    """Train with two micro-batches, of which only the last one is reduced over ranks where that is possible."""

    def monitors(model, optimizer):
        engines = []

        def disturb(module, args, output):
            return output * 1.001 if in_second_pass() and engines[0].state.iteration == FAULT else output

        if faulty == rank:
            model.register_forward_hook(disturb)
        handlers = [ReplayCheckHandler(model, optimizer)] if is_watched else []
        return [engines.append, *handlers, lambda engine: torch.manual_seed(rank)]

    def step(model, optimizer):
        return make_step(model, optimizer, 2, reduce_last=not getattr(model, "static_graph", False))

    run = train(make, wrap, rank, make_batches(6), monitors, optimizer=adamw, step=step)
    weights = {name: whole(item) for name, item in run.model.state_dict().items()}
    return {"rows": run.rows, "weights": weights, "random": torch.rand(3)}


def adamw(model):
    return torch.optim.AdamW(model.parameters())


def interrupted(rank: int, is_watched: bool = True) -> dict[str, Any]:
    """The second pass fails between a forward, which leaves whole parameters behind, and its backward."""

    def fails(model: Any, batch: Any) -> torch.Tensor:
        loss = mse_loss(model, batch)
        if in_second_pass():
            raise RuntimeError("no second pass")
        return loss

    def monitors(model, optimizer):
        return [ReplayCheckHandler(model, optimizer)] if is_watched else []

    def step(model, optimizer):
        return make_step(model, optimizer, loss_of=fails)

    wrap, every_second = functools.partial(fsdp, inner=["first"]), Events.ITERATION_STARTED(every=2)
    run = train(Net, wrap, rank, make_batches(6), monitors, step=step, event=every_second)
    return {"weights": {name: whole(item) for name, item in run.model.state_dict().items()}}


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
    "ddp": functools.partial(replayed, ddp),
    "views": functools.partial(replayed, functools.partial(ddp, gradient_as_bucket_view=True)),
    "static": functools.partial(replayed, functools.partial(ddp, static_graph=True)),
    "fsdp": functools.partial(replayed, functools.partial(fsdp, inner=["first"]), make=Net),
}
SCENARIOS: dict[str, Any] = {}
for name, scenario in WRAPS.items():
    SCENARIOS[name] = functools.partial(scenario, is_watched=True)
    SCENARIOS[f"{name}, alone"] = functools.partial(scenario, is_watched=False)
    SCENARIOS[f"{name}, faulty"] = functools.partial(scenario, is_watched=True, faulty=1)
SCENARIOS |= {"drift": drift, "interrupted": interrupted}
SCENARIOS["interrupted, alone"] = functools.partial(interrupted, is_watched=False)


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


def test_a_second_pass_that_fails_leaves_the_parameters_sharded(results):
    for actual, expected in zip(results("interrupted"), results("interrupted, alone"), strict=True):
        assert_same(actual["weights"], expected["weights"])


def test_a_drift_is_detected_on_both_ranks_alike(results):
    first, second = results("drift")
    assert len(first["detected"]) == 1
    assert same(first, second)


if __name__ == "__main__":
    run_scenarios(SCENARIOS)
