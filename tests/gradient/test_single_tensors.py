"""GradMonitor(per_parameter=True): a step is a spike too where one tensor's gradient is, and a spike names tensors."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from ignite.engine import Engine, Events
from torch.amp import GradScaler

from ignite_monitor import GradMonitor, MonitorEvents, StaticThreshold
from ignite_monitor.events.monitor_events import Spike
from ignite_monitor.gradient.publication import describe
from tests._helpers import assert_same, make_step, mlp_batches, train, training_state
from tests._models import make_mlp
from tests._oracle import Oracle, mean_of, robust, shared_growth
from tests._truth import norm

COUNT, BAD, NAME = 45, 40, "0.bias"
EACH = robust(8.0, 20, 0.99, 2.0)


class Training:
    """Multiplies the gradient of one tensor in one iteration, inside of backward, and notes all norms in float64."""

    def __init__(self, factor=10.0, name=NAME, bad=(BAD,), every=1, scaler=None, seed=0, unused=False, **arguments):
        self.model = make_mlp(seed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.monitor = GradMonitor(self.model, self.optimizer, per_parameter=True, scaler=scaler, **arguments)
        self.norms, self.used, self.now, self.unused = [], [], 0, unused
        self.named = dict(self.model.named_parameters())
        self.named[name].register_hook(lambda g: g * factor if self.now in bad else g)

        def note(engine):
            scale = 1.0 if scaler is None else scaler.get_scale()
            self.norms.append({n: norm([p.grad]) / scale for n, p in self.named.items()})

        self._step = make_step(self.model, self.optimizer, every=every, scaler=scaler, before_step=note)

    def step(self, engine, batch):
        self.now = engine.state.iteration
        self.named["0.weight"].requires_grad_(not self.unused or self.now % 3 != 1)
        self._step(engine, batch)
        self.used.append({n: norm([p.grad]) for n, p in self.named.items()})


def detections_by(oracles, norms):
    """The detections on one step's tensors, each divided by what all of them share."""
    means = {n: mean_of(oracles.setdefault(n, Oracle(EACH)).history, 0.99) for n in norms}
    factor = shared_growth([*norms.values()], [*means.values()])
    return {n: oracles[n].detect(x / factor, False) for n, x in norms.items() if x > 0}


def expected(norms):
    """Compute by the contract whether each step is a spike, and each tensor's share of the excess."""
    oracles, whole, reported = {}, Oracle(), []
    for of_step in norms:
        seen = detections_by(oracles, of_step)
        spikes = {n for n, v in seen.items() if v.spike}
        total = math.hypot(*of_step.values())
        is_spike = whole.expect(total)["spike"] or bool(spikes)
        above = {n: max(of_step[n] - v.threshold, 0.0) for n, v in seen.items()}
        excess = above if any(above.values()) else {n: max(of_step[n] - v.mean, 0.0) for n, v in seen.items()}
        shares = {n: x / (math.fsum(excess.values()) or 1.0) for n, x in excess.items()}
        reported.append((float(is_spike), dict(sorted(shares.items(), key=lambda s: -s[1])) if is_spike else {}))
        for n, v in seen.items():
            oracles[n].observe(v)
    return reported


def culprits(metrics):
    return {n.removeprefix("grad/culprit/"): x for n, x in metrics.items() if n.startswith("grad/culprit/")}


def check(recorder, training, reported):
    steps = [m for m in recorder.metrics if m.get("grad/stepped")]
    assert [m["grad/spike"] for m in steps] == [spike for spike, _ in reported]
    for metrics, (_, shares) in zip(steps, reported, strict=True):
        few = dict([(n, x) for n, x in shares.items() if x >= 0.05][:3])
        assert culprits(metrics) == pytest.approx(few, rel=1e-4)


@pytest.mark.parametrize("how", ["plain", "accumulation", "scaler", "unused tensor"])
def test_a_tensor_above_its_own_threshold_makes_a_spike_and_is_named(how):
    every = 3 if how == "accumulation" else 1
    bad = range((BAD - 1) * every + 1, BAD * every + 1)
    scaler = GradScaler("cpu", init_scale=2.0**12) if how == "scaler" else None
    training = Training(every=every, bad=bad, scaler=scaler, unused=how == "unused tensor")
    recorder = train(training.step, mlp_batches(COUNT * every), training.monitor)
    reported = expected(training.norms)
    assert [i for i, (spike, _) in enumerate(reported, 1) if spike] == [BAD]
    check(recorder, training, reported)
    assert next(iter(reported[BAD - 1][1])) == NAME
    published = recorder.metrics[BAD * every - 1]
    assert recorder.flags[BAD * every - 1]
    assert published["grad/spike_count"] == 1
    total = math.hypot(*training.norms[BAD - 1].values())
    assert published["grad/norm"] == pytest.approx(total, rel=1e-6)
    # With so small a tensor the norm of all alone would not be a spike.
    assert published["grad/norm"] < published["grad/threshold"]


def test_at_a_spike_of_the_whole_gradient_tensors_are_named_too():
    training = Training(bad=())
    recorder = train(training.step, mlp_batches(COUNT, spikes=(BAD,), factor=20.0), training.monitor)
    reported = expected(training.norms)
    assert [i for i, (spike, _) in enumerate(reported, 1) if spike] == [BAD]
    check(recorder, training, reported)
    # In the second iteration no tensor is compared yet, and the excess over the means is reported.
    training = Training(bad=(), threshold=StaticThreshold(1e-3))
    recorder = train(training.step, mlp_batches(3), training.monitor)
    first, second = training.norms[:2]
    beyond = {n: max(second[n] - first[n], 0.0) for n in first}
    few = {n: x / sum(beyond.values()) for n, x in beyond.items()}
    assert culprits(recorder.metrics[0]) == {}
    few = dict(sorted(few.items(), key=lambda share: -share[1])[:3])
    assert culprits(recorder.metrics[1]) == pytest.approx(few, rel=1e-4)


def test_the_event_and_the_log_tell_of_it(caplog):
    training, reported = Training(), []
    engine = Engine(training.step)
    training.monitor.attach(engine)
    engine.add_event_handler(MonitorEvents.SPIKE_DETECTED, lambda e: reported.append(e.state.spike))
    with caplog.at_level(logging.WARNING):
        engine.run(mlp_batches(COUNT), max_epochs=1)
    [spike] = reported
    shares = expected(training.norms)[BAD - 1][1]
    name, share = next(iter(shares.items()))
    assert next(iter(spike.culprits.items())) == (name, pytest.approx(share))
    [line] = [record.getMessage() for record in caplog.records]
    text = f"gradient norm {spike.value:.3g}; {100 * share:.0f} % of the excess in {name}"
    assert line.startswith(f"GradMonitor (grad): iteration {BAD}: {text}")


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((15.1, 1.08, {"a.weight": 0.96}), "15.1, 14 x its threshold; 96 % of the excess in a.weight"),
        ((2.0, 4.0, {"a": 0.6, "b": 0.4}), "2; 60 % of the excess in a, 40 % of the excess in b"),
        ((2.0, math.inf, {}), "2"),
        ((math.nan, 4.0, {"a": 1.0}), "nan; 100 % of the excess in a"),
    ],
)
def test_how_a_spike_is_described(numbers, text):
    assert describe(Spike(None, "grad/norm", *numbers)) == f"gradient norm {text}"


@pytest.mark.parametrize("how", ["skip", "clip"])
def test_on_spike(how):
    training = Training(on_spike=how, factor=200.0)
    before = []
    engine = Engine(training.step)
    training.monitor.attach(engine)
    engine.add_event_handler(
        Events.ITERATION_STARTED(once=BAD), lambda: before.append(training_state(training.model, training.optimizer))
    )
    engine.add_event_handler(
        Events.ITERATION_COMPLETED(once=BAD), lambda: before.append(training_state(training.model, training.optimizer))
    )
    engine.run(mlp_batches(COUNT), max_epochs=1)
    if how == "skip":
        assert_same(*({name: state[name] for name in state if name != "grads"} for state in before))
        return
    whole = Oracle()
    for of_step in training.norms[: BAD - 1]:
        whole.expect(math.hypot(*of_step.values()))
    bad = training.norms[BAD - 1]
    total = math.hypot(*bad.values())
    factor = whole.expect(total)["threshold"] / total
    assert factor < 0.5
    assert training.used[BAD - 1] == pytest.approx({n: x * factor for n, x in bad.items()}, rel=1e-5)
    assert training.used[BAD - 2] == training.norms[BAD - 2]
    assert float(training.monitor.state_dict()["clipped_count"]) == 1


def test_beside_a_nan_no_tensor_is_clipped():
    training = Training(on_spike="clip", factor=math.nan)
    training.named["2.bias"].register_hook(lambda g: g * 200 if training.now == BAD else g)
    recorder = train(training.step, mlp_batches(COUNT), training.monitor)
    assert recorder.of("grad/skipped_count")[-1] == 1
    assert recorder.of("grad/clipped_count")[-1] == 0


def test_provisional_updates_of_tensors_are_reverted():
    """Four micro-batches to a step; the first of the tenth is far off in one tensor."""
    training = Training(every=4, bad=(37 * 4 - 3,), factor=400.0)
    recorder = train(training.step, mlp_batches(COUNT * 4), training.monitor)
    assert recorder.flags[37 * 4 - 4]
    count = training.monitor.state_dict()["per_parameter"]["count"]
    assert count.tolist() == [COUNT] * 4


def test_an_overflow_is_no_spike_and_leaves_no_trace():
    training = Training(factor=math.inf, scaler=GradScaler("cpu", init_scale=2.0**12))
    recorder = train(training.step, mlp_batches(COUNT), training.monitor)
    assert recorder.of("grad/spike") == [0.0] * COUNT
    assert recorder.metrics[BAD - 1]["grad/nonfinite_count"] == 1
    assert training.monitor.state_dict()["per_parameter"]["count"].tolist() == [45.0, 44, 45, 45]


@pytest.mark.parametrize("is_held", [False, True])
def test_a_train_step_may_replace_a_module(is_held):
    """Held: the optimizer holds the new parameters, and still the old ones."""
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    last = len(model) - 1

    def step(engine, batch):
        if engine.state.iteration == 3:
            model[last] = torch.nn.Linear(model[last].in_features, model[last].out_features)
            if is_held:
                optimizer.add_param_group({"params": model[last].parameters()})
        train_step(engine, batch)

    train_step = make_step(model, optimizer)
    monitor = GradMonitor(model, optimizer, per_parameter=True)
    metrics = train(step, mlp_batches(6), monitor).metrics
    assert all("grad/norm" in row for row in metrics)
    names = [name for name, _ in model.named_parameters() if is_held or not name.startswith(f"{last}.")]
    assert monitor.state_dict()["per_parameter"]["names"] == names
