"""StepStatsHandler: time, items, FLOPs counted by hand, memory, learning rates."""

from __future__ import annotations

import copy
import time

import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events, create_supervised_trainer
from torch import nn

from ignite_monitor import GradMonitor, MonitorEvents, StaticThreshold, StepStatsHandler
from ignite_monitor.model.tensors import count_items
from ignite_monitor.step_stats.flops import peak_flops

TIMES = {"step/time_ms", "step/items_per_s", "step/mfu"}


def run(model, batches, handler_of=None, loss=F.mse_loss, **arguments):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_supervised_trainer(model, optimizer, loss)
    handler = StepStatsHandler(model, optimizer, **arguments)
    handler.attach(trainer)
    seen = []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda _: seen.append({name: float(v) for name, v in handler.metrics.items()})
    )
    trainer.run(batches)
    return handler, seen


def linear_batches(count=3):
    return [(torch.randn(16, 5), torch.randn(16, 7)) for _ in range(count)]


def test_flops_of_a_linear_layer_by_hand():
    """xWᵀ, and in backward gᵀx for the weight; the input wants no gradient: 2 · 16 · 5 · 7 each."""
    handler, _ = run(nn.Linear(5, 7), linear_batches(), peak_flops=1e9)
    assert handler.flops == 2 * (2 * 16 * 5 * 7)
    two, _ = run(nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 7)), linear_batches(), peak_flops=1e9)
    assert two.flops == 2 * (2 * 16 * 5 * 6) + 3 * (2 * 16 * 6 * 7)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = (each.unflatten(2, (2, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, 2))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_flops_of_attention_by_hand():
    """Forward two products of T x T x d for each of 2 heads, and backward five, one of which makes QKᵀ anew."""
    batch, length, heads, size = 3, 10, 2, 4
    data = [(torch.randn(batch, length, 8), torch.randn(batch, length, 8))]
    projection = 2 * (2 * batch * length * 8 * 24)
    product = 2 * batch * heads * length * length * size
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        handler, _ = run(Attention(), data, peak_flops=1e9)
    assert handler.flops == projection + 7 * product
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        handler, _ = run(Attention(), data, peak_flops=1e9)
    assert handler.flops == projection + 6 * product  # which keeps QKᵀ


def test_flops_of_all_micro_batches_are_counted_once():
    model = nn.Linear(5, 7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(_, batch):
        for part in batch.split(4):
            model(part).sum().backward()
        optimizer.step()

    trainer = Engine(train_step)
    handler = StepStatsHandler(model, optimizer, peak_flops=1e9)
    handler.attach(trainer)
    trainer.run([torch.randn(16, 5), torch.randn(4, 5), torch.randn(16, 5)])
    assert handler.flops == 2 * (2 * 16 * 5 * 7)


def test_mfu_and_throughput_are_of_the_time_that_is_published():
    handler, seen = run(nn.Linear(5, 7), linear_batches(), peak_flops=1e9)
    assert not TIMES & set(seen[0])  # the iteration in which FLOPs are counted
    for values in seen[1:]:
        seconds = values["step/time_ms"] / 1e3
        assert values["step/items_per_s"] == pytest.approx(16 / seconds)
        assert values["step/mfu"] == pytest.approx(handler.flops / seconds / 1e9)


def test_no_mfu_and_no_counting_where_the_peak_is_not_known():
    handler, seen = run(nn.Linear(5, 7), linear_batches())
    assert handler.flops is None
    assert all("step/mfu" not in values and values["step/time_ms"] > 0 for values in seen)


def test_time_is_that_of_the_train_step():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def data():
        while True:
            time.sleep(0.05)
            yield torch.ones(1)

    trainer = Engine(lambda *_: time.sleep(0.02))
    handler = StepStatsHandler(model, optimizer)
    handler.attach(trainer)
    before = []
    trainer.add_event_handler(
        Events.ITERATION_STARTED, lambda _: (before.append(time.perf_counter()), time.sleep(0.05))
    )
    bounds = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def check(_):
        elapsed = 1e3 * (time.perf_counter() - before[-1])
        bounds.append(20 <= float(handler.metrics["step/time_ms"]) <= elapsed - 49)

    trainer.run(data(), max_epochs=1, epoch_length=3)
    assert bounds == [True] * 3


class Batch(dict):
    pass


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.zeros(5, 2), 5),
        ((torch.zeros(5, 2), torch.zeros(7)), 5),
        ([{"a": "text", "b": [torch.zeros(4)]}], 4),
        ({"ids": torch.zeros(6, 3), "labels": torch.zeros(9)}, 6),
        (Batch(scale=torch.zeros(()), x=torch.zeros(3)), 3),
        (torch.zeros(0, 4), 0),
        ("text", None),
        (7, None),
        ((), None),
        (torch.zeros(()), None),
    ],
)
def test_items_of_a_batch(batch, count):
    assert count_items(batch) == count


@pytest.mark.parametrize("items", [lambda batch: batch[0].numel(), lambda batch: torch.tensor(batch[0].numel())])
def test_items_by_a_function(items):
    _, seen = run(nn.Linear(5, 7), linear_batches(), items=items)
    for values in seen:
        assert values["step/items_per_s"] == pytest.approx(16 * 5 / values["step/time_ms"] * 1e3)


@pytest.mark.parametrize("items", [None, lambda batch: batch["x"].numel(), lambda batch: batch["count"]])
def test_items_are_those_that_the_train_step_was_given(items):
    """A train step may take its batch apart, and change what is in it."""
    model = nn.Linear(5, 7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handler = StepStatsHandler(model, optimizer, items=items)
    trainer = Engine(lambda _, batch: (model(batch.pop("x")), batch["count"].zero_()))
    handler.attach(trainer)
    trainer.run([{"x": torch.ones(16, 5), "count": torch.tensor(80)} for _ in range(2)])
    seconds = float(handler.metrics["step/time_ms"]) / 1e3
    assert float(handler.metrics["step/items_per_s"]) == pytest.approx((80 if items else 16) / seconds)


def test_batch_without_tensors_has_no_items_and_one_warning(caplog):
    model = nn.Linear(2, 2)
    handler = StepStatsHandler(model, torch.optim.SGD(model.parameters(), lr=0.1))
    trainer = Engine(lambda *_: None)
    handler.attach(trainer)
    trainer.run(["a", "b", "c"])
    assert "step/items_per_s" not in handler.metrics
    assert "step/time_ms" in handler.metrics
    assert len(caplog.records) == 1


def rates_of(handler):
    return [float(handler.metrics[f"step/lr/group_{i}"]) for i in range(len(handler.optimizer.param_groups))]


def published_rates(trainer, handler, batches):
    handler.attach(trainer)
    rates = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda _: rates.append(rates_of(handler)))
    trainer.run(batches)
    return rates


def test_learning_rates_are_those_that_the_step_used():
    """Set before the train step, and changed in it right after the optimizer's step, in place or not."""
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": torch.tensor(0.25)}]
    optimizer = torch.optim.SGD(groups)

    def train_step(*_):
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.param_groups[1]["lr"].zero_()

    trainer = Engine(train_step)

    @trainer.on(Events.ITERATION_STARTED)
    def schedule(engine):
        optimizer.param_groups[0]["lr"] = 1.0 / engine.state.iteration
        optimizer.param_groups[1]["lr"] = torch.tensor(0.25)

    assert published_rates(trainer, StepStatsHandler(model, optimizer), [0, 1]) == [[1.0, 0.25], [0.5, 0.25]]


def moved_by_a_gradient_of_ones(train):
    """How far each iteration moves a parameter whose gradient is 1: what SGD took for its learning rate."""
    moves = []
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handler = StepStatsHandler(model, optimizer)

    def train_step(engine, _):
        before = model.weight.item()
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        train(engine, optimizer)
        moves.append([pytest.approx(before - model.weight.item(), rel=1e-4)])

    trainer = Engine(train_step)
    return trainer, model, optimizer, handler, moves


def test_a_learning_rate_that_the_train_step_sets_is_the_one_that_moved_the_weights():
    def train(engine, optimizer):
        optimizer.param_groups[0]["lr"] = 0.1 * engine.state.iteration
        optimizer.step()

    trainer, _, _, handler, moves = moved_by_a_gradient_of_ones(train)
    assert published_rates(trainer, handler, [0] * 3) == moves
    assert moves == [[0.1], [0.2], [0.3]]


@pytest.mark.parametrize("event", [MonitorEvents.SPIKE_DETECTED, MonitorEvents.OPTIMIZER_STEP_STARTED])
@pytest.mark.parametrize("first", [True, False])
def test_a_learning_rate_that_a_handler_lowers_is_the_one_that_moved_the_weights(event, first):
    """Whichever monitor is attached first."""
    trainer, model, optimizer, handler, moves = moved_by_a_gradient_of_ones(lambda _, optimizer: optimizer.step())
    monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(1e-6))
    if first:
        monitor.attach(trainer)
    handler.attach(trainer)
    if not first:
        monitor.attach(trainer)

    @trainer.on(event)
    def lower(_):
        optimizer.param_groups[0]["lr"] *= 0.1

    rates = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda _: rates.append(rates_of(handler)))
    trainer.run([0] * 3)
    assert rates == moves
    assert rates == [[pytest.approx(each)] for each in (0.1, 0.01, 0.001)]


@pytest.mark.parametrize("event", [None, MonitorEvents.OPTIMIZER_STEP_COMPLETED])
def test_a_scheduler_that_steps_right_after_the_optimizer_comes_too_late(event):
    trainer, _, optimizer, handler, moves = moved_by_a_gradient_of_ones(
        lambda _, optimizer: (optimizer.step(), None if event else scheduler.step())
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    handler.attach(trainer)
    if event:
        trainer.add_event_handler(event, lambda _: scheduler.step())
    rates = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda _: rates.append(rates_of(handler)))
    trainer.run([0] * 3)
    assert rates == moves
    assert rates == [[1.0], [0.5], [0.25]]


def test_of_several_steps_the_first_ones_learning_rate_counts():
    def train(_, optimizer):
        for lr in (0.5, 0.25):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()

    trainer, _, _, handler, _ = moved_by_a_gradient_of_ones(train)
    assert published_rates(trainer, handler, [0, 1]) == [[0.5], [0.5]]


def test_without_a_step_the_learning_rate_is_what_the_train_step_leaves():
    """In the second of three iterations, which only accumulates; no other's rate is taken for it."""

    def train(engine, optimizer):
        optimizer.param_groups[0]["lr"] = 0.5**engine.state.iteration
        if engine.state.iteration != 2:
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 7.0

    trainer, _, _, handler, _ = moved_by_a_gradient_of_ones(train)
    assert published_rates(trainer, handler, [0] * 3) == [[0.5], [0.25], [0.125]]


def test_each_optimizers_learning_rate_is_that_of_its_own_step():
    """Two optimizers of one model, each given its learning rate right before its step, and none afterwards."""
    model = nn.Linear(2, 2)
    optimizers = [torch.optim.SGD([parameter], lr=9.0) for parameter in model.parameters()]

    def train_step(*_):
        for lr, optimizer in zip((0.5, 0.25), optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 9.0

    trainer = Engine(train_step)
    handlers = [StepStatsHandler(model, each, prefix=prefix) for each, prefix in zip(optimizers, "ab", strict=True)]
    for handler in handlers:
        handler.attach(trainer)
    trainer.run([0, 1])
    assert [float(handler.metrics[f"{handler.prefix}/lr/group_0"]) for handler in handlers] == [0.5, 0.25]


class Wrapping(torch.optim.Optimizer):
    """Makes the step of another optimizer, as wrappers do."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        return self.inner.step(closure)


@pytest.mark.parametrize("of_inner", [True, False])
def test_the_learning_rate_of_a_wrapped_optimizer_is_that_of_the_step(of_inner):
    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=9.0)
    wrapping = Wrapping(inner)

    def set_rate(lr):
        for optimizer in (inner, wrapping):
            optimizer.param_groups[0]["lr"] = lr

    trainer = Engine(lambda *_: (set_rate(0.5), wrapping.step(), set_rate(9.0)))
    assert published_rates(trainer, StepStatsHandler(model, inner if of_inner else wrapping), [0, 1]) == [[0.5]] * 2


def test_parameter_norm_and_memory():
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 7).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Engine(lambda *_: nn.init.normal_(model[0].weight))
    handler = StepStatsHandler(model, optimizer)
    handler.attach(trainer)
    trainer.run([0])
    expected = torch.cat([p.detach().double().flatten() for p in model.parameters()]).norm()
    assert handler.metrics["step/parameter_norm"] == pytest.approx(float(expected), rel=1e-6)
    peak, resident = (float(handler.metrics[f"step/{name}_memory_mb"]) for name in ("peak", "resident"))
    assert 50 < resident <= peak < 1e6


def test_memory_that_a_step_takes_is_seen():
    model = nn.Linear(2, 2)
    kept = []
    trainer = Engine(lambda engine, _: kept.append(torch.ones(2**24)) if engine.state.iteration == 2 else None)
    handler = StepStatsHandler(model, torch.optim.SGD(model.parameters(), lr=0.1))
    handler.attach(trainer)
    sizes = []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda _: sizes.append(float(handler.metrics["step/resident_memory_mb"]))
    )
    trainer.run([0, 1])
    assert 60 < sizes[1] - sizes[0] < 70


def test_counting_flops_changes_nothing():
    """Dropout, batch normalisation and attention, with the counter on in every iteration."""

    def train(counted):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(8, 8), nn.Dropout(0.3), nn.TransformerEncoderLayer(8, 2, 16), nn.BatchNorm1d(10)
        )
        optimizer = torch.optim.AdamW(model.parameters())
        trainer = create_supervised_trainer(model, optimizer, F.mse_loss)
        if counted:
            handler = StepStatsHandler(model, optimizer, peak_flops=1e12)
            handler.attach(trainer)
            trainer.add_event_handler(Events.ITERATION_STARTED, lambda _: setattr(handler, "flops", None))
        data = [(torch.randn(3, 10, 8), torch.randn(3, 10, 8)) for _ in range(4)]
        trainer.run(data)
        return [*model.state_dict().values(), *(p.grad for p in model.parameters()), torch.get_rng_state()]

    assert all(map(torch.equal, train(True), train(False)))


def test_counts_what_a_compiled_model_does():
    torch._dynamo.reset()
    model = nn.Linear(5, 7)
    calls = []

    def backend(module, _):
        calls.append(module)
        return module.forward

    compiled = torch.compile(model, backend=backend)
    handler, seen = run(compiled, linear_batches(), peak_flops=1e9)
    assert handler.flops == 2 * (2 * 16 * 5 * 7)
    assert calls
    assert "step/mfu" in seen[-1]


def test_error_in_the_counted_step_leaves_no_mode_behind():
    model = nn.Linear(5, 7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    broken = [True]

    def train_step(_, batch):
        model(batch).sum().backward()
        if broken:
            broken.clear()
            raise ZeroDivisionError

    trainer = Engine(train_step)
    handler = StepStatsHandler(model, optimizer, peak_flops=1e9)
    handler.attach(trainer)
    with pytest.raises(ZeroDivisionError):
        trainer.run([torch.randn(16, 5)])
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert handler.flops is None
    trainer.state.max_epochs = None
    trainer.run([torch.randn(16, 5)] * 2)
    assert handler.flops == 2 * (2 * 16 * 5 * 7)


def test_resumed_run_counts_no_more():
    handler, _ = run(nn.Linear(5, 7), linear_batches(), peak_flops=1e9)
    model = nn.Linear(5, 7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = StepStatsHandler(model, optimizer, peak_flops=1e9)
    other.load_state_dict(copy.deepcopy(handler.state_dict()))
    trainer = create_supervised_trainer(model, optimizer, F.mse_loss)
    other.attach(trainer)
    trainer.run(linear_batches(1))
    assert other.flops == handler.flops
    assert "step/mfu" in other.metrics


@pytest.mark.parametrize("state", [{"flops": "1", "dtype": ""}, {"flops": 1, "dtype": None}])
def test_damaged_states_are_refused(state):
    model = nn.Linear(2, 2)
    handler = StepStatsHandler(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="state_dict"):
        handler.load_state_dict(state)


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, False, 312e12),
        ("NVIDIA A100-SXM4-80GB", torch.float32, False, 19.5e12),
        ("NVIDIA A100-SXM4-80GB", torch.float32, True, 156e12),
        ("NVIDIA H200", torch.float16, True, 989.4e12),
        ("NVIDIA H200 NVL", torch.float16, True, 835.5e12),
        ("NVIDIA L40S", torch.bfloat16, True, 362.05e12),
        ("NVIDIA L40", torch.bfloat16, True, None),
        ("NVIDIA L4", torch.bfloat16, True, 121e12),
        ("NVIDIA A10G", torch.bfloat16, True, None),
        ("Tesla T4", torch.float16, True, 65e12),
        ("Tesla T4", torch.bfloat16, True, None),
        ("Tesla T4", torch.float32, True, 8.1e12),
        ("NVIDIA H200", torch.float64, True, None),
        ("Some other device", torch.float16, True, None),
    ],
)
def test_peaks(name, dtype, tf32, peak):
    assert peak_flops(name, dtype, tf32) == peak


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"items": 3}, TypeError, "items"),
        ({"peak_flops": 0}, ValueError, "peak_flops"),
        ({"peak_flops": "fast"}, TypeError, "peak_flops"),
        ({"optimizer": None}, TypeError, "optimizer"),
    ],
)
def test_bad_arguments(arguments, error, words):
    model = nn.Linear(2, 2)
    arguments = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)} | arguments
    with pytest.raises(error, match=words):
        StepStatsHandler(model, **arguments)


def planted(waits, restarts=False, **arguments):
    """A training on a clock that a loader alone moves on, by so many milliseconds before each batch."""
    model = nn.Linear(5, 7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_supervised_trainer(model, optimizer, F.mse_loss)
    handler = StepStatsHandler(model, optimizer, **arguments)
    time_now = [0.0]
    handler._data.now = lambda: time_now[0]

    class Loader:
        def __iter__(self):
            for wait in waits:
                time_now[0] += wait / 1e3
                yield torch.randn(4, 5), torch.randn(4, 7)

    seen = []
    handler.attach(trainer, Events.ITERATION_STARTED(every=2))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda _: seen.append(dict(handler.metrics)))
    trainer.run(Loader(), epoch_length=len(waits) * (2 if restarts else 1), max_epochs=1)
    return trainer, handler, seen


def test_a_planted_wait_for_data_is_what_is_published():
    _, _, seen = planted([0, 50, 3, 7])
    assert [each.get("step/data_wait_ms") for each in seen] == pytest.approx([None, 50.0, None, 7.0])
    for each in seen[1::2]:
        wait, taken = each["step/data_wait_ms"], each["step/time_ms"]
        assert each["step/data_wait_share"] == pytest.approx(wait / (wait + taken))


def test_starting_a_loader_anew_is_waiting_too():
    _, _, seen = planted([5, 50], restarts=True)
    assert [each.get("step/data_wait_ms") for each in seen] == pytest.approx([None, 50.0, None, 50.0])
    _, _, seen = planted([50], restarts=True)
    assert seen[1]["step/data_wait_ms"] == pytest.approx(50.0)


def test_a_loader_that_sleeps_is_waited_for():
    """By the real clock: at least so long, and no handler or train step is in it."""
    model = nn.Linear(5, 7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = create_supervised_trainer(model, optimizer, F.mse_loss)._process_function
    trainer = Engine(lambda engine, batch: (time.sleep(0.2), step(engine, batch)))
    handler = StepStatsHandler(model, optimizer)

    def batches():
        time.sleep(0.05)
        yield from linear_batches(1)

    handler.attach(trainer)
    trainer.run(batches(), epoch_length=1, max_epochs=1)
    assert handler.metrics["step/data_wait_ms"] >= 50
    assert handler.metrics["step/data_wait_share"] < 1


def test_detaching_takes_the_clock_of_the_data_along():
    trainer, handler, _ = planted([1, 2])
    handler.detach()
    assert not trainer._event_handlers[Events.GET_BATCH_STARTED]
    assert not trainer._event_handlers[Events.GET_BATCH_COMPLETED]
    with pytest.raises(TypeError, match="slowest_rank"):
        planted([1], slowest_rank=1)
