"""Every monitor on real models: training is bitwise as without monitors, a few numbers are those of float64.

``make compatibility`` runs it in an environment of its own, prints what was checked, and writes docs/compatibility.md.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests._helpers import assert_same
from tests._truth import Values, norm, statistics_of_step, updates
from tests.compatibility._cases import CASES
from tests.compatibility._training import RATE, Monitored, Recorded, count_items

pytestmark = [pytest.mark.compatibility, pytest.mark.filterwarnings("ignore")]

# What is published of every model, whatever it is made of.
FAMILIES = {"grad", "loss", "loss_record", "rollback", "noise_scale", "monitor", "optimizer", "replicas", "histograms"}
FAMILIES |= {"activation", "gradient", "parameter", "rcc", "spectral", "step"}


def loads(tokens: dict[str, Tensor]) -> Values:
    """Compute the loads of RoutingHandler from the number of tokens of every expert."""
    values: Values = {}
    for router, counts in tokens.items():
        shares = [count / float(counts.sum()) for count in counts.tolist()]
        entropy = -sum(share * math.log(share) for share in shares if share)
        values[f"routing/load_entropy/{router}"] = math.exp(entropy) / len(shares)
        values[f"routing/max_share/{router}"] = max(shares)
        values[f"routing/dead_share/{router}"] = shares.count(0) / len(shares)
    return values


def expected(recorded: Recorded, losses: list[float]) -> list[Values]:
    every = []
    moved = updates(recorded.iterations, recorded.held)
    for iteration, loss, of_updates, tokens in zip(recorded.iterations, losses, moved, recorded.tokens, strict=True):
        values = {"grad/norm": norm(iteration.gradients.values()), "grad/stepped": 1.0, "grad/spike_count": 0.0}
        values |= {"loss/value": loss, "noise_scale/batch": float(count_items(iteration.x)), "replicas/in_sync": 1.0}
        values |= {"replay/reproducible": 1.0, "drift/drift": 0.0}
        every.append(values | of_updates | statistics_of_step(iteration.after.values(), RATE) | loads(tokens))
    return every


@pytest.mark.parametrize("name", CASES)
def test_every_monitor(name, record_property, tmp_path):
    case = CASES[name]
    pytest.importorskip(case.library)
    monitored, recorded = Monitored(case, tmp_path), Recorded(case)
    actual, references = monitored.run(), recorded.run()
    assert_same(actual, references)
    frozen = any(not parameter.requires_grad for parameter in recorded.model.parameters())
    kinds = [finding.kind for finding in monitored.setup_check.findings]
    assert kinds == ["requires_grad_false"] * frozen
    saved = torch.load(monitored.checkpoint.last_checkpoint, weights_only=True)
    assert_same(saved, {name: references[name] for name in ("model", "optimizer")})
    row = {"name": name, "parameters": sum(p.numel() for p in recorded.model.parameters())}
    row |= {"published": sum(map(len, monitored.published)), "compared": 0, "heads": 0}
    for values, truth in zip(monitored.published, expected(recorded, references["losses"]), strict=True):
        assert {key: values.get(key) for key in truth} == pytest.approx(truth, rel=1e-5, abs=1e-7)
        row["compared"] += len(truth)
        row["heads"] += sum(key.startswith("attention_entropy/") for key in values)
    expected_families = FAMILIES - ({"rcc"} if case.library == "torch_geometric" else set())
    assert {key.partition("/")[0] for values in monitored.published for key in values} >= expected_families
    assert all(recorded.tokens) is case.has_routers
    record_property("model", row)
