"""A rank that fails, lags or leaves does not leave the other one hanging in a monitor's collective."""

from __future__ import annotations

import datetime
import functools
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ignite_monitor import (
    ActivationHandler,
    GradMonitor,
    OptimizerStateHandler,
    RCCHandler,
    ReplicaCheckHandler,
    SpectralNormHandler,
    StepStatsHandler,
    WeightUpdateHandler,
)
from ignite_monitor.scaling import AlignmentHandler
from tests._helpers import footprint, hooks_only, make_batches, make_step, mse_loss
from tests._models import make_mlp
from tests._ranks import SHARDS, ddp, fsdp, inner_of, run_scenarios, train

COUNT, FAILS = 6, 3


dense = functools.partial(make_mlp, sizes=(6, 8, 3), activation=nn.ReLU)
WRAPS = {"ddp": ddp, "fsdp": functools.partial(fsdp, inner=["0"])}


def all_monitors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    own: Any = {"mean": True, "own": torch.abs}
    return {
        "grad": GradMonitor(model, optimizer, on_spike="skip"),
        "update": WeightUpdateHandler(model, optimizer),
        "activation": ActivationHandler(model, activations=own, gradients=own, parameters=own),
        "optimizer": OptimizerStateHandler(model, optimizer),
        "replicas": ReplicaCheckHandler(model, optimizer),
        "rcc": RCCHandler(model, reference=dense()),
        "alignment": AlignmentHandler(model, reference=dense()),
        "spectral": SpectralNormHandler(model, updates=True),
        "step": StepStatsHandler(model, optimizer),
    }


# A rank that fails


def failing(wrap: Callable[[Any], Any], where: str, rank: int) -> dict[str, Any]:
    """Train; in the third iteration the second rank does what it should not, and leaves.

    Args:
        wrap: shares the model among ranks.
        where: where it happens.
        rank: this rank.
    """
    engines: list[Engine] = []
    before: list[dict[str, Any]] = []
    footprints: list[Callable[[], dict[str, Any]]] = []

    def fail(current: str) -> None:
        (engine,) = engines
        if current != where or engine.state.iteration != FAILS:
            return
        if rank == 0:  # what it waits for never comes
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=0.5))
        elif where == "terminate":
            engine.terminate()
        else:
            raise RuntimeError(f"rank {rank} failed: {current}")

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = mse_loss(model, batch)
        fail("before backward")
        return loss

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Engine, Any], Any]:
        train_step = make_step(model, optimizer, loss_of=loss_of, after_backward=lambda _: fail("after backward"))
        return lambda engine, batch: (train_step(engine, batch), fail("terminate"))

    def monitors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        def note(engine: Engine) -> None:
            mse_loss(model, (torch.ones(2, 6), torch.ones(2, 3))).backward()  # fully_shard puts on hooks of its own
            footprints.append(lambda: hooks_only(footprint(engine, model, optimizer)))
            before.append(footprints[0]())

        failing_handler = lambda engine: engine.add_event_handler(  # noqa: E731
            Events.ITERATION_COMPLETED, lambda _: fail("handler")
        )
        return [engines.append, failing_handler, *all_monitors(model, optimizer).values(), note]

    ended, message = None, ""
    try:
        train(dense, wrap, rank, make_batches(COUNT), monitors, step=step)
    except Exception as raised:
        if not footprints:
            raise
        ended, message = type(raised).__name__, str(raised)
    after, state = footprints[0](), engines[0].state
    return {
        "ended": ended,
        "message": message,
        "iteration": state.iteration,
        "published": {name: float(value) for name, value in state.metrics.items() if not name.startswith("step/")},
        "left": [kind for kind, value in before[0].items() if value != after[kind]],
    }


# Collectives that only some ranks reach


def collectives() -> int:
    """Count the collectives of this process, including those of DistributedDataParallel and Ignite."""
    return sum(group._get_sequence_number_for_group() for group in dist.distributed_c10d._world.pg_map)


def counted_in_each_iteration(
    wrap: Callable[[Any], Any], rank: int, monitors: Callable[[Any, Any], dict[str, Any]], step: Any, logs: bool = False
) -> dict[str, list[int]]:
    """Count the collectives from the end of one iteration to the end of the next, with monitors and without."""

    def count(monitored: bool) -> list[int]:
        named: dict[str, Any] = {}
        counts: list[int] = []

        def finish() -> None:
            for monitor in named.values() if logs else ():
                monitor.on_host()
                monitor.state_dict()
            if logs and named:
                _ = named["update"].diagnostics
            counts.append(collectives())

        def attached(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
            named.update(monitors(model, optimizer) if monitored else {})
            return [*named.values(), lambda engine: engine.add_event_handler(Events.ITERATION_COMPLETED, finish)]

        train(dense, wrap, rank, make_batches(COUNT), attached, step=step)
        return [now - before for before, now in itertools.pairwise(counts)]

    return {"monitored": count(True), "plain": count(False)}


def conditional(wrap: Callable[[Any], Any], what: str, rank: int) -> dict[str, Any]:
    """Train with two micro-batches to an iteration; the second rank does something else in every other one.

    Args:
        wrap: shares the model among ranks.
        what: what it does.
        rank: this rank.
    """

    def step(model: Any, optimizer: torch.optim.Optimizer) -> Callable[[Engine, Any], Any]:
        def train_step(engine: Engine, batch: Any) -> None:
            differs = rank == 1 and engine.state.iteration % 2 == 0
            optimizer.zero_grad()
            x, y = batch
            if what in ("micro-batch", "backward"):
                with model.no_sync():
                    if not (differs and what == "micro-batch"):
                        output = model(x[:2])
                        if not (differs and what == "backward"):
                            F.mse_loss(output, y[:2]).backward()
            F.mse_loss(model(x[2:]), y[2:]).backward()
            if what == "evaluates" and differs:
                model.eval()
                with torch.no_grad():
                    inner_of(model)(x)
                model.train()
            if not (differs and what == "step"):
                optimizer.step()

        def train_step_without_reduction(engine: Engine, batch: Any) -> None:
            """Two iterations to a step, of the first of which one rank leaves everything out."""
            if engine.state.iteration % 2 == 0:
                mse_loss(model, batch).backward()
                optimizer.step()
                return
            optimizer.zero_grad()
            with model.no_sync():
                if rank == 0 or engine.state.iteration < 4:  # DDP itself communicates in its first forward passes
                    mse_loss(model, batch).backward()

        return train_step_without_reduction if what == "iteration" else train_step

    return counted_in_each_iteration(wrap, rank, all_monitors, step, logs=what == "logs" and rank == 1)


def uneven_inputs(rank: int) -> dict[str, Any]:
    """DistributedDataParallel.join(): a rank that has run out of data shadows the collectives of the others."""
    monitors = lambda model, optimizer: [*all_monitors(model, optimizer).values()]  # noqa: E731
    data = make_batches(COUNT)[: 3 + 2 * rank]
    rows = train(dense, ddp, rank, data, monitors, around=DistributedDataParallel.join).rows
    return {"published": [sorted({name.split("/")[0] for name in row if "/" in name}) for row in rows]}


PLACES = {"ddp": ("after backward", "terminate", "before backward"), "fsdp": ("handler",)}
if not SHARDS:  # in torch 2.6 the timeout of a group can't be changed, so that a rank would wait for minutes
    PLACES = {}
FAILING = {
    f"{world} {place}": functools.partial(failing, WRAPS[world], place)
    for world, places in PLACES.items()
    for place in places
}
CONDITIONAL = {
    f"{world} {what}": functools.partial(conditional, WRAPS[world], what)
    for world, does in {
        "ddp": ("micro-batch", "backward", "iteration", "evaluates", "step", "logs"),
        "fsdp": ("step", "logs"),
    }.items()
    for what in does
}
SCENARIOS: dict[str, Callable[[int], dict[str, Any]]] = FAILING | CONDITIONAL | {"uneven inputs": uneven_inputs}
APART = FAILING
# Here the rank that has failed does not leave: the other one has to wait for the timeout.
STAYS = ["ddp before backward"]


@pytest.mark.parametrize("name", FAILING)
def test_the_other_rank_ends_with_an_error_and_nothing_is_left_on_either(results, name):
    """Within the time that the process group gives a collective: a rank waits for nothing else."""
    waiting, failed = results(name)
    assert waiting["ended"] == "RuntimeError"  # of the collective that the other one did not come to
    if "terminate" in name:
        assert failed["ended"] is None
    else:
        assert f"rank 1 failed: {name.partition(' ')[2]}" in failed["message"]
    assert failed["iteration"] == FAILS
    assert waiting["iteration"] in (FAILS, FAILS + 1)
    assert waiting["left"] == failed["left"] == []


@pytest.mark.parametrize("name", CONDITIONAL)
def test_no_collective_is_added_where_only_some_ranks_come(results, name):
    """In every iteration, a monitor makes the same number of collectives on both ranks."""
    first, second = results(name)
    assert first == second
    added = {with_them - without for with_them, without in zip(first["monitored"], first["plain"], strict=True)}
    assert 0 < max(added) <= min(added) + 4  # where the replica check names what differs


def test_ranks_that_have_run_out_of_data_delay_no_rank(results):
    families = ["grad", "gradient", "monitor", "parameter", "spectral", "step"]
    assert [result["published"] for result in results("uneven inputs")] == [[families] * 3, [families] * 5]


if __name__ == "__main__":
    logging.disable(logging.ERROR)  # of Ignite, that a run has failed
    run_scenarios(SCENARIOS, left_standing=APART, stays=STAYS)
