"""Every monitor on real models: training to the last bit as without, every number as float64 says.

``make zoo`` runs it in an environment of its own, prints what was checked, and writes docs/zoo.md.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ignite_monitor.model.names import tags
from tests._helpers import same
from tests.hard_use._truth import norm
from tests.zoo._cases import CASES
from tests.zoo._training import RATE, Monitored, Recorded
from tests.zoo._truth import Truth, call

pytestmark = [pytest.mark.zoo, pytest.mark.filterwarnings("ignore")]

# What clocks and operating systems say, bounds, and what the handlers' own tests look at more closely.
UNCHECKED = ("_ms", "items_per_s", "data_wait_share", "memory_mb", "error_max", "spectral/iterations")
SUMMARIES = {
    "rcc": (("weight_update", "input_drift"), ("max", "median")),
    "alignment": (("z0_dW", "dZ_w0", "dZ_dW"), ("mean", "min", "max")),
}


def expected(recorded: Recorded) -> list[tuple[Truth, dict[str, float]]]:
    every, still, norms = [], {}, []
    for iteration in recorded.iterations:
        truth = Truth(recorded.initial, iteration, recorded.held)
        norms.append(norm(list(iteration.gradients.values())))
        values = {"grad/norm": norms[-1], "grad/stepped": 1.0}
        values |= {f"grad/{name}": 0.0 for name in ("spike", "spike_count", "spike_score", "skipped_count")}
        values |= {"grad/nonfinite_count": 0.0}
        values |= statistics_before(norms)
        for part in (truth.update(still, 5), truth.activations(), truth.rcc(), truth.spectral(), truth.alignment()):
            values |= part
        values |= truth.stats(RATE)
        every.append((truth, values))
    return every


def statistics_before(norms: list[float], decay: float = 0.99) -> dict[str, float]:
    """Mean and deviation of the norms before the last one, newer ones weighing more."""
    past = norms[:-1]
    weights = [decay**i for i in range(len(past))][::-1]
    total = sum(weights)
    if not past:
        return {}
    mean = sum(w * x for w, x in zip(weights, past, strict=True)) / total
    if len(past) < 2:
        return {"grad/mean": mean}
    spread = sum(w * (x - mean) ** 2 for w, x in zip(weights, past, strict=True))
    return {"grad/mean": mean, "grad/std": math.sqrt(spread / (total - sum(w * w for w in weights) / total))}


def summaries(said: dict[str, float], truth: dict[str, float]) -> dict[str, float]:
    """Largest, mean, … over those layers that are published."""
    found = {}
    for family, (metrics, kinds) in SUMMARIES.items():
        for metric in metrics:
            start = f"{family}/{metric}/"
            names = [name for name in said if name.startswith(start)]
            names = [name for name in names if name.removesuffix(".weight") not in {*names} - {name}]
            values = sorted(truth[name] for name in names if name in truth)
            if values:
                half = len(values) // 2
                median = (values[half] + values[-half - 1]) / 2
                each = {"max": values[-1], "min": values[0], "mean": sum(values) / len(values), "median": median}
                found |= {f"{family}/{metric}_{kind}": value for kind, value in each.items() if kind in kinds}
    return found


def changed_little(layer: str, truth: dict[str, float]) -> bool:
    """Whether a layer's output has changed by little more than rounding."""
    return truth[f"rcc/output_change/{layer}"] < 1e-4


def tolerance(name: str, truth: dict[str, float]) -> tuple[float, float]:
    """Relative and absolute: those of float32 numbers of the size of what is subtracted."""
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


def entropies(recorded: Recorded, place: int, modules: set[str]) -> dict[str, float]:
    """Of the probabilities that the eager implementation of a model's attention gives, in float64."""
    iteration = recorded.iterations[place]
    model = copy.deepcopy(recorded.initial)
    if hasattr(model, "config"):
        model.set_attn_implementation("eager")
        model.config._experts_implementation = "eager"  # the others know no float64
    model.load_state_dict({**model.state_dict(), **iteration.weights})
    model.double()
    names = list(dict(model.named_modules()))
    names = dict(zip(names, tags(name or "_root_" for name in names), strict=True))
    found: dict[str, list[Tensor]] = {}

    def keep(name: str, probabilities: Tensor) -> None:
        found.setdefault(names[name], []).append(torch.special.entr(probabilities).sum(-1).mean((0, 2)))

    for name, module in model.named_modules():
        if names[name] not in modules:
            continue
        if hasattr(module, "fused_attn"):  # timm's
            module.fused_attn = False
            module.attn_drop.register_forward_pre_hook(lambda _, args, name=name: keep(name, args[0]))
        elif isinstance(module, nn.MultiheadAttention):
            module.register_forward_pre_hook(
                lambda _, args, kwargs: (args, kwargs | {"need_weights": True, "average_attn_weights": False}),
                with_kwargs=True,
            )
            module.register_forward_hook(lambda _, args, output, name=name: keep(name, output[1]))
        else:
            module.register_forward_hook(lambda _, args, output, name=name: keep(name, probabilities_in(output)))
    with torch.no_grad():
        call(model, doubled(iteration.x))
    return {
        f"attention_entropy/{tag}/head_{head}": float(value)
        for tag, calls in found.items()
        for head, value in enumerate(torch.stack(calls).mean(0))
    }


def probabilities_in(output: Any) -> Tensor:
    """Of shape (batch, heads, queries, keys), as a module of transformers returns them beside its output."""
    (found,) = [each for each in output if isinstance(each, Tensor) and each.ndim == 4 and is_distribution(each)]
    return found


def is_distribution(rows: Tensor) -> bool:
    return bool((rows >= 0).all()) and torch.allclose(rows.sum(-1), torch.ones(rows.shape[:-1], dtype=rows.dtype))


def doubled(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.double() if batch.is_floating_point() else batch
    if isinstance(batch, dict):
        return {key: doubled(each) for key, each in batch.items()}
    return [doubled(each) for each in batch] if isinstance(batch, list) else batch


@pytest.mark.parametrize("name", CASES)
def test_every_monitor(name, record_property):
    case = CASES[name]
    pytest.importorskip(case.library)
    if name == "torchvision FasterRCNN" and not importlib.import_module("torchvision.extension")._has_ops():
        pytest.skip("torchvision's own operators are of another torch")
    monitored, recorded = Monitored(case), Recorded(case)
    ours, theirs = monitored.run(), recorded.run()
    for part in theirs:
        assert same(ours[part], theirs[part]), f"{part} is not what it is without monitors"
    counts: Counter[str] = Counter()
    absent: set[str] = set()
    wrong = []
    for place, (said, (_, truth)) in enumerate(zip(monitored.published, expected(recorded), strict=True)):
        said = {key: value for key, value in said.items() if not key.endswith(UNCHECKED) and "/topk" not in key}
        heads = {key for key in said if key.startswith("attention_entropy/")}
        said = {key: value for key, value in said.items() if not key.startswith("attention_logit_max/")}
        modules = {key.split("/")[1] for key in heads}
        truth |= summaries(said, truth)
        truth |= entropies(recorded, place, modules) if heads else {}
        for key, value in said.items():
            if "/head_" in key and not key.startswith("attention_entropy/"):
                continue  # of what attention is computed from: the metric's own tests
            family = key.partition("/")[0]
            if key not in truth:
                wrong.append(f"iteration {place + 1}: {key} = {value} is not expected")
                continue
            layer = key.partition("/")[2].partition("/")[2]
            if key.startswith("rcc/weight_share/") and changed_little(layer, truth):
                continue  # a share of rounding
            rel, least = tolerance(key, truth)
            if value != pytest.approx(truth[key], rel=rel, abs=least):
                wrong.append(f"iteration {place + 1}: {key} = {value}, but {truth[key]}")
            counts[family] += 1
        absent |= {key for key in truth.keys() - said.keys() if not key.startswith(("rcc/", "alignment/"))}
        counts["absent"] += len({key for key in truth.keys() - said.keys() if key.startswith(("rcc/", "alignment/"))})
    record_property("zoo", {"name": name, "parameters": sum(p.numel() for p in recorded.model.parameters()), **counts})
    assert not wrong, f"{len(wrong)} of {sum(counts.values())}:\n" + "\n".join(wrong[:20])
    assert not absent, sorted(absent)[:20]
