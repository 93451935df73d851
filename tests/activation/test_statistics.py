"""Built-in statistics against float64, in parts and in one."""

from __future__ import annotations

import math

import pytest
import torch

from ignite_monitor.activation import statistics
from ignite_monitor.activation.measurement import Measurement, collect_rows, collect_values
from ignite_monitor.activation.metric import MetricSet
from ignite_monitor.monitor.transfer import NamedValues
from tests import _truth


def unit_of(tensor):
    return (1 if tensor.ndim > 3 else tensor.ndim - 1) if tensor.ndim > 1 else None


def measured(parts, together=True, unit=True, **options):
    """Name -> the statistics of its parts, which are measured one after the other, of all names in turns."""
    measurement = Measurement("x", MetricSet("activations", True))
    for i in range(max(map(len, parts.values()))):
        for name, tensors in parts.items():
            for tensor in tensors[i : i + 1]:
                measurement.add(name, name, tensor, unit=unit_of(tensor) if unit else None, **options)
                if not together:
                    measurement.flush()
        measurement.flush()
    return by_name(measurement)


def by_name(measurement, rows=None):
    result = {}
    for names, values in collect_values([measurement], rows):
        for name, value in zip(names, values.tolist(), strict=True):
            _, owner, kind = name.split("/")
            if math.isfinite(value):
                result.setdefault(owner, {})[kind] = value
    return result


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


CASES = {
    "features": [randn(8, 5)],
    "sequence": [randn(4, 6, 5).relu()],
    "channels": [randn(2, 3, 4, 5), randn(1, 3, 4, 5, seed=1)],
    "micro-batches": [randn(8, 5), randn(8, 5, seed=1), randn(3, 5, seed=2)],
    "an empty micro-batch": [randn(8, 5), randn(0, 5)],
    "other widths": [randn(8, 5), randn(8, 7)],
    "scalar": [torch.tensor(2.5)],
    "scalars": [torch.tensor(2.5), torch.tensor(-1.0)],
    "vector": [randn(9)],
    "large": [randn(700, 300), randn(20, 300, seed=1)],
    "large channels": [randn(3, 5, 100, 100)],
    "one sample": [randn(1, 2, 500, 400)],
    "transposed": [randn(30, 400, 20).transpose(1, 2)],
    "far from 0": [1000 + randn(64, 32)],
    "tiny": [1e-25 * randn(64, 32)],
    "huge": [1e30 * randn(64, 32)],
    "float16": [(300 * randn(50, 40)).half()],
    "bfloat16": [(1e30 * randn(50, 40)).bfloat16(), randn(300, 400).bfloat16()],
    "float8": [randn(50, 40).to(torch.float8_e4m3fn)],
    "float64": [randn(50, 40, dtype=torch.float64)],
    "zeros": [torch.zeros(4, 5)],
}


@pytest.mark.parametrize("piece", [statistics.PIECE, 1000])
@pytest.mark.parametrize("together", [False, True])
def test_statistics_are_those_of_float64(together, piece, monkeypatch):
    monkeypatch.setattr(statistics, "PIECE", piece)
    result = measured(CASES, together)
    for name, parts in CASES.items():
        truth = _truth.statistics([part.double() for part in parts], unit_of(parts[0]))
        assert result[name] == pytest.approx(truth, rel=1e-6, abs=1e-300), name


@pytest.mark.parametrize("shape", [(64, 1000), (1000, 2000)])
@pytest.mark.parametrize("mean", [1e4, -1e6, 1e8])
def test_std_of_values_far_from_0(mean, shape):
    """Sums of squares in float64 would keep 3 digits of the first, and none of the others."""
    x = mean + randn(*shape, dtype=torch.float64) * 1e-2
    result = measured({"x": [x], "near": [x - mean], "same": [torch.full(shape, mean)]})
    assert result["x"]["std"] == pytest.approx(x.std().item(), rel=1e-6)
    assert result["near"]["std"] == pytest.approx((x - mean).std().item(), rel=1e-6)
    assert result["same"]["std"] == 0


@pytest.mark.parametrize(("mean", "is_reported"), [(100, True), (1e8, False)])
def test_std_of_micro_batches_far_from_0_is_right_or_not_reported(mean, is_reported):
    parts = [mean + 0.1 * i + 0.1 * randn(64, 1000, seed=i, dtype=torch.float64) for i in range(4)]
    result = measured({"x": parts})["x"]
    expected = {"std": torch.cat(parts).std().item()} if is_reported else {}
    assert {name: value for name, value in result.items() if name == "std"} == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("units", [(5, 5), (5, 7)])
@pytest.mark.parametrize(("mean", "apart"), [(1e3, 0.5), (1e3, 0.0), (1e8, 0.5), (1e8, 0.0), (1e12, 3.0), (0.0, 1e8)])
def test_std_of_parts_far_from_0_on_several_ranks_is_right_or_not_reported(mean, apart, units):
    """Ranks add up their sums; so do outputs of one module with several numbers of units."""
    parts = [mean + apart * i + randn(400, units[i], seed=i, dtype=torch.float64) for i in range(2)]
    parts[1] += (apart == 0) * (parts[0].mean() - parts[1].mean())
    ranks = []
    for x in parts:
        measurement = Measurement("x", MetricSet("activations", True))
        measurement.add("x", "x", x, unit=1)
        ranks.append(collect_rows([measurement]))
    reduced = ({}, {})
    for rows in ranks:
        for into, new, combine in zip(reduced, rows, (torch.add, torch.maximum), strict=True):
            for kind, (names, own) in new.items():
                into[kind] = NamedValues(names, combine(into[kind].values, own) if kind in into else own)
    result = by_name(measurement, reduced)["x"]
    whole = torch.cat([x.flatten() for x in parts])
    assert result["mean"] == pytest.approx(whole.mean().item(), rel=1e-12, abs=1e-12)
    if mean < 1e6:
        assert "std" in result
    assert result.get("std", whole.std().item()) == pytest.approx(whole.std().item(), rel=1e-6)


def test_a_unit_is_dead_over_all_micro_batches():
    first, second = torch.ones(4, 6), torch.ones(4, 6)
    first[:, :3] = 0
    second[:, 2:5] = 0
    assert measured({"x": [first, second]})["x"]["dead_fraction"] == pytest.approx(1 / 6)
    assert "dead_fraction" not in measured({"x": [first]}, unit=False)["x"]


def test_a_copy_is_measured():
    measurement = Measurement("x", MetricSet("activations", {"mean": True}))
    x = torch.full((3,), -2.0)
    measurement.add("x", "x", x, copy=True)
    x.relu_()
    assert by_name(measurement) == {"x": {"mean": -2}}


def test_names_in_another_order_each_time():
    """A model with conditional parts."""
    parts = {name: [] for name in "abcd"}
    measurement = Measurement("x", MetricSet("activations", True))
    for i in range(12):
        for name in "abcd"[i % 4 :] + "abcd"[: i % 3]:
            parts[name].append(randn(4, 5 + i % 2, seed=i).relu())
            measurement.add(name, name, parts[name][-1], unit=1)
        measurement.flush()
    result = by_name(measurement)
    for name in "abcd":
        assert result[name] == pytest.approx(_truth.statistics(parts[name], unit_of(parts[name][0])), rel=1e-6), name


@pytest.mark.parametrize("count", [1, 3, 50])
def test_aggregates(count):
    values, weights = randn(count, dtype=torch.float64), [float(i % 3 + 1) for i in range(count)]
    measurement = Measurement("own", MetricSet("activations", {}))
    for how in ("mean", "sum", "max", "min"):
        for value, weight in zip(values, weights, strict=True):
            measurement.aggregate(how, how, value, weight)
    result = {names[0]: float(number) for names, number in collect_values([measurement])}
    numbers = values.tolist()
    assert result == pytest.approx({
        "own/mean": sum(v * w for v, w in zip(numbers, weights, strict=True)) / sum(weights),
        "own/sum": sum(numbers), "own/max": max(numbers), "own/min": min(numbers),
    }, rel=1e-12)  # fmt: skip


def test_inference_mode_on_and_off():
    measurement = Measurement("x", MetricSet("activations", {"mean": True}))
    for value, mode in ((1.0, True), (3.0, False), (2.0, True)):
        with torch.inference_mode(mode), torch.no_grad():
            measurement.add("x", "x", torch.full((3, 4), value), unit=1, copy=True)
            measurement.flush()
    assert by_name(measurement) == {"x": {"mean": 2.0}}


@pytest.mark.parametrize("size", [6, 70_000])
@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [(torch.bool, 0, 1), (torch.uint8, 1, 200), (torch.int8, -128, 100), (torch.int64, -(2**40) - 1, 5)],
)
def test_integers_are_the_numbers_they_are(dtype, low, high, size):
    numbers = torch.tensor([low, high, high], dtype=dtype).repeat(size)
    result = measured({"x": [numbers]}, unit=False)["x"]
    assert result["mean"] == pytest.approx((low + 2 * high) / 3)
    assert result["std"] == pytest.approx(numbers.double().std().item())
    assert (result["max_abs"], result["nonfinite_count"]) == (max(abs(low), abs(high)), 0)
