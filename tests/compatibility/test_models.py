"""Every monitor on real models: training to the last bit as without, every number as float64 says.

``make compatibility`` runs it in an environment of its own, prints what was checked, and writes docs/compatibility.md.
"""

from __future__ import annotations

import importlib
from collections import Counter

import pytest

from tests._helpers import same
from tests.compatibility._attention import heads
from tests.compatibility._cases import CASES
from tests.compatibility._expected import expected, summaries
from tests.compatibility._training import Monitored, Recorded
from tests.stress._truth import Values

pytestmark = [pytest.mark.compatibility, pytest.mark.filterwarnings("ignore")]

# What clocks and operating systems say, and bounds.
UNCHECKED = ("_ms", "items_per_s", "data_wait_share", "memory_mb", "error_max", "_error", "spectral/iterations")
UNCHECKED += ("histograms/activations_count", "histograms/gradients_count")
MAY_BE_ABSENT = ("rcc/", "alignment/", "curvature/", "noise_scale/")


def changed_little(layer: str, truth: Values) -> bool:
    """Whether a layer's output has changed by little more than rounding."""
    return truth[f"rcc/output_change/{layer}"] < 1e-4


def tolerance(name: str, truth: Values, said: Values) -> tuple[float, float]:
    """Relative and absolute: those of float32 numbers of the size of what is subtracted."""
    if name in ("noise_scale/low", "noise_scale/high"):
        return 0.1, 0.0  # Student's distribution is a series there
    if name.startswith("curvature/along_gradient"):
        return 0.02, 0.0  # of MNASNet, whose norms divide by next to nothing; of the others 1e-3
    if name.startswith("curvature/hessian_max_eigenvalue"):
        return said[f"{name}_error"] + 0.01, 0.0
    if name.startswith("rcc/"):
        layer = name.partition("/")[2].partition("/")[2]
        size = truth.get(f"rcc/input/{layer}", 1.0)
        return 2e-4, 1e-5 * max(1.0, size) if "weight_share" not in name else 1e-2
    if name.startswith("alignment/"):
        return 1e-3, 5e-3
    if "_difference/" in name:
        return 1e-5, 5e-6
    if name in ("grad/std", "grad/mean", "grad/threshold"):
        return 1e-5, 1e-6 * truth["grad/norm"]
    return 1e-5, 1e-7


@pytest.mark.parametrize("name", CASES)
def test_every_monitor(name, record_property, tmp_path):
    case = CASES[name]
    pytest.importorskip(case.library)
    if name == "torchvision FasterRCNN" and not importlib.import_module("torchvision.extension")._has_ops():
        pytest.skip("torchvision's own operators are of another torch")
    monitored, recorded = Monitored(case, tmp_path), Recorded(case)
    ours, theirs = monitored.run(), recorded.run()
    for part in theirs:
        assert same(ours[part], theirs[part]), f"{part} is not what it is without monitors"
    counts: Counter[str] = Counter()
    absent: set[str] = set()
    wrong = []
    every = zip(monitored.published, expected(recorded), recorded.iterations, strict=True)
    for place, (said, truth, iteration) in enumerate(every, start=1):
        said = {key: value for key, value in said.items() if not key.endswith(UNCHECKED) and "/topk" not in key}
        modules = {key.split("/")[1] for key in said if key.startswith("attention_entropy/")}
        truth |= summaries(said, truth) | (heads(recorded.initial, iteration, modules) if modules else {})
        for key, value in said.items():
            family = key.partition("/")[0]
            if key not in truth:
                wrong.append(f"iteration {place}: {key} = {value} is not expected")
                continue
            layer = key.partition("/")[2].partition("/")[2]
            if key.startswith("rcc/weight_share/") and changed_little(layer, truth):
                continue  # a share of rounding
            rel, least = tolerance(key, truth, monitored.published[place - 1])
            if value != pytest.approx(truth[key], rel=rel, abs=least):
                wrong.append(f"iteration {place}: {key} = {value}, but {truth[key]}")
            counts[family] += 1
        lacking = truth.keys() - said.keys()
        counts["absent"] += len({key for key in lacking if key.startswith(MAY_BE_ABSENT)})
        absent |= {key for key in lacking if not key.startswith(MAY_BE_ABSENT)}
    record_property("zoo", {"name": name, "parameters": sum(p.numel() for p in recorded.model.parameters()), **counts})
    assert not wrong, f"{len(wrong)} of {sum(counts.values())}:\n" + "\n".join(wrong[:20])
    assert not absent, sorted(absent)[:20]
