"""Built-in statistics against float64, in parts and in one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ignite_monitor.activation import observations
from ignite_monitor.activation.measurement import Measurement
from ignite_monitor.activation.metric import MetricSet
from ignite_monitor.activation.observations import Observations, statistics_of
from ignite_monitor.activation.statistics import STATISTICS


def expected(parts: list[Tensor]) -> dict[str, float]:
    """In float64, of all elements at once; units of equal number are the same units in every part."""
    parts = [part.double() for part in parts]
    flat = torch.cat([part.flatten() for part in parts])
    vectors = torch.cat([part.reshape(-1, part.shape[-1] if part.ndim else 1).pow(2).sum(1).sqrt() for part in parts])
    dead: dict[int, Tensor] = {}
    for part in parts:
        if part.ndim > 1:
            by_unit = part.movedim(1 if part.ndim > 3 else -1, 0).flatten(1)
            alive = (by_unit != 0).any(1)
            dead[len(alive)] = dead.get(len(alive), torch.ones(len(alive), dtype=torch.bool)) & ~alive
    return {
        "mean": flat.mean().item(),
        "std": flat.std().item() if len(flat) > 1 else math.nan,
        "l2_norm": vectors.mean().item(),
        "max_abs": flat.abs().max().item(),
        "dead_fraction": torch.cat([*dead.values()]).double().mean().item() if dead else math.nan,
        "nonfinite_count": 0.0,
    }


def observed(parts: dict[str, list[Tensor]], **kwargs) -> dict[str, dict[str, float]]:
    seen = Observations(**kwargs)
    for i in range(max(map(len, parts.values()))):
        for name, tensors in parts.items():
            if i < len(tensors):
                seen.add(name, tensors[i])
        seen.flush()
    return by_name(seen)


def by_name(seen: Observations) -> dict[str, dict[str, float]]:
    sums, units = seen.result()
    rows = statistics_of(sums, units).tolist()
    return {name: dict(zip(STATISTICS, row, strict=True)) for name, row in zip(sums.names, rows, strict=True)}


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


CASES = {
    "features": [randn(8, 5)],
    "sequence": [randn(4, 6, 5).relu()],
    "channels": [randn(2, 3, 4, 5), randn(1, 3, 4, 5, seed=1)],
    "micro-batches": [randn(8, 5), randn(8, 5, seed=1), randn(3, 5, seed=2)],
    "other widths": [randn(8, 5), randn(8, 7)],
    "scalar": [torch.tensor(2.5)],
    "scalars": [torch.tensor(2.5), torch.tensor(-1.0)],
    "vector": [randn(9)],
    "large": [randn(700, 300), randn(20, 300, seed=1)],
    "large channels": [randn(3, 5, 100, 100)],
    "transposed": [randn(30, 400, 20).transpose(1, 2)],
    "far from 0": [1000 + randn(64, 32)],
    "tiny": [1e-25 * randn(64, 32)],
    "huge": [1e30 * randn(64, 32)],
    "float16": [(300 * randn(50, 40)).half()],
    "bfloat16": [(1e30 * randn(50, 40)).bfloat16(), randn(300, 400).bfloat16()],
    "float64": [randn(50, 40, dtype=torch.float64)],
    "zeros": [torch.zeros(4, 5)],
}


@pytest.mark.parametrize("together", [False, True])
def test_statistics_are_those_of_float64(together):
    alone = {name: observed({name: parts})[name] for name, parts in CASES.items()}
    found = observed(CASES) if together else alone
    for name, parts in CASES.items():
        assert found[name] == pytest.approx(expected(parts), rel=1e-6, abs=1e-300, nan_ok=True), name


@pytest.mark.parametrize("shape", [(64, 1000), (1000, 2000)])
@pytest.mark.parametrize("mean", [1e4, -1e6, 1e8])
def test_std_of_what_lies_far_from_0(mean, shape):
    """With float64 sums of squares there would be 3 digits left of the first, and none of the others."""
    x = mean + randn(*shape, dtype=torch.float64) * 1e-2
    found = observed({"x": [x], "near": [x - mean], "same": [torch.full(shape, mean)]})
    assert found["x"]["std"] == pytest.approx(x.std().item(), rel=1e-6)
    assert found["near"]["std"] == pytest.approx((x - mean).std().item(), rel=1e-6)
    assert found["same"]["std"] == 0


def test_std_of_parts_that_lie_far_from_0():
    parts = [1e4 + 1e-2 * randn(64, 1000, seed=i, dtype=torch.float64) for i in range(4)]
    assert observed({"x": parts})["x"]["std"] == pytest.approx(torch.cat(parts).std().item(), rel=1e-3)
    apart = [part + 0.1 * i for i, part in enumerate(parts)]
    assert observed({"x": apart})["x"]["std"] == pytest.approx(torch.cat(apart).std().item(), rel=1e-5)


def test_a_unit_is_dead_over_all_micro_batches():
    first, second = torch.ones(4, 6), torch.ones(4, 6)
    first[:, :3] = 0
    second[:, 2:5] = 0
    assert observed({"x": [first, second]})["x"]["dead_fraction"] == pytest.approx(1 / 6)
    assert math.isnan(observed({"x": [first]}, with_units=False)["x"]["dead_fraction"])


@pytest.mark.parametrize("shape", [(4, 5), (300, 400)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_elements_are_counted_and_leave_no_other_number(shape, value):
    wrong = torch.ones(shape)
    wrong[1, 2] = wrong[2, 2] = value
    found = observed({"wrong": [torch.ones(shape), wrong], "right": [torch.ones(shape)]})
    assert found["wrong"].pop("nonfinite_count") == 2
    assert all(map(math.isnan, found["wrong"].values()))
    assert found["right"]["mean"] == 1


def test_what_is_seen_is_a_copy():
    seen, x = Observations(), torch.full((3, 4), -2.0)
    seen.add("x", x)
    x.relu_()
    assert by_name(seen)["x"]["mean"] == -2


def test_names_that_come_in_another_order_each_time(monkeypatch):
    """A model with conditional parts; few series are kept apart."""
    monkeypatch.setattr(observations, "_UNITS", 10)
    parts: dict[str, list[Tensor]] = {name: [] for name in "abcd"}
    seen = Observations()
    for i in range(12):
        for name in "abcd"[i % 4 :] + "abcd"[: i % 3]:
            parts[name].append(randn(4, 5 + i % 2, seed=i).relu())
            seen.add(name, parts[name][-1])
        seen.flush()
    for name, found in by_name(seen).items():
        assert found == pytest.approx(expected(parts[name]), rel=1e-6), name


@pytest.mark.parametrize("count", [1, 3, 50])
def test_aggregates(count):
    values, weights = randn(count, dtype=torch.float64), [float(i % 3 + 1) for i in range(count)]
    found = {}
    for how in ("mean", "sum", "max", "min", "last"):
        measurement = Measurement("own", MetricSet("activations", {}, (), how))
        for value, weight in zip(values, weights, strict=True):
            measurement.record(how, value.expand(int(weight)), torch.device("cpu"))
        ((names, (number,)),) = measurement.values()
        found[names[0].removeprefix("own/")] = float(number)
    numbers = values.tolist()
    assert found == pytest.approx({
        "mean": sum(v * w for v, w in zip(numbers, weights, strict=True)) / sum(weights),
        "sum": sum(numbers), "max": max(numbers), "min": min(numbers), "last": numbers[-1],
    }, rel=1e-12)  # fmt: skip


@pytest.mark.parametrize("limits", [{"_BYTES": 5000}, {"_STACK_BYTES": 2000}, {"_ROWS": 1}, {}])
def test_numbers_are_the_same_whatever_room_there_is_for_copies(monkeypatch, limits):
    for name, value in limits.items():
        monkeypatch.setattr(observations, name, value)
    parts = {f"x{i}": [randn(4, 3 + i % 5, seed=i), randn(3, 3 + i % 5, seed=100 + i)] for i in range(40)}
    found = observed(parts)
    for name, own in parts.items():
        assert found[name] == pytest.approx(expected(own), rel=1e-6), name


def test_copies_do_not_pile_up_with_ever_other_shapes(monkeypatch):
    monkeypatch.setattr(observations, "_BYTES", 50_000)
    monkeypatch.setattr(observations, "_STACK_BYTES", 10_000)
    seen = Observations()
    for length in range(1, 200):
        seen.add("x", torch.zeros(length))
        assert sum(stack.tensor.nbytes for stack in seen._stacks.values()) <= 50_000


def test_what_an_error_has_cut_short_is_forgotten():
    seen = Observations()
    seen.add("x", torch.ones(3, 4))
    seen.clear()
    assert seen.result() is None
    seen.add("x", torch.full((3, 4), 5.0))
    assert by_name(seen)["x"]["mean"] == 5


def test_inference_mode_on_and_off():
    seen = Observations()
    with torch.inference_mode():
        seen.add("x", torch.ones(3, 4))
        seen.add_all(["y", "z"], torch.ones(2, 3, 4))
    seen.add("x", torch.full((3, 4), 3.0, requires_grad=True).detach())
    assert {name: found["mean"] for name, found in by_name(seen).items()} == {"x": 2, "y": 1, "z": 1}


@pytest.mark.parametrize("size", [6, 70_000])
@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [
        (torch.bool, 0, 1),
        (torch.uint8, 1, 200),
        (torch.int8, -128, 100),
        (torch.int16, -(2**15), 7),
        (torch.int64, -(2**40) - 1, 5),
    ],
)
def test_integers_are_the_numbers_they_are(dtype, low, high, size):
    numbers = torch.tensor([low, high, high], dtype=dtype).repeat(size)
    seen = Observations(with_units=False)
    seen.add("x", numbers)
    mean, std, _, largest, _, nonfinite = by_name(seen)["x"].values()
    assert mean == pytest.approx((low + 2 * high) / 3)
    assert std == pytest.approx(numbers.double().std().item())
    assert largest == max(abs(low), abs(high))
    assert nonfinite == 0
