"""GradMonitor beside a GradScaler: unscaled norms, and overflows that are the scaler's business."""

from __future__ import annotations

import math

import pytest
import torch
from torch.amp import GradScaler

from ignite_monitor import GradMonitor, MeanStdThreshold, StaticThreshold
from tests._trainers import (
    Oracle,
    assert_same,
    loss_of,
    make_batches,
    make_model,
    mean_of,
    mean_std,
    train,
    training_state,
    true_norm,
)

CLOSE = {"rel": 1e-5}
MAKE = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "fused sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}


def make_scaler(**kwargs):
    return GradScaler("cpu", **({"init_scale": 2.0**10, "growth_interval": 7} | kwargs))


class Step:
    """A train step with a scaler; keeps flags after backward, unscaled norms in float64 and scales."""

    def __init__(self, model, optimizer, scaler, *, clip=None, accumulate=1, zero_at="start"):
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.clip, self.accumulate, self.zero_at = clip, accumulate, zero_at
        self.pending, self.truth, self.flags, self.fresh, self.scales = [], [], [], [], []

    def __call__(self, engine, batch):
        i = engine.state.iteration
        if self.zero_at == "start" and (i - 1) % self.accumulate == 0:
            self.optimizer.zero_grad()
        self.pending.append(batch)
        self.truth.append(true_norm(self.model, self.pending))
        self.scales.append(self.scaler.get_scale())
        self.scaler.scale(loss_of(self.model, batch)).backward()
        self.flags.append(bool(getattr(engine.state, "unhealthy_spike", False)))
        self.fresh.append(getattr(engine.state, "grad_norm", None))
        if i % self.accumulate == 0:
            if self.clip is not None:
                self.scaler.unscale_(self.optimizer)
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.pending.clear()
            if self.zero_at == "end":
                self.optimizer.zero_grad()


def build(name="sgd", scaler=None, step=None, **kwargs):
    model = make_model()
    optimizer = MAKE[name](model.parameters())
    scaler = scaler or make_scaler()
    step = Step(model, optimizer, scaler, **(step or {}))
    monitor = GradMonitor(model, optimizer, scaler=scaler, **({"threshold": MeanStdThreshold(warmup=5)} | kwargs))
    return step, monitor


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("zero_at", ["start", "end"])
def test_norms_and_thresholds_are_unscaled_and_unclipped_while_the_scale_grows(name, clip, zero_at):
    step, monitor = build(name, step={"clip": clip, "zero_at": zero_at})
    recorder = train(step, make_batches(30), monitor)

    assert len(set(step.scales)) > 3
    assert [float(norm) for norm in step.fresh] == pytest.approx(step.truth, **CLOSE)
    assert recorder.norms == pytest.approx(step.truth, **CLOSE)
    oracle = Oracle(mean_std(6.0, 5, 0.99))
    expected = [oracle.expect(norm) for norm in step.truth]
    for key in ("mean", "std", "threshold"):
        found = recorder.of(f"grad/{key}")
        assert found == [pytest.approx(v[key], rel=1e-4) if key in v else None for v in expected], key
    assert step.flags == recorder.flags == [values["spike"] == 1 for values in expected]


@pytest.mark.parametrize("clip", [None, 0.5])
def test_without_the_optimizer_the_norms_are_unscaled_too(clip):
    step, _ = build(step={"clip": clip})
    recorder = train(step, make_batches(10), GradMonitor(step.model, scaler=step.scaler))
    assert recorder.norms == pytest.approx(step.truth, **CLOSE)
    assert recorder.of("grad/mean")[-1] == pytest.approx(mean_of(step.truth[:-1]), **CLOSE)


def test_accumulated_norms_are_unscaled():
    step, monitor = build(step={"accumulate": 3}, scaler=make_scaler(growth_interval=2))
    recorder = train(step, make_batches(24), monitor)
    assert recorder.norms == pytest.approx(step.truth, **CLOSE)
    assert float(monitor.state_dict()["detector"]["rule"]["count"]) == 8


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("skip_step", [True, False])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_an_overflow_is_counted_and_not_flagged_and_the_scaler_does_its_work(name, clip, skip_step, value):
    # After an overflow in its first step fused SGD reads momentum that nobody has written, with and without a monitor.
    first = 3 if name == "fused sgd" else 1

    def run(monitored):
        reported = []
        step, monitor = build(
            name, step={"clip": clip}, on_spike="skip" if skip_step else lambda *_: reported.append(1),
            threshold=MeanStdThreshold(k=50.0, warmup=5),
        )  # fmt: skip
        batches = make_batches(20, spikes=[first, 10, 11], factor=value)
        recorder = train(step, batches, *[monitor] * monitored)
        assert reported == []
        return step, recorder, training_state(step.model, step.optimizer) | {"scaler": step.scaler.state_dict()}

    step, recorder, state = run(True)
    assert_same(state, run(False)[2])
    assert step.scales[10] < step.scales[9]
    assert step.scales[11] < step.scales[10]
    assert step.flags == recorder.flags == [False] * 20
    assert recorder.of("grad/spike") == recorder.of("grad/spike_count") == [0] * 20
    assert recorder.of("grad/skipped_count") == [0] * 20
    assert recorder.of("grad/nonfinite_count") == [0] * (first - 1) + [1] * (10 - first) + [2] + [3] * 10
    finite = [norm for norm in step.truth if math.isfinite(norm)]
    assert len(finite) == 17
    assert recorder.of("grad/mean")[-1] == pytest.approx(mean_of(finite[:-1]), **CLOSE)
    assert all(
        math.isfinite(value) for values in recorder.metrics for key, value in values.items() if key != "grad/norm"
    )


@pytest.mark.parametrize("name", ["sgd", "fused adamw"])
@pytest.mark.parametrize("where", [10, 11, 12])
@pytest.mark.parametrize("zero_at", ["start", "end"])
def test_an_overflow_while_accumulating_counts_once(name, where, zero_at):
    step, monitor = build(
        name, step={"accumulate": 3, "zero_at": zero_at}, threshold=MeanStdThreshold(k=50.0, warmup=2)
    )
    recorder = train(step, make_batches(24, spikes=[where], factor=math.inf), monitor)
    # One value per step, and of what is not finite: what has overflowed stays so until the step.
    published = [i % 3 == 0 or where <= i <= 12 for i in range(1, 25)]
    expected = [float(i >= where) if there else None for i, there in enumerate(published, 1)]
    assert recorder.of("grad/nonfinite_count") == expected
    assert recorder.flags == [False] * 24
    assert step.scales[12] < step.scales[11]
    assert float(monitor.state_dict()["detector"]["rule"]["count"]) == 7
    kept = [norm for norm in step.truth[2::3] if math.isfinite(norm)]
    assert recorder.of("grad/mean")[-1] == pytest.approx(mean_of(kept[:-1]), **CLOSE)


@pytest.mark.parametrize("name", MAKE)
def test_a_finite_spike_beside_a_scaler_is_flagged(name):
    step, monitor = build(name, threshold=StaticThreshold(100.0), on_spike="skip")
    recorder = train(step, make_batches(10, spikes=[6]), monitor)
    assert step.flags == recorder.flags == [i == 6 for i in range(1, 11)]
    assert recorder.of("grad/skipped_count")[-1] == 1
    assert recorder.norms == pytest.approx(step.truth, **CLOSE)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_disabled_scaler_handles_no_overflow(value):
    step, monitor = build(scaler=GradScaler("cpu", enabled=False), on_spike="skip")
    recorder = train(step, make_batches(10, spikes=[6], factor=value), monitor)
    finite = [(found, true) for found, true in zip(recorder.norms, step.truth, strict=True) if math.isfinite(true)]
    assert [found for found, _ in finite] == pytest.approx([true for _, true in finite], **CLOSE)
    assert len(finite) == 9
    assert step.flags[5]
    assert recorder.of("grad/skipped_count")[5] == 1


def test_gradients_set_by_hand_before_scaler_step_are_compared_unscaled():
    for name in MAKE:
        step, monitor = build(name)
        truth = []

        def by_hand(engine, batch, step=step, truth=truth):
            loss = step.scaler.scale(loss_of(step.model, batch))
            gradients = torch.autograd.grad(loss, list(step.model.parameters()))
            for parameter, gradient in zip(step.model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            truth.append(true_norm(step.model, [batch]))
            step.scaler.step(step.optimizer)
            step.scaler.update()

        recorder = train(by_hand, make_batches(10), monitor)
        assert recorder.norms == pytest.approx(truth, **CLOSE), name
