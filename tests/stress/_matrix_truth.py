"""What monitors should have published of a run, in float64 and Python, from what the train step has kept of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests._helpers import assert_same
from tests._judge import Judge, mean_std
from tests._trainers import norm_of
from tests.stress import _truth
from tests.stress._matrix import RULE, Case, net, optimizers_of

SKIPPED = "skipped_count"
# Known to be right by tests of their own; here it is enough that they are there.
OF_THE_MACHINE = {
    "step/data_wait_ms",
    "step/data_wait_share",
    "step/time_ms",
    "step/items_per_s",
    "step/peak_memory_mb",
    "step/resident_memory_mb",
}
# The numbers of passes are those of unit tests; here it is enough that ranks agree on them.
BY_THEMSELVES = ("activation/", "gradient/", "gradient_after_clip/", "parameter/", "rcc/")
BOUNDS = {"spectral/error_max", "spectral/update_error_max", "spectral/iterations"}
SPECTRAL = 2e-3  # what a norm may be off by, which its own error bound says too


def compare(case: Case, results: list[dict[str, Any]]) -> None:
    """Compare each rank's run with its twin without monitors, and its numbers with the truth."""
    for result in results:
        assert_same(result["state"], result["twin"])
    check(case, results)


def check(case: Case, results: list[dict[str, Any]]) -> None:
    """Compare a run's numbers with the truth.

    Args:
        case: how was trained.
        results: of each rank.
    """
    truth = Truth(case)
    for i in range(len(results[0]["facts"])):
        expected = truth.of_iteration([result["facts"][i] for result in results])
        for rank, result in enumerate(results):
            where = f"iteration {i + 1}, rank {rank}"
            published = dict(result["published"][i])
            fact = result["facts"][i]
            assert fact["flags"] == truth.flags, where
            missing, unexpected = expected.keys() - published.keys(), published.keys() - expected.keys()
            assert not missing, (where, sorted(missing))
            others = {name for name in unexpected if name.startswith(BY_THEMSELVES)}
            assert unexpected <= OF_THE_MACHINE | BOUNDS | others, (where, sorted(unexpected))
            assert bool(others) is fact["looked at"], where
            for name in others:  # averages over all ranks
                assert published[name] == results[0]["published"][i][name], (where, name)
            assert unexpected >= OF_THE_MACHINE, where
            for name, value in expected.items():
                assert published[name] == _close(name, value), (where, name)


def _close(name: str, value: float) -> Any:
    if math.isnan(value):
        return pytest.approx(value, nan_ok=True)
    if name.startswith("spectral/"):
        return pytest.approx(value, rel=SPECTRAL)
    # A mean of what nearly cancels is as good as the float32 numbers it is of.
    return pytest.approx(value, rel=1e-4 if "std" in name or "threshold" in name else 1e-5, abs=1e-7)


class Truth:
    """What there is to be published, iteration after iteration.

    Args:
        case: how is trained.

    Attributes:
        flags: of the last iteration: prefix -> whether the gradient is a spike.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self._optimizers = optimizers_of(case, dict(net().named_parameters()))
        self._judges = {prefix: Judge(mean_std(**RULE, decay=0.99)) for prefix in self._optimizers}
        self._counts = {prefix: dict.fromkeys(("spike", "skipped", "nonfinite"), 0) for prefix in self._optimizers}
        self.flags: dict[str, bool] = {}

    def of_iteration(self, facts: list[dict[str, Any]]) -> dict[str, float]:
        """All values by name.

        Args:
            facts: what each rank's train step has kept.
        """
        fact = facts[0]  # what there is of parameters is whole on every rank
        values: dict[str, float] = {}
        made: set[str] = set()  # parameters for which a step was made
        self.flags = dict.fromkeys(self._optimizers, False)
        for prefix, (_, names) in self._optimizers.items():
            if fact["gradients"]:
                values |= self._judged(prefix, fact)
            if fact["steps"]:
                overflow = self._overflows(prefix, fact)
                made.update([] if overflow or (self.case.skip and self.flags[prefix]) else names)
        values |= self._updates(fact, made) | self._spectra(fact, made)
        values |= self._step(fact)
        return values

    def _overflows(self, prefix: str, fact: dict[str, Any]) -> bool:
        gradients = [fact["gradients"][name] for name in self._optimizers[prefix][1]]
        return self.case.precision == "scaler" and not math.isfinite(norm_of(gradients))

    def _judged(self, prefix: str, fact: dict[str, Any]) -> dict[str, float]:
        """One norm enters the statistics per step; what is still accumulating is judged, and does not enter.

        That is published only where it is flagged, or not finite.
        """
        norm = norm_of(fact["gradients"][name] for name in self._optimizers[prefix][1])
        judge, counts = self._judges[prefix], self._counts[prefix]
        if not fact["steps"]:
            judge, counts = judge.copy(), dict(counts)
        values = judge.expect(norm)
        overflow = not math.isfinite(norm)
        if overflow and self.case.precision == "scaler":
            values["spike"] = 0.0
        self.flags[prefix] = values["spike"] == 1
        counts["spike"] += self.flags[prefix]
        counts["nonfinite"] += overflow
        skipped = fact["steps"] and self.case.skip and self.flags[prefix]
        counts["skipped"] += skipped
        if not (fact["steps"] or self.flags[prefix] or overflow):
            return {f"{prefix}/stepped": 0.0}
        values["stepped"] = float(fact["steps"] and not skipped and not (overflow and self.case.precision == "scaler"))
        values |= {"norm": norm} | {f"{name}_count": float(counts[name]) for name in ("spike", "nonfinite", "skipped")}
        if self.case.precision == "scaler":
            values["scale"] = fact["scale"]
        return {f"{prefix}/{name}": value for name, value in values.items()}

    def _updates(self, fact: dict[str, Any], made: set[str]) -> dict[str, float]:
        norms = {name: norm_of([item]) for name, item in fact["gradients"].items()}
        if self.case.precision == "scaler":  # which looks after overflows
            norms = {name: norm for name, norm in norms.items() if math.isfinite(norm)}
        gradients = {name: fact["gradients"][name] for name in norms}
        of_gradients = truth_of(fact, gradients, set(fact["before"])).update({})
        values = {name: value for name, value in of_gradients.items() if "update" not in name and "frozen" not in name}
        if made:
            of_updates = truth_of(fact, fact["gradients"], made).update({})
            values |= {name: value for name, value in of_updates.items() if "update" in name or "frozen" in name}
        if fact["gradients"]:
            values |= {"monitor/vanishing_count": 0.0, "monitor/exploding_count": 0.0} | values
            largest = sorted(norms, key=lambda name: -norms[name])[:5]
            values |= {f"monitor/topk_grad/{name}": norms[name] for name in largest}
        return values

    def _spectra(self, fact: dict[str, Any], made: set[str]) -> dict[str, float]:
        values = truth_of(fact, fact["gradients"] if made else {}, made).spectral()
        norms = {name: value for name, value in values.items() if name.startswith("spectral/norm/")}
        return values | {name.replace("/norm/", "/topk/"): value for name, value in norms.items()}

    def _step(self, fact: dict[str, Any]) -> dict[str, float]:
        rates = [group["lr"] for group in self._optimizers["grad"][0].param_groups]
        return {f"step/lr/group_{i}": rate for i, rate in enumerate(rates)} | {
            "step/parameter_norm": norm_of(fact["after"].values())
        }


def truth_of(fact: dict[str, Any], gradients: dict[str, Tensor], held: set[str]) -> _truth.Truth:
    """The truth of one iteration with these gradients and parameters of the optimizer."""
    iteration = _truth.Iteration(torch.tensor(0), torch.tensor(0), fact["before"], {}, gradients, fact["after"])
    return _truth.Truth(net(), iteration, held)
