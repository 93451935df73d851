"""Faults that last longer than a batch: thirty iterations after them, training continues as if undisturbed.

By default every fault and every way of training is met once. With ``FULL_MATRIX=1`` in the environment each fault meets
each way, with skipped steps and without, from three seeds; healthy runs are longer and many then.
"""

from __future__ import annotations

import functools
import os

import pytest
import torch
from ignite.engine import Engine

from ignite_monitor import GradMonitor, RollbackHandler
from tests._helpers import assert_same
from tests._ranks import launched
from tests.rollback._faults import FAULTS, MODES, train

FULL = bool(int(os.environ.get("FULL_MATRIX", "0")))
CASES = (
    [(fault, mode, skip, seed) for mode in MODES for fault in FAULTS for skip in (False, True) for seed in range(3)]
    if FULL
    else [
        ("labels", "sgd", False, 0),
        ("labels", "amp", False, 0),
        ("lr x100", "adamw", True, 1),
        ("lr grows", "accumulation", True, 0),
        ("lr by hand", "adamw", True, 0),
        ("lr by hand", "sgd", False, 1),
        ("nan", "amp", True, 1),
    ]
)


@functools.cache
def undisturbed(mode, seed, fault):
    return train(mode, seed, length=FAULTS[fault], handler=False)["accuracy"]


@pytest.mark.parametrize(("fault", "mode", "skip_step", "seed"), CASES)
def test_training_comes_back(fault, mode, skip_step, seed):
    result = train(mode, seed, fault, skip_step=skip_step)
    assert result["rollbacks"] >= 1
    assert result["accuracy"] >= undisturbed(mode, seed, fault) - (0.04 if fault == "lr by hand" else 0.02)


@pytest.mark.parametrize("mode", ["sgd", "adamw"] if FULL else ["sgd"])
@pytest.mark.parametrize("seed", range(3) if FULL else [0])
def test_a_regime_change_ends_as_well_as_without(mode, seed):
    """Other labels from one iteration on are accepted once, and learnt as well by the end."""
    without = train(mode, seed, "labels", length=200, after=0, handler=False)
    result = train(mode, seed, "labels", length=200, after=0)
    assert result["rollbacks"] == 1
    assert result["discarded"] <= 20
    assert without["accuracy"] > 0.9
    assert result["accuracy"] >= without["accuracy"] - 0.02


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    names = [f"{kind} {how}" for kind in ("ddp", "fsdp") for how in ("request", "nan", "loss")]
    return launched("_worker", tmp_path_factory.mktemp("ranks"), names, package="tests.rollback")


@pytest.mark.parametrize("how", ["request", "nan", "loss"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_all_ranks_roll_back_if_one_diverges(kind, how, ranks):
    results = ranks(f"{kind} {how}")
    assert [result["at"] for result in results] == [29 if how == "loss" else 25] * 2
    assert [result["count"] for result in results] == [1, 1]
    for result in results:
        assert_same(result["state"], result["expected"])


@pytest.mark.parametrize("healthy", [{"size": 2}, {"size": 32, "peak_lr": 0.3}], ids=["batches of two", "one cycle"])
def test_healthy_runs_are_never_rolled_back(healthy):
    for seed in range(10 if FULL else 1):
        assert train("sgd", seed, after=1280 if FULL else 80, **healthy)["rollbacks"] == 0


@pytest.mark.parametrize("seed", [0, 1])
def test_a_policy_gradient_is_never_rolled_back(seed):
    """Its loss changes sign, and measures no progress: the run is that without handlers."""
    ends = []
    for handler in (False, True):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        states, good, baseline = torch.eye(8).repeat(4, 1), torch.arange(8).repeat(4), [0.0]

        def train_step(engine, batch):
            logs = model(states).log_softmax(-1)  # noqa: B023
            action = torch.multinomial(logs.exp(), 1)
            reward = (action[:, 0] == good).float()  # noqa: B023
            loss = -((reward - baseline[0]) * logs.gather(1, action)[:, 0]).mean()  # noqa: B023
            baseline[0] += 0.05 * (float(reward.mean()) - baseline[0])  # noqa: B023
            optimizer.zero_grad()  # noqa: B023
            loss.backward()
            optimizer.step()  # noqa: B023
            return loss.item()

        trainer = Engine(train_step)
        if handler:
            GradMonitor(model, optimizer).attach(trainer)
            RollbackHandler({"model": model, "optimizer": optimizer}).attach(trainer)
        trainer.run(range(600), max_epochs=1)
        ends.append([model.state_dict(), optimizer.state_dict()])
    assert_same(ends[1], ends[0])
