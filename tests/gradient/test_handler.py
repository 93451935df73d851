"""GradMonitor in one process: what it publishes and flags, whatever the train step looks like."""

from __future__ import annotations

import copy
import io
import logging
import math
import threading

import pytest
import torch
from ignite.engine import Engine, Events, create_supervised_trainer
from ignite.handlers import Checkpoint
from torch import nn
from torch.utils.checkpoint import checkpoint

from ignite_monitor import GradMonitor, MeanStdThreshold, StaticThreshold, ThresholdRule
from tests._trainers import (
    Judge,
    Recorder,
    assert_same,
    grad_norm,
    loss_of,
    make_batches,
    make_model,
    mean_of,
    mean_std,
    train,
    true_norm,
)

CLOSE = {"rel": 1e-5}


def sgd(model, **kwargs):
    return torch.optim.SGD(model.parameters(), **({"lr": 0.01} | kwargs))


def plain_step(model, optimizer, *, zero_at="start", seen=None, leave_out=False):
    """A train step by hand; ``seen`` gets the norm in float64 and the flag, right after backward."""

    def step(engine, batch):
        if zero_at == "start":
            optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        if seen is not None:
            norm, flag = (getattr(engine.state, name, None) for name in ("grad_norm", "unhealthy_spike"))
            seen.append((grad_norm(model), None if norm is None else float(norm), flag))
        if not (leave_out and engine.state.unhealthy_spike):
            optimizer.step()
        if zero_at == "end":
            optimizer.zero_grad()
        return loss.item()

    return step


# Flag, norm and statistics


def check_against_own_truth(
    forward, model, backward=lambda loss: loss.backward(), batches=None, loss=loss_of, norm_type=2.0
):
    """Train with a monitor, and compare with the norms of the gradients in float64; return what was recorded."""
    optimizer, truth = sgd(model), []
    batches = make_batches(3) if batches is None else batches

    def step(engine, batch):
        optimizer.zero_grad()
        backward(loss(forward, batch))
        truth.append(grad_norm(model, norm_type))
        assert float(engine.state.grad_norm) == pytest.approx(truth[-1], **CLOSE)
        optimizer.step()

    monitor = GradMonitor(model, optimizer, norm_type=norm_type)
    recorder = train(step, batches, monitor)
    assert recorder.norms == pytest.approx(truth, **CLOSE)
    assert recorder.of("grad/mean")[-1] == pytest.approx(mean_of(truth[:-1]), **CLOSE)
    assert float(monitor.state_dict()["detector"]["rule"]["count"]) == len(batches)
    return recorder


@pytest.mark.parametrize("zero_at", ["start", "end"])
@pytest.mark.parametrize("with_optimizer", [True, False])
def test_flag_and_norm_speak_of_this_iterations_gradients_when_backward_returns(zero_at, with_optimizer):
    model, seen = make_model(), []
    optimizer = sgd(model)
    monitor = GradMonitor(model, optimizer if with_optimizer else None)
    step = plain_step(model, optimizer, zero_at=zero_at, seen=seen, leave_out=True)
    recorder = train(step, make_batches(40, spikes=[30]), monitor)

    truth, norms, flags = zip(*seen, strict=True)
    assert norms == pytest.approx(truth, **CLOSE)
    assert [bool(flag) for flag in flags] == [i == 30 for i in range(1, 41)]
    assert all(type(flag) is bool for flag in flags)
    assert recorder.flags == [bool(flag) for flag in flags]
    assert recorder.norms == pytest.approx(norms, rel=0)
    assert recorder.of("grad/norm") == pytest.approx(norms, rel=0)


@pytest.mark.parametrize("decay", [None, 0.9])
@pytest.mark.parametrize("with_optimizer", [True, False])
def test_statistics_threshold_and_spikes_are_those_of_the_earlier_norms(decay, with_optimizer):
    model, seen = make_model(), []
    optimizer = sgd(model)
    monitor = GradMonitor(
        model, optimizer if with_optimizer else None, threshold=MeanStdThreshold(k=2.5, warmup=8, decay=decay)
    )
    recorder = train(plain_step(model, optimizer, seen=seen), make_batches(50, spikes=[20, 21, 40], factor=10), monitor)

    judge = Judge(mean_std(2.5, 8, decay))
    expected = [judge.expect(norm) for norm, _, _ in seen]
    for name in ("mean", "std", "threshold", "spike"):
        found = recorder.of(f"grad/{name}")
        assert found == [
            values.get(name) if found[i] is None else pytest.approx(values[name], **CLOSE)
            for i, values in enumerate(expected)
        ], name
    spikes = [values["spike"] for values in expected]
    assert {20, 21, 40} <= {i for i, spike in enumerate(spikes, 1) if spike}
    assert recorder.of("grad/spike_count") == [sum(spikes[: i + 1]) for i in range(50)]
    assert recorder.of("grad/skipped_count") == [0] * 50
    assert recorder.of("grad/nonfinite_count") == [0] * 50


def test_exactly_the_promised_keys_are_published_as_floats_and_the_metrics_are_the_states():
    model = make_model()
    optimizer = sgd(model)
    monitor = GradMonitor(model, optimizer, threshold=MeanStdThreshold(warmup=3))
    engine = Engine(plain_step(model, optimizer))
    monitor.attach(engine)
    keys = []

    @engine.on(Events.ITERATION_COMPLETED)
    def look(engine):
        assert engine.state.metrics == monitor.metrics
        assert all(type(value) is float for value in monitor.metrics.values())
        keys.append({name.removeprefix("grad/") for name in monitor.metrics})

    engine.run(make_batches(5), max_epochs=1)
    always = {"norm", "spike", "stepped", "spike_count", "skipped_count", "nonfinite_count"}
    assert (
        keys == [always, always | {"mean"}] + [always | {"mean", "std"}] + [always | {"mean", "std", "threshold"}] * 2
    )


def test_a_filter_leaves_no_value_in_the_iterations_between_and_counts_the_monitored_alone():
    model, seen = make_model(), []
    optimizer = sgd(model, lr=1e-4)
    monitor = GradMonitor(model, optimizer, threshold=MeanStdThreshold(warmup=3))
    step = plain_step(model, optimizer, seen=seen)
    recorder = train(step, make_batches(20, spikes=[11, 12]), monitor, event=Events.ITERATION_STARTED(every=2))

    judge = Judge(mean_std(6.0, 3, 0.99))
    for i, (values, (norm, _, _)) in enumerate(zip(recorder.metrics, seen, strict=True), 1):
        if i % 2:
            assert values == {}
            assert recorder.flags[i - 1] is False
            assert recorder.norms[i - 1] is None
        else:
            expected = judge.expect(norm) | {"norm": norm}
            assert {name: values[f"grad/{name}"] for name in expected} == pytest.approx(expected, **CLOSE)
            assert ("grad/threshold" in values) == ("threshold" in expected)
    assert recorder.of("grad/spike")[11] == 1


@pytest.mark.parametrize("norm_type", [1, 2.0, math.inf])
def test_norm_types(norm_type):
    model = make_model()
    check_against_own_truth(model, model, norm_type=norm_type)


# When a norm enters the statistics


def test_accumulation_in_create_supervised_trainer():
    model = make_model()
    optimizer = sgd(model)
    trainer = create_supervised_trainer(model, optimizer, nn.functional.mse_loss, gradient_accumulation_steps=4)
    monitor = GradMonitor(model, optimizer)
    monitor.attach(trainer)
    recorder = Recorder(trainer)
    batches, before, truth = make_batches(16), [copy.deepcopy(model)], []
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=4), lambda _: before.append(copy.deepcopy(model)))
    trainer.run(batches, max_epochs=1)

    for i, weights in enumerate(before[:-1]):
        truth.append(true_norm(weights, batches[4 * i : 4 * i + 4]) / 4)
    assert recorder.norms[3::4] == pytest.approx(truth, **CLOSE)
    assert float(monitor.state_dict()["detector"]["rule"]["count"]) == 4


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("zero_at", ["start", "end"])
def test_a_level_that_rises_for_good_never_stops_a_train_step_that_leaves_spikes_out(zero_at, set_to_none):
    model, steps = make_model(), []
    optimizer = sgd(model, lr=1e-6)

    def step(engine, batch):
        if zero_at == "start":
            optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model, batch).backward()
        if not engine.state.unhealthy_spike:
            optimizer.step()
            steps.append(engine.state.iteration)
        if zero_at == "end":
            optimizer.zero_grad(set_to_none=set_to_none)

    monitor = GradMonitor(model, optimizer, threshold=MeanStdThreshold(k=10.0), max_consecutive_spikes=6)
    recorder = train(step, make_batches(90, spikes=range(31, 91), factor=1000), monitor)
    assert steps == [*range(1, 31), *range(37, 91)]
    assert recorder.of("grad/spike_count") == [0] * 30 + [1, 2, 3, 4, 5] + [6] * 55


def test_loading_a_state_while_a_gradient_may_still_grow_loses_nothing_of_it():
    model = make_model()
    optimizer = sgd(model, lr=1e-6)
    monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(1e-3))
    engine = Engine(lambda engine, batch: loss_of(model, batch).backward())
    monitor.attach(engine)
    saved = monitor.state_dict()
    saved["counts"] = torch.tensor([1000.0, 0.0, 0.0], dtype=torch.float64)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), lambda: monitor.load_state_dict(saved))
    engine.run(make_batches(2))
    assert float(monitor.metrics["grad/spike_count"]) == 1001


def test_an_error_in_on_spike_reaches_the_user_as_it_is():
    class StopError(Exception):
        pass

    def stop(engine, norm):
        raise StopError

    model = make_model()
    monitor = GradMonitor(model, threshold=StaticThreshold(50.0), on_spike=stop)
    with pytest.raises(StopError):
        train(plain_step(model, sgd(model)), make_batches(3, spikes=[2]), monitor)


# Non-finite norms and a new level


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("with_optimizer", [True, False])
@pytest.mark.parametrize("leave_out", [True, False])
def test_non_finite_gradients_are_flagged_counted_and_kept_out_of_the_statistics(value, with_optimizer, leave_out):
    model, truth = make_model(), []
    optimizer = sgd(model)

    def step(engine, batch):
        optimizer.zero_grad()
        loss_of(model, batch).backward(inputs=list(model.parameters()))
        truth.append(grad_norm(model))
        if leave_out and engine.state.unhealthy_spike:
            return
        if engine.state.unhealthy_spike:  # let it be seen by the optimizer without wrecking what follows
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
            for parameter in model.parameters():
                parameter.grad.nan_to_num_()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.01

    batches = make_batches(20)
    batches[11][1][0, 0] = value
    monitor = GradMonitor(model, optimizer if with_optimizer else None, threshold=MeanStdThreshold(warmup=5, k=6.0))
    recorder = train(step, batches, monitor)

    judge = Judge(mean_std(6.0, 5, 0.99))
    expected = [judge.expect(norm) for norm in truth]
    assert recorder.flags == [values["spike"] == 1 for values in expected] == [i == 11 for i in range(20)]
    assert not math.isfinite(recorder.norms[11])
    assert recorder.of("grad/nonfinite_count") == [0] * 11 + [1] * 9
    assert recorder.of("grad/spike_count") == [0] * 11 + [1] * 9
    assert recorder.of("grad/threshold")[5:] == pytest.approx([values["threshold"] for values in expected[5:]], **CLOSE)
    assert recorder.of("grad/mean")[1:] == pytest.approx([values["mean"] for values in expected[1:]], **CLOSE)


def test_statistics_appear_as_soon_as_they_exist_when_every_step_is_left_out():
    model, seen = make_model(), []
    optimizer = sgd(model)
    monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(1e-3), max_consecutive_spikes=100)
    recorder = train(plain_step(model, optimizer, seen=seen, leave_out=True), make_batches(5), monitor)
    assert recorder.of("grad/mean") == [None] + [pytest.approx(1e-3)] * 4


# Gradients from elsewhere, and none


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_no_gradients_at_all_publish_nothing_and_warn_once_saying_what_to_do(caplog, with_optimizer):
    model, other = make_model(), make_model(1)
    optimizer = sgd(other)
    monitor = GradMonitor(model, sgd(model) if with_optimizer else None)
    with caplog.at_level(logging.WARNING):
        recorder = train(plain_step(other, optimizer), make_batches(5), monitor)
    assert recorder.metrics == [{}] * 5
    assert recorder.flags == [False] * 5
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "optimizer" in record.getMessage()


def test_a_backward_in_a_handler_after_the_train_step_changes_nothing():
    def run(probe):
        model = make_model()
        optimizer = sgd(model)
        engine = Engine(plain_step(model, optimizer))
        monitor = GradMonitor(model, optimizer)
        monitor.attach(engine)

        @engine.on(Events.ITERATION_COMPLETED)
        def look_ahead(engine):
            if probe:
                optimizer.zero_grad()
                (1e3 * loss_of(model, engine.state.batch)).backward()
                optimizer.zero_grad()

        recorder = Recorder(engine)
        engine.run(make_batches(6), max_epochs=1)
        return recorder.metrics, monitor.state_dict()

    assert_same(run(probe=True), run(probe=False))


def test_another_engine_that_trains_the_model_between_iterations_is_not_watched():
    model = make_model()
    optimizer = sgd(model)
    engine, inner = Engine(plain_step(model, optimizer)), Engine(plain_step(model, optimizer))
    monitor = GradMonitor(model, optimizer)
    monitor.attach(engine)
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda _: inner.run(make_batches(3, seed=5), max_epochs=1))
    engine.run(make_batches(4), max_epochs=2)
    assert float(monitor.state_dict()["detector"]["rule"]["count"]) == 8


# Kinds of gradients


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (torch.float16, 300.0),  # squares overflow float16
        (torch.float16, 1e-6),  # squares underflow float16
        (torch.bfloat16, 1e30),  # squares overflow bfloat16 and float32
        (torch.bfloat16, 1e-30),  # squares underflow both
        (torch.float32, 1e30),
        (torch.float32, 1e-30),
        (torch.float64, 1e100),
    ],
)
def test_gradients_whose_squares_do_not_fit_their_dtype(dtype, scale):
    model, truth = make_model().to(dtype), []
    optimizer = sgd(model)

    def step(engine, batch):
        optimizer.zero_grad()
        for parameter in model.parameters():
            gradient = torch.full_like(parameter, scale)
            parameter.backward(gradient)
        truth.append(grad_norm(model))

    recorder = train(step, [None] * 2, GradMonitor(model, optimizer))
    assert all(value > 0 for value in truth)
    assert recorder.norms == pytest.approx(truth, rel=1e-6)
    assert recorder.flags == [False] * 2


class Odd(nn.Module):
    """Scalar, empty, complex, sparse, float64 and integer parameters, and one that no loss reaches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(2, dtype=torch.float64))
        self.table = nn.Embedding(10, 4, sparse=True)
        self.codes = nn.Parameter(torch.arange(3), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, indices):
        return (
            self.scalar**2
            + self.empty.sum()
            + self.complex.abs().pow(2).sum()
            + self.wide.pow(2).sum()
            + self.table(indices).pow(2).sum()
        )


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_scalar_empty_complex_sparse_and_unused_parameters(norm_type, micro_batches):
    model = Odd()

    def backward(losses):
        for loss in losses:
            loss.backward()

    check_against_own_truth(
        model,
        model,
        backward,
        batches=[torch.tensor([1, 1, 3, 3, 3])] * 3,
        loss=lambda forward, indices: [forward(indices) for _ in range(micro_batches)],
        norm_type=norm_type,
    )


def test_tied_weights_count_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    model[2].weight = model[0].weight
    check_against_own_truth(model, model)


# Which parameters


@pytest.mark.parametrize("when", ["between iterations", "before forward", "in a group added late"])
def test_parameters_unfrozen_while_training(when):
    model, truth = make_model(), []
    model[0].requires_grad_(False)
    optimizer = sgd(model[2]) if when == "in a group added late" else sgd(model)

    def unfreeze(engine):
        if engine.state.iteration == 3:
            model[0].requires_grad_(True)
            if when == "in a group added late":
                optimizer.add_param_group({"params": list(model[0].parameters())})

    def step(engine, batch):
        if when != "between iterations":
            unfreeze(engine)
        optimizer.zero_grad()
        if engine.state.iteration == 4:
            model[0](batch[0]).sum().backward()  # the unfrozen part alone
        else:
            loss_of(model, batch).backward()
        truth.append(grad_norm(model))
        optimizer.step()

    engine = Engine(step)
    GradMonitor(model, optimizer).attach(engine)
    if when == "between iterations":
        engine.add_event_handler(Events.ITERATION_STARTED, unfreeze)
    recorder = Recorder(engine)
    engine.run(make_batches(5), max_epochs=1)
    assert recorder.norms == pytest.approx(truth, **CLOSE)


# Two models, two monitors


# Graphs of every kind


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 2))

    def forward(x):
        return model[2](checkpoint(model[1], model[0](x), use_reentrant=reentrant))

    check_against_own_truth(forward, model)


def test_every_segment_checkpointed_reentrantly():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))

    def forward(x):
        x = x.clone().requires_grad_()
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=True)
        return x

    check_against_own_truth(forward, model)


def test_backward_with_inputs_named():
    model = make_model()
    check_against_own_truth(model, model, lambda loss: loss.backward(inputs=list(model.parameters())))


def test_backward_from_another_thread():
    model = make_model()

    def backward(loss):
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    check_against_own_truth(model, model, backward)


def test_a_backward_that_fails_and_is_tried_again():
    model, failing = make_model(), []

    def fail(gradient):
        if failing:
            raise RuntimeError("out of memory")

    def forward(x):
        hidden = model[1](model[0](x))
        hidden.register_hook(fail)
        return model[2](hidden)

    def backward(loss):
        failing.append(True)
        with pytest.raises(RuntimeError, match="out of memory"):
            loss.backward(retain_graph=True)
        failing.clear()
        model.zero_grad()
        loss.backward()

    check_against_own_truth(forward, model, backward)


def test_a_compiled_model():
    model = make_model()
    compiled = torch.compile(model, backend="aot_eager")
    assert check_against_own_truth(compiled, model, batches=make_batches(26, spikes=[26])).flags[25]


# Training is untouched, and resumes


class Doubled(ThresholdRule):
    """A user's rule with a state of its own: twice the largest norm so far."""

    def __init__(self):
        super().__init__(warmup=3)

    def empty(self):
        return super().empty() | {"largest": torch.zeros(())}

    def include(self, state, norm):
        return super().include(state, norm) | {"largest": torch.maximum(state["largest"], norm.to(state["largest"]))}

    def __call__(self, mean, std, count):
        return 2 * self.state["largest"]


class Rest:
    """The rest of the batches, with the length of all, as a resumable sampler gives them."""

    def __init__(self, batches, start):
        self.batches, self.start = batches, start

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches[self.start :])


RULES = {
    "mean and std": lambda: MeanStdThreshold(warmup=5),
    "decay": lambda: MeanStdThreshold(warmup=5, decay=0.9),
    "static": lambda: StaticThreshold(20.0),
    "function": lambda: lambda mean, std, count: 3 * mean,
    "own rule": Doubled,
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("half", [2, 13, 16])
@pytest.mark.parametrize("skip_step", [True, False])
@pytest.mark.parametrize(
    "spikes", [{9: 1e3, 22: 1e3}, {1: math.nan, 3: math.nan, 9: 1e3}, dict.fromkeys(range(10, 25), 30.0)]
)
def test_a_resumed_run_publishes_what_the_uninterrupted_run_does(rule, half, spikes, skip_step):
    batches = make_batches(30)
    for i, factor in spikes.items():
        batches[i - 1][1].mul_(factor)

    def build():
        model = make_model()
        optimizer = sgd(model)
        engine = Engine(plain_step(model, optimizer, leave_out=not skip_step))
        monitor = GradMonitor(
            model, optimizer, threshold=RULES[rule](), on_spike="skip" if skip_step else None, max_consecutive_spikes=4
        )
        monitor.attach(engine)
        parts = {"model": model, "optimizer": optimizer, "trainer": engine, "monitor": monitor}
        return parts, Recorder(engine)

    parts, whole = build()
    saved = io.BytesIO()
    parts["trainer"].add_event_handler(
        Events.ITERATION_COMPLETED(once=half),
        lambda _: torch.save(Checkpoint(to_save=parts, save_handler=lambda *_: None)._setup_checkpoint(), saved),
    )
    parts["trainer"].run(batches, max_epochs=1)

    resumed, second = build()
    saved.seek(0)
    Checkpoint.load_objects(to_load=resumed, checkpoint=torch.load(saved, weights_only=True))
    resumed["trainer"].run(Rest(batches, half), max_epochs=1)
    assert_same(second.metrics, whole.metrics[half:])
    assert second.flags == whole.flags[half:]
    assert_same(resumed["monitor"].state_dict(), parts["monitor"].state_dict())


def test_optimizer_steps_inside_of_backward_leave_no_whole_gradient_and_nothing_is_published(caplog):
    model = make_model()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.01) for parameter in model.parameters()}

    def step_at_once(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step_at_once)
    recorder = train(lambda _, batch: loss_of(model, batch).backward(), make_batches(3), GradMonitor(model))
    assert recorder.metrics == [{}] * 3
    assert recorder.flags == [False] * 3
    assert len([record for record in caplog.records if "no gradient of the model" in record.getMessage()]) == 1


def test_blocks_of_parameters_that_take_turns_in_the_optimizer():
    """As many each, so that their number tells nothing."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    blocks = [list(model[0].parameters()), list(model[2].parameters())]
    optimizer = torch.optim.SGD(blocks[0], lr=0.1)
    expected, found = [], []

    def train_step(engine, batch):
        model.zero_grad()
        model(batch).square().mean().backward()
        held = optimizer.param_groups[0]["params"]
        expected.append(torch.cat([each.grad.double().flatten() for each in held]).norm().item())
        optimizer.step()

    trainer = Engine(train_step)
    monitor = GradMonitor(model, optimizer, per_parameter=True)
    monitor.attach(trainer)
    trainer.add_event_handler(
        Events.ITERATION_STARTED(every=2),
        lambda engine: optimizer.param_groups[0].update(params=blocks[engine.state.iteration // 2 % 2]),
    )
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda engine: found.append(float(engine.state.metrics["grad/norm"]))
    )
    trainer.run([torch.randn(4, 8) for _ in range(7)], max_epochs=1)
    assert found == pytest.approx(expected, rel=1e-5)
    assert monitor.state_dict()["per_parameter"]["names"] == ["2.weight", "2.bias"]
