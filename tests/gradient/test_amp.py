"""GradMonitor beside a GradScaler: unscaled norms, and overflows that are the scaler's business."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from ignite.engine import Engine
from torch.amp import GradScaler

from ignite_monitor import GradMonitor, MeanStdThreshold
from tests._helpers import assert_same, grad_norm, make_step, mlp_batches, train, training_state
from tests._models import make_mlp
from tests._oracle import Oracle, mean_of, mean_std

CLOSE = {"rel": 1e-5}
MAKE = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "fused sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}


def make_scaler(**kwargs):
    return GradScaler("cpu", **({"init_scale": 2.0**10, "growth_interval": 7} | kwargs))


def build(name="sgd", scaler=None, options=None, **kwargs):
    """A training with a scaler, which keeps flags after backward, unscaled norms in float64 and scales; a monitor."""
    model = make_mlp()
    optimizer = MAKE[name](model.parameters())
    scaler = scaler or make_scaler()
    run = SimpleNamespace(model=model, optimizer=optimizer, scaler=scaler, truth=[], flags=[], fresh=[], scales=[])

    def note(engine):
        run.scales.append(scaler.get_scale())
        run.truth.append(grad_norm(model) / run.scales[-1])
        run.flags.append(bool(getattr(engine.state, "unhealthy_spike", False)))
        run.fresh.append(getattr(engine.state, "grad_norm", None))

    run.step = make_step(model, optimizer, scaler=scaler, after_backward=note, **(options or {}))
    monitor = GradMonitor(model, optimizer, scaler=scaler, **({"threshold": MeanStdThreshold(warmup=5)} | kwargs))
    return run, monitor


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("zero_at", ["start", "end"])
def test_norms_and_thresholds_are_unscaled_and_unclipped_while_the_scale_grows(name, clip, zero_at):
    run, monitor = build(name, options={"clip": clip, "zero_at": zero_at})
    recorder = train(run.step, mlp_batches(30), monitor)

    assert len(set(run.scales)) > 3
    assert [float(norm) for norm in run.fresh] == pytest.approx(run.truth, **CLOSE)
    assert recorder.norms == pytest.approx(run.truth, **CLOSE)
    oracle = Oracle(mean_std(6.0, 5, 0.99))
    expected = [oracle.expect(norm) for norm in run.truth]
    for key in ("mean", "std", "threshold"):
        result = recorder.of(f"grad/{key}")
        assert result == [pytest.approx(v[key], rel=1e-4) if key in v else None for v in expected], key
    assert run.flags == recorder.flags == [values["spike"] == 1 for values in expected]


@pytest.mark.parametrize("clip", [None, 0.5])
def test_without_the_optimizer_the_norms_are_unscaled_too(clip):
    run, _ = build(options={"clip": clip})
    recorder = train(run.step, mlp_batches(10), GradMonitor(run.model, scaler=run.scaler))
    assert recorder.norms == pytest.approx(run.truth, **CLOSE)
    assert recorder.of("grad/mean")[-1] == pytest.approx(mean_of(run.truth[:-1]), **CLOSE)


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("skip_step", [True, False])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_an_overflow_is_counted_and_not_flagged_and_the_scaler_does_its_work(name, clip, skip_step, value):
    # After an overflow in its first step fused SGD reads momentum that nobody has written, with and without a monitor.
    first = 3 if name == "fused sgd" else 1

    def trained(monitored):
        reported = []
        run, monitor = build(
            name, options={"clip": clip}, on_spike="skip" if skip_step else lambda *_: reported.append(1),
            threshold=MeanStdThreshold(k=50.0, warmup=5),
        )  # fmt: skip
        batches = mlp_batches(20, spikes=[first, 10, 11], factor=value)
        recorder = train(run.step, batches, *[monitor] * monitored)
        assert reported == []
        return run, recorder, training_state(run.model, run.optimizer) | {"scaler": run.scaler.state_dict()}

    run, recorder, state = trained(True)
    assert_same(state, trained(False)[2])
    assert run.scales[10] < run.scales[9]
    assert run.scales[11] < run.scales[10]
    assert run.flags == recorder.flags == [False] * 20
    assert recorder.of("grad/spike") == recorder.of("grad/spike_count") == [0] * 20
    assert recorder.of("grad/skipped_count") == [0] * 20
    assert recorder.of("grad/stepped") == [float(i not in (first, 10, 11)) for i in range(1, 21)]
    assert recorder.of("grad/nonfinite_count") == [0] * (first - 1) + [1] * (10 - first) + [2] + [3] * 10
    finite = [norm for norm in run.truth if math.isfinite(norm)]
    assert len(finite) == 17
    assert recorder.of("grad/mean")[-1] == pytest.approx(mean_of(finite[:-1]), **CLOSE)
    assert all(
        math.isfinite(value) for values in recorder.metrics for key, value in values.items() if key != "grad/norm"
    )


@pytest.mark.parametrize("name", ["sgd", "fused adamw"])
@pytest.mark.parametrize("where", [10, 11, 12])
@pytest.mark.parametrize("zero_at", ["start", "end"])
def test_an_overflow_while_accumulating_counts_once(name, where, zero_at):
    run, monitor = build(name, options={"every": 3, "zero_at": zero_at}, threshold=MeanStdThreshold(k=50.0, warmup=2))
    recorder = train(run.step, mlp_batches(24, spikes=[where], factor=math.inf), monitor)
    # One value per step, and of what is not finite: what has overflowed stays so until the step.
    published = [i % 3 == 0 or where <= i <= 12 for i in range(1, 25)]
    expected = [float(i >= where) if present else None for i, present in enumerate(published, 1)]
    assert recorder.of("grad/nonfinite_count") == expected
    assert recorder.flags == [False] * 24
    assert run.scales[12] < run.scales[11]
    assert float(monitor.state_dict()["detector"]["count"]) == 7
    kept = [norm for norm in run.truth[2::3] if math.isfinite(norm)]
    assert recorder.of("grad/mean")[-1] == pytest.approx(mean_of(kept[:-1]), **CLOSE)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_disabled_scaler_handles_no_overflow(value):
    run, monitor = build(scaler=GradScaler("cpu", enabled=False), on_spike="skip")
    recorder = train(run.step, mlp_batches(10, spikes=[6], factor=value), monitor)
    finite = [(result, true) for result, true in zip(recorder.norms, run.truth, strict=True) if math.isfinite(true)]
    assert [result for result, _ in finite] == pytest.approx([true for _, true in finite], **CLOSE)
    assert len(finite) == 9
    assert run.flags[5]
    assert recorder.of("grad/skipped_count")[5] == 1


@pytest.mark.parametrize("name", MAKE)
def test_gradients_set_by_hand_before_scaler_step_are_compared_unscaled(name):
    run, monitor = build(name, options={"by_hand": True})
    recorder = train(run.step, mlp_batches(10), monitor)
    assert recorder.norms == pytest.approx(run.truth, **CLOSE)


@pytest.mark.parametrize("scaled", [0, 1])
def test_only_a_scaler_of_the_own_optimizer_is_missed(scaled):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in model]
    scaler = make_scaler()

    def train_step(engine, batch):
        for optimizer in optimizers:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            if optimizer is optimizers[scaled]:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()

    monitor = GradMonitor(model, optimizers[1])
    monitor.attach(trainer := Engine(train_step))
    trainer.run(torch.randn(2, 4, 3))
    assert [report.kind for report in monitor.reports] == ["scaler_not_given"] * (scaled == 1)
