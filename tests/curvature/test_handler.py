"""CurvatureHandler against Hessians that torch.func makes in float64."""

from __future__ import annotations

import copy
import inspect
import logging
import math

import pytest
import torch
from ignite.engine import Engine, Events
from torch import nn
from torch.func import functional_call, grad, jacrev
from torch.nn import functional as F

from ignite_monitor import ActivationHandler, CurvatureHandler, GradMonitor
from ignite_monitor.curvature.handler import stability_threshold
from ignite_monitor.curvature.hessian import lanczos, largest_eigenvalue, start_vector
from tests._helpers import assert_same, make_step, mse_loss, run_monitored, same
from tests._models import Attention, Checkpointed, Lambda, Net


def make_net(dropout=0.0):
    return Net((4, 6, 1), nn.BatchNorm1d, dropout)


def data(seed=0, count=32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    return x, (x[:, :1] * x[:, 1:2] + 0.1 * torch.randn(count, 1, generator=generator))


def exact(model, batch):
    """Gradient and Hessian in float64, flat, in train mode; nothing of the model is changed."""
    model = copy.deepcopy(model).double()
    x, y = (item.double() for item in batch)
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    shapes = {name: item.shape for name, item in model.named_parameters()}
    buffers = {name: item.clone() for name, item in model.named_buffers()}

    def loss(vector):
        parts = vector.split([shape.numel() for shape in shapes.values()])
        named = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        return F.mse_loss(functional_call(model, named | {n: b.clone() for n, b in buffers.items()}, (x,)), y)

    # torch.func.hessian goes forward over reverse, which is not symmetric with BatchNorm
    return grad(loss)(flat).detach(), jacrev(grad(loss))(flat).detach()


def measured(model, optimizer, batch):
    """Return the metrics of an iteration."""
    monitor = CurvatureHandler(model, optimizer, lanczos_steps=40, loss=mse_loss)
    (values,) = run_monitored(make_step(model, optimizer), [batch], monitor)
    return values


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_as_the_exact_hessian(dtype):
    torch.manual_seed(0)
    model = make_net().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    batch = tuple(item.to(dtype) for item in data())
    for _ in range(2):
        gradient, matrix = exact(model, batch)
        result = measured(model, optimizer, batch)
        along = gradient @ matrix @ gradient / (gradient @ gradient)
        assert result["curvature/along_gradient"] == pytest.approx(float(along), rel=1e-4)
        assert result["curvature/hessian_max_eigenvalue"] == pytest.approx(
            float(torch.linalg.eigvalsh(matrix)[-1]), rel=1e-4
        )
        assert result["curvature/hessian_max_eigenvalue_residual"] < 1e-3
        assert result["curvature/stability_threshold"] == pytest.approx(3.8 / 0.05)
        assert all(type(value) is float for value in result.values())


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e25])
def test_of_a_loss_whose_gradients_have_squares_out_of_range(scale):
    torch.manual_seed(0)
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    plain, scaled = (
        three_iterations(model, optimizer, loss=lambda *args, factor=factor: factor * mse_loss(*args))[0][0]
        for factor in (1.0, scale)
    )
    for name in ("curvature/along_gradient", "curvature/hessian_max_eigenvalue"):
        assert scaled[name] == pytest.approx(scale * plain[name], rel=1e-3)


@pytest.mark.parametrize("along_second", [1, 30, 3000])
def test_the_second_eigenvalue_is_not_taken_for_the_largest(along_second):
    """Uses the default number of products, with a gradient orthogonal to the first eigenvector."""
    steps = inspect.signature(CurvatureHandler).parameters["lanczos_steps"].default
    others = torch.linspace(-1, 1, 4000, dtype=torch.float64)
    eigenvalues = torch.cat([torch.tensor([10.0, 8.5], dtype=torch.float64), 7.2 * others * others.abs()])
    for seed in range(10):
        direction = torch.randn(len(eigenvalues), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        direction[:2] = torch.tensor([0.0, along_second])
        result = lanczos(lambda vector: eigenvalues * vector, start_vector(direction, seed), steps)
        value, error = largest_eigenvalue(*(item.tolist() for item in result))
        assert error < 0.1 * value
        assert value == pytest.approx(10, rel=0.01)


def test_dropout_has_the_same_masks():
    """For a loss with one dropout mask, the Hessian is that of the thinned model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 1)).double()
    batch = tuple(item.double() for item in data())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(3)
    mask = F.dropout(torch.ones(32, 6, dtype=torch.float64), 0.5)

    thinned = Lambda(lambda self, x: self.layers[3](self.layers[1](self.layers[0](x)) * mask), layers=model)
    _, matrix = exact(thinned, batch)
    torch.manual_seed(3)
    result = measured(model, optimizer, batch)
    assert result["curvature/hessian_max_eigenvalue"] == pytest.approx(
        float(torch.linalg.eigvalsh(matrix)[-1]), rel=1e-4
    )


def test_attention_has_a_second_derivative():
    torch.manual_seed(0)
    model = nn.Sequential(Attention(8), Lambda(lambda self, x: x.mean(1)), nn.Linear(8, 1)).double()
    batch = (torch.randn(4, 5, 8).double(), torch.randn(4, 1).double())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        _, matrix = exact(model, batch)
    result = measured(model, torch.optim.SGD(model.parameters(), 0.1), batch)
    assert result["curvature/hessian_max_eigenvalue"] == pytest.approx(
        float(torch.linalg.eigvalsh(matrix)[-1]), rel=1e-3
    )


def test_what_has_no_curvature():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss_of(model, batch):
        return model(batch[0]).mean()

    monitor = CurvatureHandler(model, optimizer, loss=loss_of)
    run_monitored(make_step(model, optimizer, loss_of=loss_of), [data()], monitor)
    assert monitor.metrics["curvature/along_gradient"] == monitor.metrics["curvature/hessian_max_eigenvalue"] == 0.0


def test_default_is_one_iteration_in_two_thousand():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = Engine(lambda engine, batch: None)
    monitor = CurvatureHandler(model, optimizer, loss=mse_loss)
    monitor.attach(trainer)
    assert [accepts(trainer, i) for accepts in monitor._filters for i in (1, 1000, 2000)] == [False, False, True]


def three_iterations(model, optimizer, *, monitored=True, **kwargs):
    """Return the metrics of three iterations, and the weights."""
    monitors = [CurvatureHandler(model, optimizer, **({"loss": mse_loss} | kwargs))] * monitored
    seen = run_monitored(make_step(model, optimizer), [data(seed) for seed in range(3)], *monitors)
    return seen, [parameter.detach() for parameter in model.parameters()]


def test_checkpoints_are_searched_or_refused(caplog):
    result = {}
    for reentrant in (None, False, True):
        torch.manual_seed(0)
        model = make_net(dropout=0.3)
        model = model if reentrant is None else Checkpointed(model, use_reentrant=reentrant)
        with caplog.at_level(logging.WARNING):
            result[reentrant] = three_iterations(model, torch.optim.SGD(model.parameters(), 0.1))
    for actual, references in zip(result[False][0], result[None][0], strict=True):
        assert actual == pytest.approx(references, rel=1e-5)
    assert_same([*result[False][1]], [*result[None][1]])
    assert result[True][0] == [{}] * 3
    assert caplog.text.count("use_reentrant=False") == 1


def test_compiled_models():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    result = []
    for how in ("plain", "compiled"):
        model = copy.deepcopy(plain)
        model = torch.compile(model, backend="aot_eager") if how == "compiled" else model
        result.append(three_iterations(model, torch.optim.SGD(model.parameters(), 0.1))[0])
    for other in result[1:]:
        assert [pytest.approx(item, rel=1e-3) for item in result[0]] == other


def make_complex():
    product = Lambda(lambda self, x: torch.view_as_real(x * self.weight), weight=nn.Parameter(torch.randn(4) + 0j))
    return nn.Sequential(product, nn.Flatten(), nn.Linear(8, 1))


def make_sparse():
    rows = Lambda(lambda self, x: self.embedding(x.abs().long()), embedding=nn.Embedding(10, 4, sparse=True))
    return nn.Sequential(rows, nn.Flatten(), nn.Linear(16, 1))


class Closing(nn.Sequential):
    def __init__(self, *layers):
        super().__init__(*layers)
        self.function = lambda x: self[0](x)

    def forward(self, x):
        return self.function(x)


NOT_MEASURED = {
    "complex": (make_complex, mse_loss, "a parameter is complex"),
    "sparse": (make_sparse, mse_loss, "parse"),
    "unreached": (
        lambda: nn.Linear(4, 1),
        lambda model, batch: batch[1].mean().requires_grad_(),
        "reaches no parameter",
    ),
    "no graph": (lambda: nn.Linear(4, 1), lambda model, batch: batch[1].mean(), "does not require grad"),
    "error": (lambda: nn.Linear(4, 1), lambda model, batch: model(batch), "must be Tensor"),
    "no copy": (lambda: Closing(nn.Linear(4, 1)), mse_loss, "calls 0 of the model that trains"),
}


@pytest.mark.parametrize("case", NOT_MEASURED)
def test_what_cannot_be_measured_is_warned_of_once(case, caplog):
    make_model, loss, reason = NOT_MEASURED[case]
    result = []
    for watched in (True, False):
        torch.manual_seed(0)
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        seen, weights = three_iterations(model, optimizer, monitored=watched, loss=loss)
        assert seen == [{}] * 3
        result.append(weights)
    assert same(*result)
    assert caplog.text.count("nothing is reported") == 1
    assert reason in caplog.text


def test_a_threshold_only_of_sgd():
    class Renamed(torch.optim.SGD):
        pass

    for kind in (torch.optim.RMSprop, torch.optim.AdamW, Renamed, torch.optim.SGD):
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        seen, _ = three_iterations(model, kind(model.parameters(), 0.01))
        assert [("curvature/stability_threshold" in item) for item in seen] == [kind is torch.optim.SGD] * 3
        assert all("curvature/along_gradient" in item for item in seen)


def test_gradients_that_are_retained_and_other_monitors_do_not_see_it():
    result = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        seen = []

        def step(engine, batch, model=model, optimizer=optimizer, seen=seen):
            optimizer.zero_grad()
            hidden = model[0](batch[0])
            hidden.retain_grad()
            F.mse_loss(model[2](model[1](hidden)), batch[1]).backward()
            optimizer.step()
            seen.append(hidden.grad.tolist())

        trainer = Engine(step)
        others = [ActivationHandler(model, activations=True, gradients=True), GradMonitor(model, optimizer)]
        for monitor in [*others, CurvatureHandler(model, optimizer, loss=mse_loss)][: 2 + watched]:
            monitor.attach(trainer, Events.ITERATION_STARTED)
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda _, o=others, s=seen: s.extend(dict(item.metrics) for item in o)
        )
        trainer.run([data(seed) for seed in range(3)])
        result.append(seen)
    assert result[0] == result[1]


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_of_a_model_with_hooks_of_the_user_nothing_is_reported(kind, caplog):
    model = make_net()
    getattr(model.first, kind)(lambda *args: None)
    seen, _ = three_iterations(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert seen == [{}] * 3
    assert caplog.text.count("a Linear has a forward hook") == 1


def test_the_loss_may_change_its_batch():
    def loss_of(model, batch):
        target = batch.pop("target")
        return F.mse_loss(model(batch["x"].mul_(0.5)), target)

    model = make_net()
    optimizer, (x, y) = torch.optim.SGD(model.parameters(), lr=0.1), data()
    monitor = CurvatureHandler(model, optimizer, loss=loss_of)
    batch, seen = {"x": x.clone(), "target": y}, []
    run_monitored(lambda engine, batch: seen.extend([sorted(batch), torch.equal(batch["x"], x)]), [batch], monitor)
    assert seen == [["target", "x"], True]
    assert "curvature/hessian_max_eigenvalue" in monitor.metrics


@pytest.mark.parametrize(
    ("momentum", "dampening", "limit"), [(0, 0.5, 20), (0, 1, 20), (0.5, 0.5, 60), (0.5, 1, math.inf)]
)
def test_dampening_counts_only_with_momentum_and_of_groups_that_train(momentum, dampening, limit):
    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    groups = [{"params": weights[:1], "lr": torch.tensor([0.1])}, {"params": weights[1:], "lr": 0.05}]
    optimizer = torch.optim.SGD(groups, momentum=momentum, dampening=dampening)
    assert float(stability_threshold(optimizer, weights)) == pytest.approx(limit)
    assert float(stability_threshold(optimizer, weights[1:])) == pytest.approx(2 * limit)
    optimizer.param_groups[1]["maximize"] = True
    assert stability_threshold(optimizer, weights).isnan()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 3.0},
        {"momentum": 0.7, "weight_decay": 1.5},
        {"momentum": 0.6, "nesterov": True, "weight_decay": 2.0},
        {"momentum": 0.8, "dampening": 0.4, "weight_decay": 0.5},
    ],
)
def test_sgd_diverges_on_a_quadratic_right_above_the_threshold(options):
    """With curvatures of one percent below and above it, in float64."""
    weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.08, **options)
    curvatures = float(stability_threshold(optimizer, [weight])) * torch.tensor([0.99, 1.01], dtype=torch.float64)
    for _ in range(2000):
        weight.grad = curvatures * weight.detach()
        optimizer.step()
    below, above = weight.detach().abs().tolist()
    assert below < 1e-3 < 1e3 < above
