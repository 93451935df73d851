"""DriftMonitor: slow changes of any scalar of the iteration."""

from __future__ import annotations

import math

import pytest
import torch
from ignite.engine import Engine, Events

from ignite_monitor import DriftMonitor, HealthyCheckpoint, MonitorEvents, RollbackHandler
from tests._oracle import weighted


def noise(count, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run(values, monitor, fired=None):
    """Return the metrics of every iteration."""
    seen = []
    engine = Engine(lambda engine, value: value)
    with monitor.attach(engine):
        if fired is not None:
            engine.add_event_handler(MonitorEvents.DRIFT_DETECTED, lambda e: fired.append(e.state.iteration))
        engine.add_event_handler(Events.ITERATION_COMPLETED, lambda e: seen.append(dict(e.state.metrics)))
        engine.run(values if isinstance(values, list) else values.tolist(), max_epochs=1)
    return seen


def output(engine):
    return engine.state.output


def drifts(values, direction="up"):
    return [
        i
        for i, metrics in enumerate(run(values, DriftMonitor(output, direction=direction)), 1)
        if metrics["drift/drift"]
    ]


def oracle(values, sides):
    """The formula in floats, the moments as weighted sums over all values since the last drift."""
    past, means, clipped, sums, expected = [], [], [], [0.0, 0.0], []
    variance = 0.0
    for value in values:
        if not math.isfinite(value):
            expected.append((0.0, *sums))
            continue
        mean, smoothed = (means[-1] if means else 0.0), (weighted(means, 0.995) if means else 0.0)
        std = math.sqrt(variance)
        if len(past) >= 150:
            for i, sign in enumerate((1, -1)):
                deviation = min(sign * (value - mean), sign * (value - mean - (mean - smoothed))) / std
                sums[i] = max(0.0, sums[i] + max(-4.0, min(4.0, deviation)) - 0.75)
        past.append(value)
        bound = 4 * std if len(past) > 20 else math.inf
        clipped.append(max(mean - bound, min(mean + bound, value)))
        means.append(weighted(clipped, 0.995))
        rate = 1 / sum(0.995**i for i in range(len(clipped)))
        variance = (1 - rate) * (variance + rate * (clipped[-1] - mean) ** 2)
        drift = any(sums[i] > 12 for i in sides)
        expected.append((float(drift), *sums))
        if drift:
            past, means, clipped, sums, variance = [], [], [], [0.0, 0.0], 0.0
    return expected


@pytest.mark.parametrize(("direction", "sides"), [("up", [0]), ("down", [1]), ("both", [0, 1])])
def test_sums_and_drift_are_those_of_the_formula(direction, sides):
    values = noise(700)
    values[:100] += 5 - 0.05 * torch.arange(100)
    values[220:320] += 0.05 * torch.arange(100)
    values[[30, 200]] = 50.0
    values[[0, 170]] = math.nan
    values[520:600] -= 0.05 * torch.arange(80)
    seen = run(values, DriftMonitor(output, direction=direction))
    result = [tuple(metrics[f"drift/{name}"] for name in ("drift", "sum_up", "sum_down")) for metrics in seen]
    expected = oracle(values.tolist(), sides)
    assert sum(drift for drift, *_ in expected) >= 1
    for own, truth in zip(result, expected, strict=True):
        assert own == pytest.approx(truth, abs=1e-7)


@pytest.mark.parametrize(
    ("direction", "sign", "seed"), [("up", 1.0, 0), ("down", -1.0, 1), ("both", 1.0, 2), ("both", -1.0, 0)]
)
def test_a_drift_of_3_percent_of_the_noise_is_detected_within_100_iterations(direction, sign, seed):
    values = noise(700, seed)
    values[600:] += sign * 0.03 * torch.arange(1, 101)
    [iteration] = drifts(values, direction)
    assert 600 < iteration <= 700


@pytest.mark.parametrize(
    "course",
    [
        lambda i: 8 * torch.exp(-i / 200),
        lambda i: 10 * (1 + i) ** -0.3,
        lambda i: (8 - 0.01 * i).clamp(min=0),
        lambda i: 8 - 3.0 * (i > 500) - 3.0 * (i > 900),
    ],
    ids=["exponential", "power", "linear", "steps"],
)
def test_a_loss_that_falls_and_flattens_does_not_drift_up(course):
    assert drifts(course(torch.arange(1000.0)) + 0.1 * noise(1000)) == []


def test_a_constant_value_that_begins_to_vary_is_followed():
    values = torch.cat((torch.full((160,), 3.0, dtype=torch.float64), 3 + noise(500), 3 + noise(200) + 2.0))
    assert any(660 < i <= 700 for i in drifts(values))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_unusable_values_change_no_sum(bad):
    values = noise(400)
    clean = run(values, DriftMonitor(output))
    spoilt = run([*values[:200].tolist(), bad, *values[200:].tolist()], DriftMonitor(output))
    assert [*spoilt[:200], *spoilt[201:]] == clean
    assert spoilt[200] == {**clean[199], "drift/drift": 0.0}


def test_event_log_counts_and_reset(caplog):
    values, fired = noise(500), []
    values[300:] += 5.0
    monitor = DriftMonitor(output, prefix="loss_drift")
    seen = run(values, monitor, fired)
    [iteration] = fired
    text = "the value drifts up from its trend; resetting its statistics"
    assert caplog.messages == [f"DriftMonitor (loss_drift): iteration {iteration}: {text}"]
    assert [i for i, metrics in enumerate(seen, 1) if metrics["loss_drift/drift"]] == fired
    assert seen[iteration - 1]["loss_drift/sum_up"] > 12
    assert seen[iteration]["loss_drift/sum_up"] == 0.0
    assert monitor.counts().tolist() == [1.0, 0.0, 1.0]


def test_a_run_resumed_after_a_drift_publishes_and_counts_the_same():
    values, stop = noise(600), 400
    values[300:400] += 0.1 * torch.arange(100)
    never_stopped, first, second = (DriftMonitor(output, direction="both") for _ in range(3))
    whole = run(values, never_stopped)
    head = run(values[:stop], first)
    second.load_state_dict(first.state_dict())
    assert [*head, *run(values[stop:], second)] == whole
    assert second.counts().tolist() == never_stopped.counts().tolist() == [1.0, 0.0, 1.0]
    with pytest.raises(ValueError, match="state_dict"):
        second.load_state_dict({"statistics": {}, "counts": torch.zeros(3)})


def test_a_healthy_checkpoint_waits_after_a_drift(tmp_path, caplog):
    values = noise(400)
    values[300:] += 5.0
    engine = Engine(lambda engine, value: value)
    DriftMonitor(output).attach(engine)
    checkpoint = HealthyCheckpoint({"model": torch.nn.Linear(1, 1)}, tmp_path, quiet=20)
    checkpoint.attach(engine, Events.ITERATION_COMPLETED(every=10))
    engine.run(values.tolist(), max_epochs=1)
    assert "drift had a spike in the last 20 iterations; the newest healthy state is that of iteration" in caplog.text


def test_a_drift_is_an_instability_for_a_rollback(caplog):
    model = torch.nn.Linear(1, 1)
    values = (5 + noise(320)).tolist()

    def train_step(engine, value):
        with torch.no_grad():
            model.weight.fill_(engine.state.iteration)
        return {"value": value + 4.0 * (engine.state.iteration > 300)}

    engine = Engine(train_step)
    DriftMonitor(lambda engine: engine.state.output["value"]).attach(engine)
    RollbackHandler({"model": model}, every=10).attach(engine)
    weights = []
    engine.add_event_handler(MonitorEvents.ROLLED_BACK, lambda engine: weights.append(model.weight.item()))
    engine.run(values, max_epochs=1)
    assert weights == [300.0]
    assert "the statistics of drift were reset; rolled back to iteration 300" in caplog.text
