"""One bit of difference between two ranks is found at once and named; equal ranks are in sync."""

from __future__ import annotations

import functools
import logging
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ignite.engine import Engine
from torch import Tensor, nn

from ignite_monitor import ReplicaCheckHandler
from tests._helpers import make_batches, make_step
from tests._models import Net
from tests._ranks import WORLD, ddp, fsdp, run_scenarios, train

CHECKS = 10_000 if os.environ.get("FULL_MATRIX", "0") != "0" else 150
AT = 4  # the iteration before which something is changed
COUNT = 6


def net_with_table() -> nn.Module:
    model = Net(norm=nn.BatchNorm1d, dropout=0.1)
    model.register_buffer("table", torch.arange(5.0), persistent=False)
    return model


fsdp_net = functools.partial(fsdp, inner=["first"])
hybrid = functools.partial(fsdp_net, shape=(WORLD, 1))


def checked(
    wrap: Callable[[Any], Any],
    rank: int,
    change: Callable[..., None] | None = None,
    count: int = COUNT,
    seeds: bool = False,
    **arguments: Any,
) -> dict[str, Any]:
    """Train on other batches on every rank; one of them changes something."""
    reported: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda entry: reported.append(entry.getMessage())  # type: ignore[method-assign]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Engine, Any], Any]:
        train_step = make_step(model, optimizer)

        def changing(engine: Engine, batch: Any) -> None:
            train_step(engine, batch)
            if change is not None and engine.state.iteration == AT and rank == 1:
                with torch.no_grad():
                    change(model, optimizer, engine)

        return changing

    def monitors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        torch.manual_seed(rank if seeds else 1)
        random.seed(1)
        np.random.seed(1)
        check = ReplicaCheckHandler(model, optimizer, **arguments)
        check.logger.addHandler(handler)
        return [check]

    run = train(net_with_table, wrap, rank, make_batches(count), monitors, optimizer=adamw, step=step)
    run.monitors[0].logger.removeHandler(handler)
    in_sync = [row.get("replicas/in_sync") for row in run.rows]
    return {"in_sync": in_sync, "warnings": reported, "all_reduces": run.all_reduces}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": model.parameters(), "note": "all"}], lr=1e-3)


def flip(tensor: Any) -> None:
    """The lowest bit of the last element."""
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    tensor.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)


def parameter(model: nn.Module, end: str) -> Tensor:
    return next(item for name, item in model.named_parameters() if name.endswith(end))


def exchange(model, optimizer, engine):
    weight = parameter(model, "first.weight")
    weight[0, 0], weight[3, 2] = weight[3, 2].clone(), weight[0, 0].clone()


class Broken(dict[str, Any]):
    """Optimizer state that raises an error whenever it is read by a check."""

    def items(self):
        raise RuntimeError("out of memory (a stand-in)")


def break_state(model, optimizer, engine):
    weight = parameter(model, "first.weight")
    optimizer.state[weight] = Broken(optimizer.state[weight])


# what is changed on the second rank -> how, and what the log has to name
CHANGES: dict[str, tuple[Callable[..., None], str]] = {
    "weight": (lambda m, o, e: flip(parameter(m, "first.weight")), "first.weight"),
    "bias": (lambda m, o, e: flip(parameter(m, "second.bias")), "second.bias"),
    "exchange": (exchange, "first.weight"),
    "doubled": (lambda m, o, e: parameter(m, "first.weight").mul_(2), "first.weight"),
    "buffer": (lambda m, o, e: flip(next(b for n, b in m.named_buffers() if n.endswith("table"))), "table"),
    "moment": (
        lambda m, o, e: flip(o.state[parameter(m, "second.weight")]["exp_avg_sq"]),
        "exp_avg_sq of second.weight in the optimizer",
    ),
    "step": (
        lambda m, o, e: o.state[parameter(m, "second.weight")]["step"].add_(1),
        "step of second.weight in the optimizer",
    ),
    "rate": (lambda m, o, e: o.param_groups[0].update(lr=2e-3), "lr of group 0 of the optimizer"),
    "lost": (lambda m, o, e: o.param_groups[0].pop("note"), "note of group 0 of the optimizer"),
    "new": (
        lambda m, o, e: m.register_buffer("new", torch.ones(2)),
        "new",
    ),
    "iteration": (lambda m, o, e: setattr(e.state, "epoch", 9), "the epoch"),
}
SCENARIOS: dict[str, Callable[[int], dict[str, Any]]] = {
    **{f"ddp {name}": functools.partial(checked, ddp, change=change) for name, (change, _) in CHANGES.items()},
    **{
        f"hybrid {name}": functools.partial(checked, hybrid, change=CHANGES[name][0])
        for name in ("weight", "moment", "buffer")
    },
    "ddp healthy": functools.partial(checked, ddp, count=CHECKS),
    "ddp seeds": functools.partial(checked, ddp, seeds=True),
    "ddp excluded": functools.partial(checked, ddp, change=CHANGES["weight"][0], exclude=r"^(module\.)?first\.weight"),
    "ddp error": functools.partial(checked, ddp, change=break_state),
    "hybrid healthy": functools.partial(checked, hybrid, count=CHECKS // 25),
    "fsdp healthy": functools.partial(checked, fsdp_net),
}


CHANGED = [name for name in SCENARIOS if name.split()[-1] in CHANGES]
HEALTHY = ["ddp healthy", "ddp seeds", "ddp excluded", "hybrid healthy", "fsdp healthy"]


@pytest.mark.parametrize("name", CHANGED)
def test_a_difference_is_found_at_the_next_check_and_named(results, name):
    named = CHANGES[name.split()[1]][1]
    for result in results(name):
        assert result["in_sync"][:AT] == [1.0] * (AT - 1) + [0.0]
        (warned, *_) = [message for message in result["warnings"] if " differed from " in message]
        assert warned.endswith(
            f"iteration {AT + 1}: in the last check ranks differed from the first one: rank 1 in {named}"
        )


@pytest.mark.parametrize("name", HEALTHY)
def test_without_a_difference_nothing_is_warned(results, name):
    """RNG state differs in one of them, and an excluded weight in another."""
    for result in results(name):
        assert result["in_sync"] == [1.0] * len(result["in_sync"])
        assert result["warnings"] == []


def test_an_error_on_one_rank_delays_no_rank_and_nothing_is_reported(results):
    for rank, result in enumerate(results("ddp error")):
        assert result["in_sync"] == [1.0] * (AT - 1) + [None] * (COUNT - AT + 1)
        assert len(result["warnings"]) == rank
        assert all("out of memory (a stand-in)" in message for message in result["warnings"])


@pytest.mark.parametrize(("name", "count"), [("ddp healthy", CHECKS), ("ddp weight", COUNT), ("fsdp healthy", COUNT)])
def test_two_collectives_in_a_check(results, name, count):
    for result in results(name):
        assert result["all_reduces"] == 2 * count


if __name__ == "__main__":
    run_scenarios(SCENARIOS)
