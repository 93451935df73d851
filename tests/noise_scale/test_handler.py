"""GradientNoiseScaleHandler against the exact noise scale, from the gradients of single items."""

from __future__ import annotations

import itertools
import logging
import math

import pytest
import torch
from ignite.engine import Engine, Events
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

from ignite_monitor import GradientNoiseScaleHandler
from ignite_monitor.noise_scale.estimate import RatioOfMeans, noise_and_signal
from tests._helpers import in_turn, make_step, mse_loss, split

ITEMS = 4096


def problem(seed=0, noise=1.0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(ITEMS, 6)
    return model, x, x[:, :1] * 2 + noise * torch.randn(ITEMS, 1)


def exact(model, x, y):
    """tr of the covariance of single gradients over the squared mean, in float64."""
    parameters = {name: item.detach().double() for name, item in model.named_parameters()}

    def loss(parameters, x, y):
        return (functional_call(model, parameters, x[None]) - y[None]).square().mean()

    single = vmap(grad(loss), (None, 0, 0))(parameters, x.double(), y.double())
    rows = torch.cat([item.flatten(1) for item in single.values()], 1)
    mean = rows.mean(0)
    return float((rows - mean).square().sum(1).mean() / mean.square().sum())


def batches(x, y, size, count, seed=0):
    """Draw batches with replacement, so that their items are independent."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        chosen = torch.randint(len(x), (size,), generator=generator)
        yield x[chosen], y[chosen]


def step_of(model, optimizer, parts=4, scale=0.25, over_iterations=False, **options):
    every, parts = (parts, 1) if over_iterations else (1, parts)
    return make_step(model, optimizer, parts, every=every, factor=lambda engine: scale, **options)


def measured(monitor):
    """Return the metrics; none if the noise scale is not reported."""
    if "noise_scale/value" not in monitor.metrics:
        return {}
    return {name.rpartition("/")[2]: float(value) for name, value in monitor.metrics.items()}


def watched(step, model, optimizer, batches, event=Events.ITERATION_STARTED, **kwargs):
    """Return the metrics of each iteration, and the iterations that updated the statistics."""
    trainer = Engine(step)
    monitor = GradientNoiseScaleHandler(model, optimizer, **({"micro_batches": 4} | kwargs))
    monitor.attach(trainer, event)
    seen = []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda engine: seen.append((measured(monitor), float(monitor.state_dict()["moments"][-1]))),
    )
    trainer.run(list(batches), max_epochs=1)
    result, counts = zip(*seen, strict=True)
    return result, [later != earlier for earlier, later in zip([0.0, *counts], counts, strict=False)]


@pytest.mark.parametrize(
    ("noise", "kwargs"),
    [(0.3, {"scale": 2.0**40}), (3.0, {"over_iterations": True}), (3.0, {"scale": 1.0, "set_to_none": False})],
)
def test_near_the_exact_one_while_the_interval_is_narrow(noise, kwargs):
    model, x, y = problem(noise=noise)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    expected = exact(model, x, y)
    over = kwargs.get("over_iterations", False)
    data = batches(x, y, 16 if over else 64, 1000 if over else 250, seed=4)
    result, _ = watched(step_of(model, optimizer, **kwargs), model, optimizer, data, decay=0.996)
    result = [item for item in result if item]
    narrow = [item for item in result if item["high"] < 1.35 * item["low"]]
    assert narrow
    assert all(item["value"] == pytest.approx(expected, rel=0.15) for item in narrow)
    assert all(item["low"] < item["value"] < item["high"] <= 10 * item["low"] for item in result)


def test_micro_batches_of_different_sizes():
    """A sum of squares over parts of 1 to 64 items, against the exact covariance."""
    torch.manual_seed(0)
    mean, covariance = torch.tensor([1.0, -2.0, 0.5]).double(), torch.tensor([4.0, 1.0, 9.0]).double()
    sizes = [1, 3, 16, 64]
    parts = [mean + (covariance / n).sqrt() * torch.randn(20_000, 3, dtype=torch.float64) for n in sizes]
    squares = torch.stack([part.square().sum(1) for part in parts])
    items = torch.tensor(sizes).double()
    total = sum(parts).square().sum(1)
    weighted = (items[:, None] * squares).sum(0)
    trace, signal = noise_and_signal(squares.sum(0), weighted, items.sum(), total, torch.tensor(4.0)).mean(1).tolist()
    assert trace == pytest.approx(14.0, rel=0.03)
    assert signal == pytest.approx(5.25, rel=0.03)


def test_equal_parts_are_the_papers_formula():
    torch.manual_seed(1)
    parts = torch.randn(5, 30, dtype=torch.float64) + 0.3
    squares, small, big = parts.square().sum(1), 8.0, 40.0
    given = (squares.sum(), 8 * squares.sum(), torch.tensor(40.0), parts.sum(0).square().sum(), torch.tensor(5.0))
    g_small, g_big = squares.mean(), parts.mean(0).square().sum()
    signal = (big * g_big - small * g_small) / (big - small)
    trace = (g_small - g_big) / (1 / small - 1 / big)
    assert noise_and_signal(*given).tolist() == pytest.approx([float(trace), float(signal)], rel=1e-12)


def coverage(count, trials, decay, numerator_noise, denominator_noise):
    generator = torch.Generator().manual_seed(0)
    inside = known = 0
    for _ in range(trials):
        ratio = RatioOfMeans(decay)
        draws = torch.randn(count, 2, generator=generator, dtype=torch.float64)
        x, y = 6 + numerator_noise * (0.6 * draws[:, 1] + 0.8 * draws[:, 0]), 2 + denominator_noise * draws[:, 1]
        for pair in torch.stack([x, y], 1):
            ratio.observe(pair)
        _, low, high = ratio.interval().tolist()
        known += low == low
        inside += low <= 3 <= high
    return inside / known, known / trials


@pytest.mark.parametrize(("count", "noises"), [(21, (1.0, 0.2)), (30, (6.0, 2.0)), (60, (3.0, 4.0))])
def test_the_interval_holds_the_ratio_as_often_as_it_says(count, noises):
    inside, known = coverage(count, 300, 0.97, *noises)
    assert known > 0.5
    assert 0.91 < inside < 0.985


@pytest.mark.parametrize("decay", [0.91, 0.99])
def test_no_interval_before_twenty_effective_observations(decay):
    """The effective number of equally weighted observations would be their number; with decay it is smaller."""
    ratio = RatioOfMeans(decay)
    generator = torch.Generator().manual_seed(0)
    for count in range(1, 80):
        ratio.observe(torch.randn(2, generator=generator, dtype=torch.float64) + 10)
        weights = [decay**age for age in range(count)]
        effective = math.fsum(weights) ** 2 / math.fsum(weight**2 for weight in weights)
        assert ratio.interval().isfinite().all() == (effective >= 20)


def test_nothing_is_said_where_the_denominator_may_be_zero():
    ratio = RatioOfMeans(0.99)
    generator = torch.Generator().manual_seed(0)
    for pair in torch.randn(100, 2, generator=generator, dtype=torch.float64) + torch.tensor([3.0, 0.1]):
        ratio.observe(pair)
    assert ratio.interval().isnan().all()


def test_absent_where_the_gradients_do_not_tell():
    """At a minimum the true gradient is zero, whatever its noise."""
    model, x, _ = problem()
    y = torch.randn(ITEMS, 1)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    y -= y.mean()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    result, _ = watched(step_of(model, optimizer), model, optimizer, batches(x, y, 64, 100))
    assert sum(map(bool, result)) < 10


@pytest.mark.parametrize("what", ["parts", "not zeroed", "filter", "penalty", "overflow"])
def test_what_is_skipped(what):
    model, x, y = problem()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)

    def loss_of(model, part):
        loss = mse_loss(model, part)
        if what == "penalty":
            torch.autograd.grad(loss, model.parameters(), retain_graph=True)
        return loss

    def overflows(engine):
        return what == "overflow" and engine.state.iteration % 5 == 0

    options = {"loss_of": loss_of, "zero_at": "never" if what == "not zeroed" else "start", "leave_out": overflows}
    options["factor"] = lambda engine: math.inf if overflows(engine) else 1.0
    three, four = (make_step(model, optimizer, parts, **options) for parts in (3, 4))
    step = lambda e, batch: (three if what == "parts" and e.state.iteration % 2 else four)(e, batch)  # noqa: E731
    event = Events.ITERATION_STARTED(every=2) if what == "filter" else Events.ITERATION_STARTED
    result, _ = watched(step, model, optimizer, batches(x, y, 48, 160), event)
    expected = exact(model, x, y)
    reported = [item for item in result if item]
    if what == "not zeroed":
        assert not reported
    else:
        assert len(reported) > 50
        assert all(item["low"] * 0.8 < expected < item["high"] * 1.25 for item in reported[-10:])


def test_no_number_of_items_of_a_step_of_which_a_part_is_not_monitored():
    """Eight backward passes, of which every second one is monitored: as many as there should be micro-batches."""
    model, x, y = problem()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    step = make_step(model, optimizer, every=8)
    trainer, published = Engine(step), []
    monitor = GradientNoiseScaleHandler(model, optimizer, micro_batches=4)
    monitor.attach(trainer, Events.ITERATION_STARTED(every=2))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda _: published.append(dict(monitor.metrics)))
    trainer.run(list(batches(x, y, 16, 64)))
    assert not any(published)


def test_a_step_that_is_made_otherwise_is_reported_once(caplog):
    model, x, y = problem()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with caplog.at_level(logging.WARNING):
        result, _ = watched(step_of(model, optimizer, parts=2), model, optimizer, batches(x, y, 16, 60))
    assert [message for message in caplog.messages if "noise_scale" in message] == [
        "GradientNoiseScaleHandler (noise_scale): iteration 50: no value after 50 optimizer steps: the last was made "
        "from 2 backward passes in monitored iterations, and micro_batches is 4"
    ]
    assert not any(result)


def test_the_loss_scale_does_not_weigh_the_steps(caplog):
    """The noise grows when the scale falls: with a scale within the gradients the earlier steps would count alone."""

    def data(x):
        for number, (part, _) in enumerate(batches(x, x, 64, 240)):
            yield part, part[:, :1] * 2 + (0.3 if number < 120 else 3.0) * torch.randn(64, 1)

    def train(how):
        model, x, _ = problem()
        optimizer = torch.optim.SGD(model.parameters(), 1e-4)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=10**6) if how != "plain" else None

        def change(engine):
            if engine.state.iteration == 120 and scaler is not None:
                scaler.update(2.0**6)

        step = step_of(model, optimizer, scaler=scaler)
        given = {"scaler": scaler} if how == "given" else {}
        both = in_turn(step, lambda engine, batch: change(engine))
        return watched(both, model, optimizer, data(x), decay=0.97, **given)[0]

    expected, actual = train("plain"), train("given")
    assert expected[-1]["value"] > 2 * expected[110]["value"]
    for one, other in zip(actual, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    assert not caplog.messages
    assert not any(train("not given"))
    assert "give the argument scaler" in caplog.text


@pytest.mark.parametrize("what", ["zeroed", "zeroed in place", "clipped"])
def test_a_step_whose_parts_were_changed_on_the_way_is_skipped(what):
    model, x, y = problem()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)

    is_first = itertools.cycle([True, False])

    def change(engine):
        if next(is_first) and engine.state.iteration % 2 == 0:
            if what == "clipped":
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            else:
                optimizer.zero_grad(set_to_none=what == "zeroed")

    step = make_step(model, optimizer, 2, clip=1e-3, after_backward=change)  # it clips after the last backward too
    result, entered = watched(step, model, optimizer, batches(x, y, 64, 60), micro_batches=2)
    assert entered == [True, False] * 30
    assert result[-2]
    assert not any(result[1::2])


@pytest.mark.parametrize("what", ["not zeroed", "scaled", "now and then", "overflow"])
def test_gradients_that_are_changed_on_the_way_in_each_step_are_reported_once(what, caplog):
    model, x, y = problem()
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-4)

    def change(engine):
        if what == "scaled" or (what == "now and then" and engine.state.iteration % 49):
            for parameter in model.parameters():
                parameter.grad *= 0.9

    options = {"zero_at": "never" if what == "not zeroed" else "start", "after_backward": change}
    options["factor"] = lambda engine: math.nan if what == "overflow" else 1.0
    result, _ = watched(
        make_step(model, optimizer, 3, **options), model, optimizer, batches(x, y, 48, 120), micro_batches=3
    )
    at = 51 if what == "not zeroed" else 50  # the first step starts from zero
    text = f"GradientNoiseScaleHandler (noise_scale): iteration {at}: no value: in each of the last 50 optimizer steps "
    text += "gradients did not start from zero, or were changed between two backward passes"
    assert caplog.messages == ([text] if what in ("not zeroed", "scaled") else [])
    assert not any(result) or what == "now and then"


def test_parameters_that_the_train_step_adds_do_not_count_in_its_step():
    """The value is that of the parameters that it had before."""
    model, x, y = problem()

    def train(adds):
        optimizer = torch.optim.SGD(model[0].parameters(), 0.0)

        def add(engine, _):
            if adds and engine.state.iteration == 30:
                optimizer.add_param_group({"params": [*model[2].parameters()]})

        return watched(in_turn(add, step_of(model, optimizer)), model, optimizer, batches(x, y, 64, 30))

    assert train(True) == train(False)
    assert train(True)[0][-1]


def test_parts_of_unequal_sizes_are_not_reported(caplog):
    """50 items make parts of 13, 13, 13 and 11."""
    model, x, y = problem()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for items in (None, lambda batch: -48):
        with caplog.at_level(logging.WARNING):
            result, _ = watched(step_of(model, optimizer), model, optimizer, batches(x, y, 50, 100), items=items)
        assert not any(result)
    assert "see the argument items" in caplog.text


def test_the_unit_is_that_of_items():
    """Half as many items, in the same gradients, are half of the noise scale."""
    model, x, y = problem()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    half = lambda batch: len(batch[0]) / 2  # noqa: E731
    result = [
        watched(step_of(model, optimizer), model, optimizer, batches(x, y, 64, 60), items=items)[0][-1]
        for items in (None, half)
    ]
    assert result[1] == pytest.approx({name: value / 2 for name, value in result[0].items()})
    assert result[1]["batch"] == 32


@pytest.mark.parametrize("items", [lambda batch: {}["x"], lambda batch: "many", lambda batch: [16, 16], torch.stack])
def test_an_error_of_items_is_reported_once_and_does_not_end_training(items, caplog):
    model, x, y = problem()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    result, _ = watched(step_of(model, optimizer), model, optimizer, batches(x, y, 8, 3), items=items)
    assert list(result) == [{}] * 3
    assert len([text for text in caplog.messages if "the number of items is not known" in text]) == 1


@pytest.mark.parametrize("first", ["generator", "discriminator"])
def test_of_a_gan_only_its_own_backward_passes_count(first):
    """Those of the generator reach the discriminator too, whose gradients are then thrown away."""

    def train(with_generator):
        model, x, y = problem()
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        generator = nn.Linear(6, 6)

        own = make_step(model, optimizer, 2)
        other = lambda _, batch: with_generator and model(generator(batch[0])).mean().backward()  # noqa: E731
        step = in_turn(*(own, other) if first == "discriminator" else (other, own))
        return watched(step, model, optimizer, batches(x, y, 64, 60), micro_batches=2)[0]

    expected = train(False)
    assert expected[-1]
    assert list(train(True)) == ([{}] * 60 if first == "discriminator" else list(expected))


@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor:UserWarning")
def test_backward_in_a_compiled_function():
    result = []
    for disable in (False, True):
        torch._dynamo.reset()
        model, x, y = problem()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)

        @torch.compile(backend="eager", disable=disable)
        def backward(batch, model=model):
            mse_loss(model, batch).backward()

        def step(engine, batch, backward=backward, optimizer=optimizer):
            optimizer.zero_grad()
            for part in split(batch, 2):
                backward(part)
            optimizer.step()

        published, _ = watched(step, model, optimizer, batches(x, y, 64, 30), micro_batches=2)
        result.append((published[-1], dict(model.state_dict())))
    assert result[0][0]
    torch.testing.assert_close(*result)
    torch._dynamo.reset()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_backward_with_others_inside_of_it_is_one(use_reentrant):
    """Reentrant checkpoints, one of which holds the first gradients of the backward, and one the last but one."""

    def train(checkpointed):
        model, x, y = problem()
        optimizer = torch.optim.SGD(model.parameters(), 0.001)
        first, middle, last = model

        def run(module, x):
            return checkpoint(module, x, use_reentrant=use_reentrant) if checkpointed else module(x)

        def loss_of(_, batch):
            return mse_loss(lambda x: run(last, run(middle, run(first, x.clone().requires_grad_()))), batch)

        return watched(step_of(model, optimizer, loss_of=loss_of), model, optimizer, batches(x, y, 64, 60))[0]

    expected, actual = train(False), train(True)
    assert expected[-1]
    for one, other in zip(actual, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
