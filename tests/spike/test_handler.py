"""SpikeMonitor: any scalar of the iteration, compared with its own earlier values."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import torch
from ignite.engine import Engine, Events

from ignite_monitor import GradMonitor, MeanStdThreshold, MonitorEvents, RobustThreshold, SpikeMonitor, StaticThreshold
from tests._helpers import make_step, mlp_batches
from tests._models import make_mlp
from tests._oracle import Oracle


def run(values, monitor, handlers=()):
    """Return the state after every iteration whose train step returns a value."""
    seen = []
    engine = Engine(lambda engine, batch: batch)
    monitor.attach(engine)
    for event, handler in handlers:
        engine.add_event_handler(event, handler)
    engine.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda engine: seen.append((dict(engine.state.metrics), getattr(engine.state, monitor.flag))),
    )
    engine.run(values, max_epochs=1)
    return seen


def output(engine):
    return engine.state.output


def values_of(count, spikes=(), seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(count, generator=generator, dtype=torch.float64) + 5).tolist()
    return [100.0 if i in spikes else value for i, value in enumerate(values)]


def test_value_threshold_spike_count_and_score_are_those_of_the_contract():
    values = values_of(60, spikes=(30, 31, 50))
    seen = run(values, SpikeMonitor(output, prefix="loss"))
    oracle, count = Oracle(), 0
    for value, (metrics, flag) in zip(values, seen, strict=True):
        expected = oracle.expect(value)
        count += int(expected["spike"])
        truth = {
            "value": value,
            "spike": expected["spike"],
            "spike_count": count,
        } | {name: expected[name] for name in ("threshold",) if name in expected}
        assert metrics == pytest.approx({f"loss/{name}": number for name, number in truth.items()}, rel=1e-9)
        assert flag is bool(expected["spike"])
    assert count == 3


@pytest.mark.parametrize("kind", [float, np.float32, torch.tensor, lambda x: torch.tensor([x], requires_grad=True)])
def test_numbers_of_any_kind(kind):
    values = [kind(value) for value in (1.0, 2.0, 30.0)]
    seen = run(values, SpikeMonitor(output, threshold=StaticThreshold(10.0)))
    assert [metrics["spike/value"] for metrics, _ in seen] == [1.0, 2.0, 30.0]
    assert [flag for _, flag in seen] == [False, False, True]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_a_spike_and_does_not_enter(value):
    monitor = SpikeMonitor(output, threshold=MeanStdThreshold(warmup=5))
    seen = run([*values_of(10), value, *values_of(3, seed=1)], monitor)
    assert [i for i, (_, flag) in enumerate(seen) if flag] == [10]
    assert seen[10][0]["spike/value"] == pytest.approx(value, nan_ok=True)
    assert float(monitor.state_dict()["statistics"]["count"]) == 13


def test_none_is_no_value():
    monitor = SpikeMonitor(lambda engine: None if engine.state.iteration % 2 else 1.0)
    assert [bool(metrics) for metrics, _ in run(range(4), monitor)] == [False, True, False, True]


def test_a_value_that_never_comes_is_said_once(caplog):
    with caplog.at_level(logging.WARNING):
        run(range(120), SpikeMonitor(lambda engine: engine.state.metrics.get("monitor/misspelt")))
        [record] = caplog.records
        assert "50 iterations" in record.getMessage()
        caplog.clear()
        run(range(120), SpikeMonitor(lambda engine: 1.0 if engine.state.iteration % 40 == 0 else None))
        assert not caplog.records


@pytest.mark.parametrize("value", ["text", torch.zeros(2), torch.zeros((), dtype=torch.complex64), [1.0, 2.0]])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(TypeError, match="one number or None"):
        run([1.0], SpikeMonitor(lambda engine: value))


def test_it_sees_what_other_monitors_publish_whatever_their_order():
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    engine, seen = Engine(make_step(model, optimizer)), []
    SpikeMonitor(lambda engine: engine.state.metrics["grad/norm"]).attach(engine)
    GradMonitor(model, optimizer).attach(engine)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: seen.append(dict(engine.state.metrics)))
    engine.run(mlp_batches(3))
    assert [item["spike/value"] for item in seen] == [item["grad/norm"] for item in seen]


def test_a_spike_and_a_regime_change_are_reported(caplog):
    reported, resets = [], []
    monitor = SpikeMonitor(output, threshold=MeanStdThreshold(warmup=5), max_consecutive_spikes=3, prefix="loss")
    handlers = [
        (MonitorEvents.SPIKE_DETECTED, lambda engine: reported.append((engine.state.iteration, engine.state.spike))),
        (MonitorEvents.THRESHOLD_RESET, lambda engine: resets.append((engine.state.iteration, engine.state.spike))),
    ]
    with caplog.at_level(logging.WARNING):
        run([*values_of(20), *[100.0] * 10], monitor, handlers)
    assert [iteration for iteration, _ in reported] == [21, 22, 23]
    assert [(iteration, spike.monitor, spike.name, spike.value) for iteration, spike in resets] == [
        (23, monitor, "loss/value", 100.0)
    ]
    assert all(5.0 < spike.threshold < 100.0 for _, spike in reported)
    assert len(caplog.records) == 1


def test_two_on_one_engine():
    engine = Engine(lambda engine, batch: batch)
    SpikeMonitor(output, prefix="a", flag="a").attach(engine)
    SpikeMonitor(lambda engine: 2 * engine.state.output, prefix="b", flag="b").attach(engine)
    engine.run([1.0])
    assert (engine.state.metrics["a/value"], engine.state.metrics["b/value"]) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"value": 1.0}, TypeError),
        ({"threshold": 0}, ValueError),
        ({"max_consecutive_spikes": 0}, ValueError),
        ({"flag": "epoch"}, ValueError),
        ({"flag": 3}, TypeError),
        ({"prefix": ""}, ValueError),
    ],
)
def test_bad_arguments_are_refused(arguments, kind):
    with pytest.raises(kind):
        SpikeMonitor(**{"value": output} | arguments)


@pytest.mark.parametrize("rule", [MeanStdThreshold, RobustThreshold])
@pytest.mark.parametrize("low", [-1e200, -1e9, -100.0])
def test_one_value_far_below_hides_no_later_spike(rule, low):
    values = values_of(600)
    values[50] = low
    spikes = list(range(150, 600, 50))
    for i in spikes:
        values[i] = 1000.0
    flags = [flag for _, flag in run(values, SpikeMonitor(output, threshold=rule()))]
    assert [i for i, flag in enumerate(flags) if flag] == [50] * (low == -1e200) + spikes


@pytest.mark.parametrize("rule", [MeanStdThreshold, RobustThreshold])
def test_direction_down_detects_what_up_detects_in_the_negated_values(rule):
    values = [value - 5 for value in values_of(200, spikes=(60, 61, *range(120, 150)))]
    up = run(values, SpikeMonitor(output, threshold=rule()))
    down = run([-value for value in values], SpikeMonitor(output, threshold=rule(), direction="down"))
    negated = ("spike/value", "spike/threshold")
    assert [({k: -v if k in negated else v for k, v in named.items()}, flag) for named, flag in down] == up
    assert sum(flag for _, flag in up) > 2


def test_direction_both_detects_what_up_and_down_detect():
    values = values_of(200, spikes=(60, 61, 120))
    values[90] = values[91] = -100.0
    seen = {kind: run(values, SpikeMonitor(output, direction=kind)) for kind in ("up", "down", "both")}
    assert [i for i, (_, flag) in enumerate(seen["both"]) if flag] == [60, 61, 90, 91, 120]
    for (up, is_up), (down, is_down), (both, flag) in zip(*seen.values(), strict=True):
        assert flag is (is_up or is_down)
        assert both.get("spike/threshold") == up.get("spike/threshold")
        assert both.get("spike/lower_threshold") == down.get("spike/threshold")


def test_spike_of_the_lower_side():
    values, spikes = values_of(60), []
    values[50] = -100.0
    whole = run(values, SpikeMonitor(output, direction="both"), [
        (MonitorEvents.SPIKE_DETECTED, lambda engine: spikes.append(engine.state.spike)),
    ])  # fmt: skip
    assert [spike.value for spike in spikes] == [-100.0]
    assert spikes[0].threshold == whole[50][0]["spike/lower_threshold"]


@pytest.mark.parametrize("direction", ["down", "both"])
def test_a_number_is_no_threshold_of_both_directions(direction):
    with pytest.raises(ValueError, match="threshold"):
        SpikeMonitor(output, threshold=10.0, direction=direction)
    with pytest.raises(ValueError, match="direction"):
        SpikeMonitor(output, direction="left")
