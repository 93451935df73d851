"""OptimizerStateHandler against float64, from full tensors, for optimizers of many classes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import nn
from torch.amp import GradScaler

from ignite_monitor import GradMonitor, OptimizerStateHandler, StaticThreshold
from tests._helpers import ListLogger, make_batches, make_step, moves_of, run_monitored, square_loss
from tests._models import make_model
from tests._truth import norm, optimizer_state

OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "Adam, fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True, betas=(0.5, 0.9)),
    "AMSGrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, betas=(0.5, 0.9)),
    "Adam, maximize, decay": lambda p: torch.optim.Adam(p, lr=1e-2, maximize=True, weight_decay=0.3),
    "SGD, maximize, decay": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, maximize=True, weight_decay=2.0),
    "RAdam, decay": lambda p: torch.optim.RAdam(p, lr=1e-2, weight_decay=0.5),
    "NAdam, decoupled decay": lambda p: torch.optim.NAdam(p, weight_decay=0.5, decoupled_weight_decay=True),
    "NAdam, large eps": lambda p: torch.optim.NAdam(p, lr=1e-2, eps=0.03),
    "no eps": lambda p: torch.optim.Adam(p, lr=1e-2, eps=0.0),
    "tensor betas": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2), betas=(torch.tensor(0.5), torch.tensor(0.9))),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "SGD, dampening": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8, dampening=0.3, weight_decay=0.7),
    "RMSprop, centered, maximize": lambda p: torch.optim.RMSprop(
        p, lr=1e-3, centered=True, momentum=0.7, weight_decay=0.4, maximize=True
    ),
    "AMSGrad, maximize, decay": lambda p: torch.optim.Adam(p, amsgrad=True, maximize=True, weight_decay=0.6),
    "AdamW, fused, maximize": lambda p: torch.optim.AdamW(p, fused=True, amsgrad=True, maximize=True, weight_decay=0.3),
    "RAdam, maximize, decoupled decay": lambda p: torch.optim.RAdam(
        p, weight_decay=0.4, decoupled_weight_decay=True, maximize=True
    ),
    "a group with lr 0": lambda p: torch.optim.Adam([{"params": next(p), "lr": 0.0}, {"params": p}]),
}

if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["Muon"] = lambda p: torch.optim.Muon([item for item in p if item.ndim == 2], lr=0.02, weight_decay=0.3)


def follow(model, optimizer, handler, batches, scaler=None, clip=None):
    """Train, and return for every iteration what is published and what is true."""
    before, true = {}, []

    def keep(_):
        for p in model.parameters():
            before[p] = p.detach().clone(), None if p.grad is None else p.grad.clone()

    def train_step(engine, batch):
        step(engine, batch)
        weights = {p: weight for p, (weight, _) in before.items()}
        gradients = {p: gradient for p, (_, gradient) in before.items() if gradient is not None}
        true.append(optimizer_state(optimizer, weights, gradients))

    clip = math.inf if clip is None and scaler is not None else clip
    step = make_step(model, optimizer, scaler=scaler, clip=clip, before_step=keep)
    return run_monitored(train_step, batches, handler), true


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_values_are_those_of_float64(name):
    # A bias before a BatchNorm has no gradient, of which Adam without eps makes NaN.
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)) if name == "no eps" else make_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    handler = OptimizerStateHandler(model, optimizer, sample_size=None)
    published, true = follow(model, optimizer, handler, make_batches(12))
    for actual, expected in zip(published, true, strict=True):
        assert actual == pytest.approx(expected, rel=2e-4, abs=1e-7)
    has = {name.partition("/")[2].partition("_")[0] for name in true[-1]}
    assert has >= (
        {"update", "momentum"}
        if name.startswith(("SGD", "RMSprop", "Adamax", "Muon"))
        else {"rms", "epsilon", "momentum"}
    )
    if name == "NAdam, large eps":
        assert 0 < true[1]["optimizer/epsilon_dominated_median"] < 1


def test_parameters_that_the_train_step_adds_are_part_of_no_update_norm_before_the_next():
    model = make_model()
    first, *rest = model.children()
    optimizer = torch.optim.Adam(first.parameters())
    step = make_step(model, optimizer)

    def train_step(engine, batch):
        if engine.state.iteration == 2:
            optimizer.add_param_group({"params": [item for module in rest for item in module.parameters()]})
        step(engine, batch)

    published = run_monitored(train_step, make_batches(3), OptimizerStateHandler(model, optimizer))
    assert ["optimizer/update_norm" in values for values in published] == [True, False, True]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("clip", [None, 0.01])
def test_other_precisions_and_clipping(dtype, clip):
    # Of 22 parameters p95 is not the maximum.
    model = nn.Sequential(nn.Linear(6, 8), *(nn.Linear(8, 8) for _ in range(9)), nn.Linear(8, 3)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.5, 0.9))
    batches = [(x.to(dtype), y.to(dtype)) for x, y in make_batches(6)]
    handler = OptimizerStateHandler(model, optimizer, sample_size=None)
    published, true = follow(model, optimizer, handler, batches, clip=clip)
    for actual, expected in zip(published, true, strict=True):
        assert actual == pytest.approx(expected, rel=1e-9 if dtype == torch.float64 else 1e-4, abs=1e-12)


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_unscaled_and_a_step_that_overflows_is_none(fused):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    batches = make_batches(5)
    batches[2] = (batches[2][0], batches[2][1] * math.inf)
    handler = OptimizerStateHandler(model, optimizer, sample_size=None)
    published, true = follow(model, optimizer, handler, batches, scaler=scaler)
    assert published[2] == {}
    for i in (0, 1, 3, 4):
        assert published[i] == pytest.approx(true[i], rel=2e-4, abs=1e-7)


def test_a_fused_step_that_unscales_by_itself():
    """Only the optimizer knows the gradient that its step uses."""
    published = []
    for scale in (1.0, 2.0**14):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        step = make_step(model, optimizer, scaler=GradScaler("cpu", init_scale=scale))
        torch.manual_seed(1)
        published += run_monitored(step, make_batches(3), OptimizerStateHandler(model, optimizer))
    for plain, scaled in zip(published[:3], published[3:], strict=True):
        assert plain
        assert scaled == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("on_spike", ["clip", "skip"])
def test_a_gradient_is_seen_as_grad_monitor_leaves_it(on_spike, first):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handler = OptimizerStateHandler(model, optimizer, sample_size=None)
    monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(1e-2), on_spike=on_spike)
    monitors = (monitor, handler) if first else (handler, monitor)
    (published,) = run_monitored(make_step(model, optimizer), make_batches(1), *monitors)
    if on_spike == "skip":
        assert not any(name.startswith("optimizer/") for name in published)
    else:  # the first step of all is along the gradient
        assert published["optimizer/update_norm"] == pytest.approx(0.1 * 1e-2, rel=1e-4)
        assert published["optimizer/momentum_cosine_min"] == pytest.approx(1.0)


def test_update_norm_of_a_step_with_a_closure():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    handler = OptimizerStateHandler(model, optimizer, sample_size=None)
    step, moves = moves_of(model, make_step(model, optimizer, closure=True))
    published = run_monitored(step, make_batches(5), handler)
    true = [math.hypot(*item.values()) for item in moves]
    assert [values["optimizer/update_norm"] for values in published] == pytest.approx(true, rel=1e-4)


def test_update_norm_with_a_frozen_parameter_that_its_last_gradient_still_moves():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    next(model.parameters()).requires_grad_(False)
    step, moves = moves_of(model, lambda *_: optimizer.step())
    published = run_monitored(step, [0] * 3, OptimizerStateHandler(model, optimizer, sample_size=None))
    true = [math.hypot(*item.values()) for item in moves]
    assert [values["optimizer/update_norm"] for values in published] == pytest.approx(true, rel=1e-4)


def test_a_sample_is_near_to_all():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(200, 200) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [(torch.randn(16, 200), torch.randn(16, 200)) for _ in range(4)]
    handler = OptimizerStateHandler(model, optimizer)
    published, true = follow(model, optimizer, handler, batches)
    names = [name for name in true[-1] if "eps" not in name]
    for actual, expected in zip(published, true, strict=True):
        for name in names:
            # Standard errors of a tensor's are about 1 / sqrt(2 * 256), and 1 / sqrt(256) of a cosine.
            wide = {"abs": 0.15} if "cosine" in name else {"rel": 0.1}
            assert actual[name] == pytest.approx(expected[name], **wide), name


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("count", [0, 40, 7000])
def test_a_sample_with_few_gradients_is_no_estimate(make, count):
    """Of 20,000 item biases, of which 256 are sampled, a step uses so many: about none, 0.5 or 90 of the sample."""
    torch.manual_seed(0)
    model = nn.ParameterDict({"table": nn.Parameter(torch.zeros(20_000)), "scale": nn.Parameter(torch.ones(1))})
    optimizer = make(model.parameters(), **({"lr": 0.1, "momentum": 0.9} if make is torch.optim.SGD else {}))
    gradient = torch.zeros(20_000)
    gradient[torch.randperm(20_000)[:count]] = torch.randn(count)
    step = make_step(model, optimizer, loss_of=lambda m, _: (m["table"] * gradient).sum() + m["scale"].sum())
    handler, before = OptimizerStateHandler(model, optimizer), model["table"].detach().clone()
    (published,) = run_monitored(step, [0], handler)
    if count < 7000:
        assert "optimizer/update_norm" not in published
        assert published.get("optimizer/rms_median") == (pytest.approx(1.0) if make is torch.optim.Adam else None)
        assert published["optimizer/momentum_cosine_min"] == pytest.approx(1.0)
    else:
        true = math.hypot(norm(model["table"] - before), norm(model["scale"] - 1))
        assert published["optimizer/update_norm"] == pytest.approx(true, rel=0.3)
        rms = (1 + math.sqrt(7 / 20)) / 2  # of the two tensors after a first step
        assert published.get("optimizer/rms_median") == (
            pytest.approx(rms, rel=0.15) if make is torch.optim.Adam else None
        )


def test_top_k_are_named_by_the_model():
    model = make_model()
    handler = OptimizerStateHandler(model, torch.optim.Adam(model.parameters()), top_k=2)
    trainer = Engine(make_step(model, handler.optimizer))
    logger = ListLogger()
    handler.attach(trainer)
    handler.log_to(logger, trainer)
    trainer.run(make_batches(3))
    for _, values in logger.written:
        top = {name.rpartition("/")[2]: rms for name, rms in values.items() if "/topk_rms/" in name}
        assert len(top) == 2
        assert max(top.values()) == values["optimizer/rms_max"]
        assert top.keys() <= dict(model.named_parameters()).keys()


class Own(torch.optim.AdamW):
    """Its step may use the moments as it likes."""


def test_what_is_not_kept_or_of_another_class_is_absent_and_reported_once(caplog):
    for make in (torch.optim.SGD, torch.optim.Adagrad, Own):
        model = make_model()
        optimizer = make(model.parameters(), lr=0.1)
        caplog.clear()
        handler = OptimizerStateHandler(model, optimizer)
        assert run_monitored(make_step(model, optimizer), make_batches(3), handler) == [{}] * 3
        (message,) = caplog.messages
        assert f"nothing is reported of {make.__name__}" in message


def test_a_part_of_the_parameters_and_one_that_comes_later():
    model = make_model()
    last = list(model.children())[-1]
    optimizer = torch.optim.Adam(last.parameters(), lr=0.1)
    handler = OptimizerStateHandler(model, optimizer, sample_size=None)
    trainer = Engine(make_step(model, optimizer))
    seen = []
    handler.attach(trainer)
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda _: seen.append(handler.metrics["optimizer/update_norm"])
    )

    @trainer.on(Events.ITERATION_COMPLETED(once=2))
    def add(_):
        optimizer.add_param_group({"params": [*next(model.children()).parameters()]})

    trainer.run(make_batches(4), max_epochs=1)
    assert seen[2] > 1.2 * seen[1]  # the norm of the update of twice as many


def test_what_is_not_a_number_is_absent():
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    batches = [(x, y * math.nan) for x, y in make_batches(2)]
    published, _ = follow(model, optimizer, OptimizerStateHandler(model, optimizer), batches)
    assert published == [{}, {}]


@pytest.mark.parametrize("scale", [1e-30, 1e-140, 1e-160])
def test_a_cosine_of_tiny_numbers_is_right_or_absent(scale):
    model = nn.Linear(3, 3, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train_step(engine, _):
        model.weight.grad = scale * torch.randn(3, 3, dtype=torch.float64, generator=generator)
        optimizer.step()
        momentum = optimizer.state[model.weight]["momentum_buffer"]
        true.append(float(F.cosine_similarity(*((item / scale).view(1, -1) for item in (model.weight.grad, momentum)))))

    generator, true = torch.Generator().manual_seed(0), []
    trainer = Engine(train_step)
    OptimizerStateHandler(model, optimizer).attach(trainer)
    for _ in range(3):
        trainer.run([None], max_epochs=len(true) + 1)
        result = trainer.state.metrics.get("optimizer/momentum_cosine_min")
        assert (result is None) if scale == 1e-160 else result == pytest.approx(true[-1], rel=1e-9)


def test_a_second_moment_that_is_not_a_number_is_not_reported():
    model = nn.Linear(3, 3, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    trainer = Engine(make_step(model, optimizer))
    seen = []
    OptimizerStateHandler(model, optimizer, prefix="o").attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: seen.append(dict(engine.state.metrics)))
    batch = (torch.randn(4, 3), torch.randn(4, 3))
    trainer.run([batch], max_epochs=1)
    optimizer.state[model.weight]["exp_avg_sq"][0, 0] = math.nan
    trainer.run([batch], max_epochs=2)
    assert {"o/rms_max", "o/epsilon_dominated_max"} <= seen[0].keys()
    assert seen[1].keys() == {"o/momentum_cosine_median", "o/momentum_cosine_min"}


def test_complex_parameters_are_skipped():
    model = nn.ParameterDict(
        {"z": nn.Parameter(torch.ones(3, dtype=torch.complex64)), "w": nn.Parameter(torch.ones(3))}
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    step = make_step(model, optimizer, loss_of=lambda m, _: m["z"].abs().sum() + m["w"].square().sum())
    (published,) = run_monitored(step, [None], OptimizerStateHandler(model, optimizer))
    assert published["optimizer/rms_max"] == pytest.approx(1.0, rel=1e-4)
    assert "optimizer/update_norm" not in published  # the complex tensor moved too


def test_momentum_of_sparse_gradients_is_skipped():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8, sparse=True), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    step = make_step(model, optimizer, loss_of=square_loss)
    handler = OptimizerStateHandler(model, optimizer, sample_size=None)
    *_, published = run_monitored(step, torch.randint(11, (4, 5)), handler)
    moments = [(optimizer.state[item]["momentum_buffer"], item.grad) for item in model[1].parameters()]
    cosines = [F.cosine_similarity(a.flatten(), b.flatten(), 0).item() for a, b in moments]
    assert published["optimizer/momentum_cosine_min"] == pytest.approx(min(cosines), rel=1e-5)
    assert "optimizer/update_norm" not in published  # the embedding moved too
