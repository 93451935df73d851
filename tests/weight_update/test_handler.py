"""WeightUpdateHandler against what an independent float64 computation says of the same train steps."""

from __future__ import annotations

import logging
import math
import statistics

import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import nn
from torch.amp.grad_scaler import GradScaler

from ignite_monitor import GradMonitor, MonitorEvents, StaticThreshold, WeightUpdateHandler
from tests._helpers import ListLogger, make_step, mse_loss, run_monitored, unset_default_device
from tests._truth import norm, order_statistics, update_ratio

KEYS = {
    "grad_median", "grad_p95", "grad_min", "grad_max", "vanishing_count", "exploding_count",
    "update_ratio_median", "update_ratio_p95", "update_ratio_min", "update_ratio_max", "frozen_count",
}  # fmt: skip
LOGGER = "ignite_monitor.weight_update.handler.WeightUpdateHandler"


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 3))


def make_batches(count: int, factor: float = 1.0):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 5, generator=generator), factor * torch.randn(8, 3, generator=generator))] * count


class Watched:
    """An engine with a handler, and for each iteration what is true (from whole copies) and what was published."""

    def __init__(self, model, train_step, handler):
        self.model, self.handler, self.engine = model, handler, Engine(train_step)
        self.ratios: list[dict[str, float]] = []
        self.norms: list[dict[str, float]] = []
        self.published: list[dict[str, float]] = []
        self.engine.add_event_handler(Events.ITERATION_STARTED, self._start)
        handler.attach(self.engine)
        self.engine.add_event_handler(MonitorEvents.GRADIENTS_READY, self._gradients)
        self.engine.add_event_handler(Events.ITERATION_COMPLETED, self._complete)

    def run(self, batches, **kwargs):
        self.engine.run(batches, **kwargs)
        return self

    def _start(self, _):
        self._before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.norms.append({})

    def _gradients(self, _):
        scaler = self.handler.scaler
        scale = scaler.get_scale() if scaler is not None else 1.0
        self.norms[-1] = {n: norm(p.grad) / scale for n, p in self.model.named_parameters() if p.grad is not None}

    def _complete(self, engine):
        self.ratios.append({
            name: update_ratio(self._before[name], p, self.handler.eps)
            for name, p in self.model.named_parameters() if name in self._before
        })  # fmt: skip
        self.published.append({
            name.removeprefix("monitor/"): float(value) for name, value in engine.state.metrics.items()
        })  # fmt: skip

    def check(self, *iterations: int, only=None, rel=1e-4):
        """The published values of the iterations are those of the parameters that ``only`` accepts."""
        for i in iterations or range(len(self.published)):
            ratios = [ratio for name, ratio in self.ratios[i].items() if only is None or only(name)]
            norms = [value for name, value in self.norms[i].items() if only is None or only(name)]
            expected = order_statistics("update_ratio", ratios) | order_statistics("grad", norms)
            got = {name: self.published[i][name] for name in expected}
            assert got == pytest.approx(expected, rel=rel, abs=1e-12), i


# The ratio


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


@pytest.mark.parametrize("given", [True, False], ids=["optimizer given", "not given"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ratio_is_of_what_the_train_step_did(name, given):
    model = make_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    handler = WeightUpdateHandler(model, optimizer if given else None, sample_size=None)
    run = Watched(model, make_step(model, optimizer), handler).run(make_batches(4))
    assert all(values.keys() == KEYS for values in run.published)
    run.check()


def normal(shape, seed, uneven=False):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if uneven:  # one element of three has nearly all of the weight
        values.view(-1)[::3] *= 20
    return values


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("sample_size", [256, 1024])
def test_sampled_ratio_is_unbiased_and_within_the_stated_error_and_the_norm_exact(sample_size, uneven):
    model = nn.ParameterDict({f"w{i}": nn.Parameter(normal((96, 128), i)) for i in range(40)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = {name: normal((96, 128), 100 + i, uneven) for i, name in enumerate(model)}

    def loss_of(model, _):
        return sum((model[name] * gradient).sum() for name, gradient in gradients.items())

    handler = WeightUpdateHandler(model, sample_size=sample_size)
    run = Watched(model, make_step(model, optimizer, loss_of=loss_of), handler).run(make_batches(1))
    x = gradients["w0"].double()
    kurtosis = float(x.pow(4).mean() / x.square().mean() ** 2)
    error = math.sqrt((kurtosis - 1) / (4 * sample_size))
    errors = [handler.diagnostics[name].update_ratio / run.ratios[0][name] - 1 for name in model]
    # 40 errors give their root mean square to 11 %, and their mean to error / 6.3.
    assert 0.6 * error < math.sqrt(statistics.fmean(item * item for item in errors)) < 1.4 * error
    assert abs(statistics.fmean(errors)) < 4 * error / math.sqrt(40)
    for name in model:
        assert handler.diagnostics[name].grad_norm == pytest.approx(norm(gradients[name]), rel=1e-6)


@pytest.mark.parametrize("scale", [1e-200, 1e-170, 1e160, 1e200])
@pytest.mark.parametrize("sample_size", [None, 64])
def test_float64_whose_squares_leave_the_range(scale, sample_size):
    model = nn.ParameterDict({name: nn.Parameter(scale * normal((30, 40), i).double()) for i, name in enumerate("ab")})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = {name: scale * normal((30, 40), 5 + i).double() for i, name in enumerate("ab")}
    step = make_step(model, optimizer, loss_of=lambda m, _: sum((m[name] * g).sum() for name, g in gradients.items()))
    handler = WeightUpdateHandler(model, sample_size=sample_size, eps=1e-300)
    run_monitored(step, [0], handler)
    for name, item in handler.diagnostics.items():
        whole = norm(gradients[name] / scale)
        assert item.grad_norm / scale == pytest.approx(whole, rel=1e-9)
        ratio = 0.1 * whole / norm(model[name] / scale + 0.1 * gradients[name] / scale)
        assert item.update_ratio == pytest.approx(ratio, rel=0.3 if sample_size else 1e-9)


# name -> shape, and the elements that a step moves, from a batch of 12 numbers below 3,000
SPARSE = {
    "item bias": ((3000,), lambda table, batch: table[batch]),
    "embedding": ((3000, 20), lambda table, batch: table[batch]),
    "sparse embedding": ((3000, 20), lambda table, batch: F.embedding(batch, table, sparse=True)),
    "sparse bag": ((3000, 20), lambda table, batch: F.embedding_bag(batch[None], table, sparse=True)),
    "positions": ((1, 3000, 20), lambda table, batch: table[:, batch]),
    "tables": ((4, 3000, 20), lambda table, batch: table[:, batch]),
    "blocks": ((300, 10, 20), lambda table, batch: table[batch // 10, 3:6]),
    "experts": ((16, 50, 60), lambda table, batch: table[batch[0] % 16]),
    "one element": ((100, 200), lambda table, batch: table[batch[0] % 100, batch[1] % 200]),
}


@pytest.mark.parametrize("kind", SPARSE)
def test_sparsely_updated_parameters_are_not_frozen_and_soon_exact(kind, caplog):
    shape, look_up = SPARSE[kind]
    torch.manual_seed(0)
    model = nn.ParameterDict({"table": nn.Parameter(torch.randn(shape)), "scale": nn.Parameter(torch.ones(1))})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = make_step(
        model, optimizer, loss_of=lambda m, batch: (look_up(m["table"], batch) * m["scale"]).square().mean()
    )
    handler = WeightUpdateHandler(model, optimizer, frozen_patience_steps=1)
    run, seen = Watched(model, step, handler), []
    run.engine.add_event_handler(Events.ITERATION_COMPLETED, lambda _: seen.append(handler.diagnostics["table"]))
    run.run(torch.randint(3000, (12, 12)))
    assert not any(item.is_frozen for item in seen)
    assert frozen_counts(run) == [0] * 12
    for ratios, norms, item in zip(run.ratios, run.norms, seen, strict=True):
        assert item.grad_norm == pytest.approx(norms["table"], rel=1e-5)
        # Of 1,024 sampled elements at least 32 have moved, or all are measured from the next iteration on.
        is_measured = item.update_ratio == pytest.approx(ratios["table"], rel=0.4 if kind == "experts" else 1e-4)
        assert is_measured or (item is seen[0] and math.isnan(item.update_ratio))
    assert not caplog.messages


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_has_no_ratio_although_its_sample_is(value):
    """Of 30,000 elements 64 are sampled, all of which move."""
    model = nn.ParameterDict({"bad": nn.Parameter(torch.ones(30_000)), "good": nn.Parameter(torch.ones(2))})
    model["bad"].data[17] = value
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = make_step(model, optimizer, loss_of=lambda m, _: m["bad"].nan_to_num(0, 0).sum() + m["good"].sum())
    handler = WeightUpdateHandler(model, optimizer, sample_size=64)
    (published,) = run_monitored(step, [0], handler)
    assert math.isnan(handler.diagnostics["bad"].update_ratio)
    assert published["monitor/update_ratio_min"] == pytest.approx(0.5)


def test_a_large_parameter_is_frozen_once_all_of_it_has_been_compared():
    """Also after resuming: the second handler continues with what the first has learned."""
    model = make_model()
    model[0] = nn.Linear(5, 700)
    model[1], model[3] = nn.LayerNorm(700), nn.Linear(700, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handler, state = WeightUpdateHandler(model, optimizer, frozen_patience_steps=2), None
    for expected in ([0, 0, 1], [1, 1, 0]):
        if state is not None:
            handler.detach()
            handler = WeightUpdateHandler(model, optimizer, frozen_patience_steps=2)
            handler.load_state_dict(state)
        run = Watched(model, still_step(model, optimizer, {1, 2, 3} if state is None else {1, 2}), handler)
        run.run(make_batches(3))
        state = handler.state_dict()
        assert frozen_counts(run) == expected


def test_the_sample_is_that_of_an_independent_generator():
    """Seeded by the FNV-1a hash of the name; with replacement; small parameters as a whole."""
    model = nn.Linear(30, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handler = WeightUpdateHandler(model, optimizer, sample_size=100)
    before = model.weight.detach().double().flatten()
    run_monitored(lambda *_: (model(torch.ones(2, 30)).square().sum().backward(), optimizer.step()), [0], handler)
    seed = 0xCBF29CE484222325
    for byte in b"weight":
        seed = (seed ^ byte) * 0x100000001B3 % 2**64
    index = torch.randint(1200, (100,), generator=torch.Generator().manual_seed(seed))
    change = (model.weight.detach().double().flatten() - before)[index]
    result = handler.diagnostics
    sampled = float(change.norm() * math.sqrt(12) / before.norm())
    assert result["weight"].update_ratio == pytest.approx(sampled, rel=1e-5)
    assert result["weight"].grad_norm == pytest.approx(norm(model.weight.grad), rel=1e-6)
    assert result["bias"].grad_norm == pytest.approx(norm(model.bias.grad), rel=1e-6)


# What is frozen


def frozen_counts(run):
    return [values.get("frozen_count") for values in run.published]


def still_step(model, optimizer, still):
    """A train step in whose iterations ``still`` one parameter gets a gradient of 0."""

    def zero_one(engine):
        if engine.state.iteration in still:
            model.get_parameter("3.weight").grad.zero_()

    return make_step(model, optimizer, before_step=zero_one)


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_frozen_after_patience_and_thawed_as_soon_as_it_moves(caplog, patience):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handler = WeightUpdateHandler(model, optimizer, frozen_patience_steps=patience)
    still = {2, 3, 5, 6, 7, 8, 10, 11, 12}
    run = Watched(model, still_step(model, optimizer, still), handler)
    frozen, warned = [], []
    run.engine.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda _: (frozen.append(handler.diagnostics["3.weight"].is_frozen), warned.append(len(caplog.messages))),
    )
    with caplog.at_level(logging.WARNING, LOGGER):
        run.run(make_batches(12))
    in_a_row = [0]
    for iteration in range(1, 13):
        in_a_row.append(in_a_row[-1] + 1 if iteration in still else 0)
    expected = [count >= patience for count in in_a_row[1:]]
    assert frozen_counts(run) == expected
    assert frozen == expected
    # One warning, in the iteration in which it freezes first.
    assert warned == [int(any(expected[: i + 1])) for i in range(12)]
    (message,) = caplog.messages
    assert "3.weight" in message
    assert "0.weight" not in message


@pytest.mark.parametrize("signs", [(1, -1), (1, -1, 0), (-1, 1, 1, -1)])
def test_steps_of_an_iteration_that_cancel_are_not_frozen(signs):
    """All numbers are multiples of 1/8, so that sums have no rounding; the second parameter gets gradients of 0."""
    model = nn.ParameterList([torch.ones(6), torch.ones(6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def train_step(engine, batch):
        for sign in signs:
            model[0].grad, model[1].grad = torch.full((6,), sign / 4), torch.zeros(6)
            optimizer.step()

    handler = WeightUpdateHandler(model, optimizer)
    run = Watched(model, train_step, handler).run([None] * 4)
    assert model[0].tolist() == [1.0] * 6
    assert frozen_counts(run) == [0, 0, 1, 1]
    assert [handler.diagnostics[name].is_frozen for name in ("0", "1")] == [False, True]


@pytest.mark.parametrize("given", [True, False])
def test_frozen_because_no_gradient_reaches_it(given):
    """A misplaced ``detach()`` causes this: the optimizer ignores parameters without a gradient."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def loss_of(model, batch):
        hidden = model[:3](batch[0])
        return F.mse_loss(model[3](hidden.detach() if run.engine.state.iteration > 2 else hidden), batch[1])

    handler = WeightUpdateHandler(model, optimizer if given else None)
    run = Watched(model, make_step(model, optimizer, loss_of=loss_of), handler)
    run.run(make_batches(6))
    assert frozen_counts(run) == [0, 0, 0, 0, 4, 4]
    assert [values["update_ratio_min"] == 0 for values in run.published] == [False] * 2 + [True] * 4
    diagnostics = handler.diagnostics
    assert {name for name, item in diagnostics.items() if item.is_frozen} == {
        f"{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")
    }
    assert math.isnan(diagnostics["0.weight"].grad_norm)
    assert not diagnostics["0.weight"].is_vanishing


class RateOfEach(torch.optim.Optimizer):
    """A learning rate for each parameter of a group, in one tensor."""

    def __init__(self, parameters):
        parameters = [*parameters]
        super().__init__(parameters, {"lr": torch.full((len(parameters),), 0.1)})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for rate, parameter in zip(group["lr"], group["params"], strict=True):
                parameter.sub_(rate * parameter.grad)


def test_a_learning_rate_of_several_numbers_is_not_judged(caplog):
    model = make_model()
    optimizer = RateOfEach(model.parameters())
    handler = WeightUpdateHandler(model, optimizer)
    watched = Watched(model, make_step(model, optimizer), handler)
    watched.run(make_batches(3))
    assert watched.published[-1]["update_ratio_max"] == pytest.approx(max(watched.ratios[-1].values()), rel=1e-5)
    assert not caplog.messages


@pytest.mark.parametrize("why", ["requires_grad", "no group", "lr 0", "tensor lr 0", "lr 0, fused"])
def test_not_frozen_because_it_was_not_to_move(why):
    model = make_model()
    head, rest = list(model[3].parameters()), list(model[:2].parameters())
    groups = [{"params": rest}]
    if why != "no group":
        rate = {"lr 0": 0.0, "lr 0, fused": 0.0, "tensor lr 0": torch.tensor(0.0)}.get(why, 0.1)
        groups.append({"params": head, "lr": rate})
    optimizer = torch.optim.SGD(groups, lr=0.1, fused=why == "lr 0, fused")
    if why == "lr 0, fused":
        optimizer.found_inf = torch.zeros(())  # as a GradScaler does
    if why == "requires_grad":
        model[3].requires_grad_(False)

    for given in (optimizer, None):
        handler = WeightUpdateHandler(model, given)
        run = Watched(model, make_step(model, optimizer), handler).run(make_batches(5))
        assert frozen_counts(run) == [0.0] * 5
        assert all(values["update_ratio_min"] > 0 for values in run.published)
        assert math.isnan(handler.diagnostics["3.weight"].update_ratio)
        assert not handler.diagnostics["3.weight"].is_frozen


@pytest.mark.parametrize("fused", [False, True])
def test_amp_overflow_is_no_step(fused):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)

    factor = lambda engine: math.inf if engine.state.iteration in (2, 3, 4, 5) else 1.0  # noqa: E731
    step = make_step(model, optimizer, factor=factor, scaler=scaler, zero_at="end")
    handler = WeightUpdateHandler(model, optimizer, scaler=scaler, frozen_patience_steps=2)
    run = Watched(model, step, handler).run(make_batches(7))
    run.check(0, 5, 6)
    for values in run.published[1:5]:
        assert all(math.isnan(values.get(key, math.nan)) for key in KEYS - {"vanishing_count", "exploding_count"})
        assert (values["vanishing_count"], values["exploding_count"]) == (0, 0)
    assert [frozen_counts(run)[i] for i in (0, 5, 6)] == [0, 0, 0]


@pytest.mark.parametrize("first", ["handler", "grad monitor"])
@pytest.mark.parametrize("how", ["plain", "fused", "closure"])
def test_step_that_grad_monitor_skipped_is_no_step(first, how):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=how == "fused")

    factor = lambda engine: 1e6 if engine.state.iteration in (3, 4, 5) else 1.0  # noqa: E731
    step = make_step(model, optimizer, factor=factor, closure=how == "closure")
    handler = WeightUpdateHandler(model, optimizer, frozen_patience_steps=2)
    monitor = GradMonitor(model, optimizer, on_spike="skip", threshold=StaticThreshold(1e4))
    run = Watched(model, step, handler)
    if first == "grad monitor":
        handler.detach()
        monitor.attach(run.engine)
        handler.attach(run.engine)
    else:
        monitor.attach(run.engine)
    run.run(make_batches(7))
    assert [max(ratios.values()) == 0 for ratios in run.ratios] == [False, False, True, True, True, False, False]
    for i in (2, 3, 4):
        run.published[i].setdefault("frozen_count", math.nan)
        assert math.isnan(frozen_counts(run)[i])
        assert math.isnan(run.published[i].get("update_ratio_max", math.nan))
        assert run.published[i]["grad_max"] == pytest.approx(max(run.norms[i].values()), rel=1e-5)
    assert [frozen_counts(run)[i] for i in (0, 1, 5, 6)] == [0] * 4
    run.check(0, 1, 5, 6)


def test_state_is_kept_by_name_through_wrapping_and_new_parameters():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handler = WeightUpdateHandler(model, optimizer)
    Watched(model, still_step(model, optimizer, {1, 2}), handler).run(make_batches(2))
    model.append(nn.Linear(3, 3))
    wrapped = nn.DataParallel(model)
    other = WeightUpdateHandler(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))
    other.load_state_dict(handler.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    run_monitored(still_step(model, optimizer, {1}), make_batches(1), other)
    assert list(other.diagnostics) == [*handler.diagnostics, "4.weight", "4.bias"]
    assert other.diagnostics["3.weight"].is_frozen
    with pytest.raises(ValueError, match="names"):
        WeightUpdateHandler(nn.Linear(2, 2)).load_state_dict(
            WeightUpdateHandler(nn.Sequential(nn.Linear(2, 2))).state_dict()
        )


# Gradients


def test_gradients_of_optimizers_that_step_within_backward_are_measured_when_the_step_starts():
    model, norms = make_model(), {}
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter):
        norms[parameter] = norm(parameter.grad)
        optimizers[parameter].step()
        optimizers[parameter].zero_grad(set_to_none=False)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    run = Watched(model, lambda _, batch: mse_loss(model, batch).backward(), WeightUpdateHandler(model))
    for _ in range(3):
        run.run(make_batches(1), max_epochs=len(run.published) + 1)
        run.norms[-1] = {name: norms[parameter] for name, parameter in model.named_parameters()}
    run.check()


def test_gradients_that_a_hook_takes_away_end_no_training_with_a_scaler():
    """As an optimizer on the CPU does, of a model on a device."""
    model, taken = make_model(), {}

    def take(parameter):
        taken[parameter], parameter.grad = parameter.grad, None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(take)
    scaler = GradScaler("cpu")
    handler = WeightUpdateHandler(model, scaler=scaler)
    step = lambda _, batch: scaler.scale(mse_loss(model, batch)).backward()  # noqa: E731
    assert run_monitored(step, make_batches(2), handler) == [{}, {}]
    assert len(taken) == 6


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_gradient_is_exploding(value):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handler = WeightUpdateHandler(model, optimizer)
    run_monitored(make_step(model, optimizer), [(torch.full((8, 5), value), torch.zeros(8, 3))], handler)
    assert float(handler.metrics["monitor/exploding_count"]) == 6


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_gradients_are_unscaled_under_a_scaler(fused, unscale):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = GradScaler("cpu", init_scale=2.0**12, growth_interval=2)

    step = make_step(model, optimizer, scaler=scaler, clip=math.inf if unscale else None)
    Watched(model, step, WeightUpdateHandler(model, scaler=scaler)).run(make_batches(6)).check()


def test_missing_gradient_is_neither_vanishing_nor_exploding_and_zero_is_vanishing():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, factor):
            ctx.factor = factor
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g * ctx.factor, None

    unused, zero, large = (nn.Parameter(torch.ones(3)) for _ in range(3))
    model.unused, model.zero, model.large = unused, zero, large
    optimizer.add_param_group({"params": [unused, zero, large]})

    def loss_of(model, batch):
        return mse_loss(model, batch) + Scale.apply(zero, 0.0).sum() + Scale.apply(large, 1e3).sum()

    handler = WeightUpdateHandler(model, optimizer)
    run = Watched(model, make_step(model, optimizer, loss_of=loss_of), handler).run(make_batches(2))
    assert [(v["vanishing_count"], v["exploding_count"]) for v in run.published] == [(1, 1)] * 2
    diagnostics = handler.diagnostics
    assert math.isnan(diagnostics["unused"].grad_norm)
    assert not (diagnostics["unused"].is_vanishing)
    assert not (diagnostics["unused"].is_exploding)
    assert (diagnostics["zero"].is_vanishing, diagnostics["large"].is_exploding) == (True, True)
    assert diagnostics["large"].grad_norm == pytest.approx(1e3 * math.sqrt(3))


# Low precision


class MasterSGD(torch.optim.Optimizer):
    """Updates float32 copies of low-precision weights, as mixed-precision optimizers do."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    master = state.setdefault("master_param", parameter.detach().float().clone())
                    master.sub_(parameter.grad.float(), alpha=group["lr"])
                    parameter.copy_(master)


@pytest.mark.parametrize("given", [True, False])
def test_bfloat16_with_a_master_copy_has_the_ratio_of_the_weights(given, caplog):
    model = make_model().to(torch.bfloat16)
    optimizer = MasterSGD(model.parameters(), lr=0.1)
    expected = []

    def train_step(engine, batch):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        make_step(model, optimizer)(engine, [item.bfloat16() for item in batch])
        expected.append(max(map(update_ratio, before, model.parameters())))

    handler = WeightUpdateHandler(model, optimizer if given else None)
    with caplog.at_level(logging.WARNING, LOGGER):
        published = run_monitored(train_step, make_batches(3), handler)
    assert [values["monitor/update_ratio_max"] for values in published] == pytest.approx(expected, rel=1e-3)
    assert "monitor/lost_update_fraction" not in published[-1]
    assert not caplog.records


# Unusual parameters


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex32], ids=str)
def test_parameters_of_dtypes_that_torch_does_not_compute_with_are_left_alone(dtype):
    model = make_model()
    model.scaled = nn.Parameter(torch.zeros(2000).to(dtype), requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward = nn.Sequential(*list(model)[:4])
    handler = WeightUpdateHandler(model, sample_size=4)
    run = Watched(forward, make_step(forward, optimizer), handler).run(make_batches(2))
    assert run.published[-1]["update_ratio_min"] > 0
    assert math.isnan(handler.diagnostics["scaled"].update_ratio)


@pytest.mark.parametrize("change", ["append", "replace"])
@pytest.mark.parametrize("when", ["between iterations", "in a train step"])
def test_parameters_that_are_added_or_replaced(when, change):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def grow():
        layer = nn.Linear(3, 3) if change == "append" else nn.Linear(7, 3, bias=False)
        if change == "append":
            model.append(layer)
        else:
            model[3] = layer
        optimizer.add_param_group({"params": list(layer.parameters())})

    def train_step(engine, batch):
        if when == "in a train step" and engine.state.iteration == 3:
            grow()
        make_step(model, optimizer)(engine, batch)

    run = Watched(model, train_step, WeightUpdateHandler(model))
    run.engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda _: when != "in a train step" and grow())
    run.run(make_batches(5))
    run.check(0, 1, 3, 4)
    assert list(run.handler.diagnostics) == [name for name, _ in model.named_parameters()]
    if when == "in a train step":
        assert run.published[2] == {}
    else:
        run.check(2)


# Names, loggers and synchronisations


@pytest.mark.parametrize("top_k", [0, 2, 5])
def test_named_keys(top_k):
    model = make_model()
    groups = [list(model[0].parameters()), list(model[1:].parameters())]
    optimizer = torch.optim.SGD([{"params": group} for group in groups], lr=0.1)

    def zero_some(engine):
        for parameter in (model[0].weight, model[3].weight):
            parameter.grad.zero_()

    handler = WeightUpdateHandler(model, optimizer, top_k=top_k, frozen_patience_steps=2)
    logger = ListLogger()
    run = Watched(model, make_step(model, optimizer, before_step=zero_some), handler)
    handler.log_to(logger, run.engine)
    run.run(make_batches(6))
    logged = [values for _, values in logger.written]
    assert len(logged) == 6
    for i, named in enumerate(logged):
        gradients = {name: value for name, value in named.items() if "topk_grad" in name}
        largest = sorted(run.norms[i].items(), key=lambda pair: -pair[1])[:top_k]
        assert gradients == pytest.approx({f"monitor/topk_grad/{name}": value for name, value in largest}, rel=1e-5)
        ratios = {name: value for name, value in named.items() if "largest_update_ratio" in name}
        if top_k:
            of_first, of_rest = (
                [ratio for n, ratio in run.ratios[i].items() if n.startswith("0.") is it] for it in (True, False)
            )
            assert list(ratios.values()) == pytest.approx([max(of_first), max(of_rest)], rel=1e-4)
            owners = [
                name.removeprefix(f"monitor/largest_update_ratio/group_{group}/") for group, name in enumerate(ratios)
            ]
            assert [run.ratios[i][owner] for owner in owners] == pytest.approx(list(ratios.values()), rel=1e-4)
        smallest = {name: value for name, value in named.items() if "smallest_grad" in name}
        expected = sorted(run.norms[i].items(), key=lambda pair: pair[1])[:top_k]
        assert smallest == pytest.approx({f"monitor/smallest_grad/{name}": norm for name, norm in expected}, rel=1e-5)
        weights = {name: value for name, value in named.items() if "largest_weight" in name}
        assert len(weights) == min(top_k, 5)
        assert len(named) == 11 + len({**gradients, **smallest, **weights}) + 2 * bool(top_k)
    assert {name: float(value) for name, value in run.engine.state.metrics.items()} == logged[-1]


def test_largest_weights_are_those_before_an_iteration_without_a_step_too():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    handler, logger = WeightUpdateHandler(model, optimizer), ListLogger()
    step, true = make_step(model, optimizer, every=3, loss_of=lambda m, x: m(x).square().mean()), []

    def train_step(engine, batch):
        true.append(norm(model.weight))
        step(engine, batch)

    engine = Engine(train_step)
    handler.attach(engine)
    handler.log_to(logger, engine)
    engine.run(torch.randn(7, 4, 3))
    assert [values["monitor/largest_weight/weight"] for _, values in logger.written] == pytest.approx(true, rel=1e-6)
    assert len(set(true)) == 3


def test_diagnostics_are_python_numbers_before_during_and_after_a_run():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handler = WeightUpdateHandler(model, optimizer)
    for gradient, ratio, *flags in handler.diagnostics.values():
        assert math.isnan(gradient + ratio)
        assert not any(flags)
    run = Watched(model, make_step(model, optimizer), handler).run(make_batches(3))
    after = handler.diagnostics
    for name, item in after.items():
        assert [type(value) for value in item] == [float, float, bool, bool, bool]
        assert item.update_ratio == pytest.approx(run.ratios[-1][name], rel=1e-4)
        assert item.grad_norm == pytest.approx(run.norms[-1][name], rel=1e-4)
    handler.detach()
    assert handler.diagnostics == after


@pytest.mark.parametrize("how", [{"lr": 0.0}, {"every": 9}])
def test_no_step_that_moves_a_parameter_is_no_reason_for_a_warning(caplog, how):
    """A learning rate of 0, and gradients accumulated over more iterations than are monitored."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=how.get("lr", 0.1))
    step = make_step(model, optimizer, every=how.get("every", 1))
    with caplog.at_level(logging.WARNING, LOGGER):
        run = Watched(model, step, WeightUpdateHandler(model)).run(make_batches(8))
    assert frozen_counts(run) == [None] * 8
    assert not caplog.records


@pytest.mark.parametrize(
    ("damaged", "error"),
    [
        ({"names": "abcd"}, TypeError),
        ({"counts": None}, TypeError),
        ({"counts": torch.zeros(3)}, TypeError),
        ({"hashes": torch.zeros(3, dtype=torch.int64)}, TypeError),
    ],
)
def test_damaged_state(damaged, error):
    handler = WeightUpdateHandler(nn.Linear(2, 2))
    with pytest.raises(error, match="state_dict"):
        handler.load_state_dict(handler.state_dict() | damaged)


def test_default_device_is_of_no_concern():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = make_batches(3)
    torch.set_default_device("meta")
    try:
        handler = WeightUpdateHandler(model, optimizer, sample_size=8)
        other = WeightUpdateHandler(model)
        engine = Engine(make_step(model, optimizer))
        handler.attach(engine)
        logger = ListLogger()
        handler.log_to(logger, engine)
        engine.run(batches, max_epochs=1)
        other.load_state_dict(handler.state_dict())
    finally:
        unset_default_device()
    assert all(0 < named["monitor/update_ratio_min"] < 1 for _, named in logger.written)
    assert len(logger.written) == 3
