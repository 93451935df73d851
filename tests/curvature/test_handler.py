"""CurvatureHandler against Hessians that torch.func makes in float64."""

from __future__ import annotations

import copy
import inspect
import logging

import pytest
import torch
import torch.utils.checkpoint
from ignite.engine import Engine, Events
from torch import nn
from torch.func import functional_call, grad, jacrev
from torch.nn import functional as F

from ignite_monitor import ActivationHandler, CurvatureHandler, GradMonitor
from ignite_monitor.curvature.handler import _start_of
from ignite_monitor.curvature.hessian import lanczos, largest_eigenvalue


class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(6, 1)

    def forward(self, x):
        return self.last(self.dropout(torch.tanh(self.norm(self.first(x)))))


def data(seed=0, count=32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    return x, (x[:, :1] * x[:, 1:2] + 0.1 * torch.randn(count, 1, generator=generator))


def exact(model, batch):
    """Gradient and Hessian in float64, flat, in train mode; nothing of the model is changed."""
    model = copy.deepcopy(model).double()
    x, y = (each.double() for each in batch)
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    shapes = {name: each.shape for name, each in model.named_parameters()}
    buffers = {name: each.clone() for name, each in model.named_buffers()}

    def loss(vector):
        parts = vector.split([shape.numel() for shape in shapes.values()])
        named = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        return F.mse_loss(functional_call(model, named | {n: b.clone() for n, b in buffers.items()}, (x,)), y)

    # torch.func.hessian goes forward over reverse, which is not symmetric with BatchNorm
    return grad(loss)(flat).detach(), jacrev(grad(loss))(flat).detach()


def run(model, optimizer, batches, make=None, *, micro=1, scaler=None, event=None, seen=None):
    def step(engine, batch):
        optimizer.zero_grad()
        for x, y in zip(*(part.chunk(micro) for part in batch), strict=True):
            loss = F.mse_loss(model(x), y) / micro
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        return loss.item()

    trainer = Engine(step)
    monitor = None if make is None else make(model, optimizer)
    if monitor is not None:
        monitor.attach(trainer, event or Events.ITERATION_STARTED)
        if seen is not None:
            trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda _: seen.append(dict(monitor.metrics)))
    trainer.run(batches, max_epochs=1)
    return monitor


def make(**kwargs):
    return lambda model, optimizer: CurvatureHandler(model, optimizer, **({"lanczos_steps": 40} | kwargs))


@pytest.mark.parametrize("how", ["backward", "loss", "scaled"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_as_the_exact_hessian(how, dtype):
    torch.manual_seed(0)
    model = Net().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    batch = tuple(each.to(dtype) for each in data())
    kwargs = {"loss": lambda model, batch: F.mse_loss(model(batch[0]), batch[1])} if how == "loss" else {}
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if how == "scaled" else None
    for _ in range(2):
        gradient, matrix = exact(model, batch)
        monitor = run(model, optimizer, [batch], make(scaler=scaler, **kwargs), scaler=scaler)
        found = monitor.metrics
        along = gradient @ matrix @ gradient / (gradient @ gradient)
        assert found["curvature/along_gradient"] == pytest.approx(float(along), rel=1e-4)
        assert found["curvature/hessian_max_eigenvalue"] == pytest.approx(
            float(torch.linalg.eigvalsh(matrix)[-1]), rel=1e-4
        )
        assert found["curvature/hessian_max_eigenvalue_error"] < 1e-3
        assert found["curvature/stability_threshold"] == pytest.approx(3.8 / 0.05)
        assert "curvature/hessian_max_eigenvalue_preconditioned" not in found
        assert all(type(value) is float for value in found.values())


def test_of_adam_the_preconditioned_one_counts():
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, betas=(0.8, 0.95), eps=1e-3)
    batch = tuple(each.double() for each in data())
    second = torch.zeros(sum(each.numel() for each in model.parameters()), dtype=torch.float64)
    for count in range(1, 4):
        gradient, matrix = exact(model, batch)
        second = 0.95 * second + 0.05 * gradient**2
        root = ((second / (1 - 0.95**count)).sqrt() + 1e-3).sqrt()
        found = run(model, optimizer, [batch], make()).metrics
        expected = torch.linalg.eigvalsh(matrix / root / root[:, None])[-1]
        assert found["curvature/hessian_max_eigenvalue_preconditioned"] == pytest.approx(float(expected), rel=1e-4)
        assert found["curvature/stability_threshold"] == pytest.approx(2 * 1.8 / 0.2 / 0.01)


@pytest.mark.parametrize("along_second", [1, 30, 3000])
def test_the_second_eigenvalue_is_not_taken_for_the_largest(along_second):
    """With the default number of products, where the gradient has nothing of the first eigenvector."""
    steps = inspect.signature(CurvatureHandler).parameters["lanczos_steps"].default
    others = torch.linspace(-1, 1, 4000, dtype=torch.float64)
    eigenvalues = torch.cat([torch.tensor([10.0, 8.5], dtype=torch.float64), 7.2 * others * others.abs()])
    for seed in range(10):
        direction = torch.randn(len(eigenvalues), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        direction[:2] = torch.tensor([0.0, along_second])
        found = lanczos(lambda vector: eigenvalues * vector, _start_of(direction, seed), steps)
        value, error = largest_eigenvalue(*(each.tolist() for each in found))
        assert error < 0.1 * value
        assert value == pytest.approx(10, rel=0.01)


def test_dropout_has_the_same_masks():
    """Where the loss is of one mask, its Hessian is that of the thinned model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 1)).double()
    batch = tuple(each.double() for each in data())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(3)
    mask = F.dropout(torch.ones(32, 6, dtype=torch.float64), 0.5)

    class Thinned(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model

        def forward(self, x):
            return self.layers[3](self.layers[1](self.layers[0](x)) * mask)

    _, matrix = exact(Thinned(), batch)
    for loss in (None, lambda model, batch: F.mse_loss(model(batch[0]), batch[1])):
        torch.manual_seed(3)
        own = copy.deepcopy(model)
        monitor = run(own, torch.optim.SGD(own.parameters(), 0.1), [batch], make(loss=loss))
        assert monitor.metrics["curvature/hessian_max_eigenvalue"] == pytest.approx(
            float(torch.linalg.eigvalsh(matrix)[-1]), rel=1e-4
        )
    assert optimizer.state == {}


@pytest.mark.parametrize("loss", [None, lambda model, batch: F.mse_loss(model(batch[0]), batch[1])])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_training_is_bitwise_the_same_and_nothing_is_left(loss, kind):
    found = []
    for makes in (None, make(lanczos_steps=3, loss=loss)):
        torch.manual_seed(0)
        model = Net(dropout=0.3)
        optimizer = kind(model.parameters(), 0.01)
        run(model, optimizer, [data(i) for i in range(6)], makes, event=Events.ITERATION_STARTED(every=2))
        assert not torch.overrides._get_current_function_mode_stack()
        found.append([each.clone() for each in model.state_dict().values()] + [torch.get_rng_state()])
        found[-1] += [each.grad.clone() for each in model.parameters()]
    assert all(map(torch.equal, *found))


def test_accumulation_counts_the_whole_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    x, y = (each.double() for each in data())
    _, matrix = exact(model, (x[:16], y[:16]))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = run(model, optimizer, [(x, y)], make(micro_batches=2), micro=2)
    assert monitor.metrics["curvature/hessian_max_eigenvalue"] == pytest.approx(
        float(torch.linalg.eigvalsh(matrix)[-1]), rel=1e-4
    )


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Linear(8, 24), nn.Linear(8, 1)

    def forward(self, x):
        q, k, v = self.inner(x).view(4, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return self.last(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).mean(1)


def test_attention_is_said_once_and_the_loss_helps(caplog):
    torch.manual_seed(0)
    batches = [(torch.randn(4, 5, 8), torch.randn(4, 1)) for _ in range(3)]
    model = Attention()
    before = copy.deepcopy(model)
    with caplog.at_level(logging.WARNING):
        monitor = run(model, torch.optim.SGD(model.parameters(), 0.1), batches, make())
    said = [record.getMessage() for record in caplog.records if "curvature" in record.name]
    assert len(said) == 1
    assert "SDPBackend.MATH" in said[0]
    assert not monitor.metrics
    plain = copy.deepcopy(before)
    run(plain, torch.optim.SGD(plain.parameters(), 0.1), batches)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        _, matrix = exact(before, batches[0])
    loss = lambda model, batch: F.mse_loss(model(batch[0]), batch[1])  # noqa: E731
    found = run(before, torch.optim.SGD(before.parameters(), 0.1), batches[:1], make(loss=loss)).metrics
    assert found["curvature/hessian_max_eigenvalue"] == pytest.approx(
        float(torch.linalg.eigvalsh(matrix)[-1]), rel=1e-3
    )


def test_full_batch_gradient_descent_settles_at_the_limit():
    """The edge of stability (arXiv:2103.00065): the largest eigenvalue rises to 2 / learning rate, and stays there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    seen = []
    event = Events.ITERATION_STARTED(every=25)
    run(model, optimizer, [data()] * 1000, make(lanczos_steps=12), event=event, seen=seen)
    values = [each["curvature/hessian_max_eigenvalue"] for each in seen if each]
    assert len(values) == 40
    assert values[0] < 20
    assert all(value == pytest.approx(40.0, rel=0.05) for value in values[20:])


def test_what_has_no_curvature():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(engine, batch):
        optimizer.zero_grad()
        model(batch[0]).mean().backward()
        optimizer.step()

    trainer = Engine(step)
    monitor = CurvatureHandler(model, optimizer)
    monitor.attach(trainer, Events.ITERATION_STARTED)
    trainer.run([data()])
    assert monitor.metrics["curvature/along_gradient"] == monitor.metrics["curvature/hessian_max_eigenvalue"] == 0.0


def test_default_is_one_iteration_in_two_thousand():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = Engine(lambda engine, batch: None)
    monitor = CurvatureHandler(model, optimizer)
    monitor.attach(trainer)
    assert [accepts(trainer, i) for accepts in monitor._filters for i in (1, 1000, 2000)] == [False, False, True]


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"micro_batches": 0}, ValueError),
        ({"lanczos_steps": 0}, ValueError),
        ({"loss": 1.0}, TypeError),
        ({"scaler": 3}, TypeError),
    ],
)
def test_bad_input(kwargs, error):
    model = nn.Linear(4, 1)
    with pytest.raises(error, match=next(iter(kwargs))):
        CurvatureHandler(model, torch.optim.SGD(model.parameters(), 0.1), **kwargs)


def step_of(model, optimizer, loss_of=F.mse_loss):
    def step(engine, batch):
        optimizer.zero_grad()
        loss_of(model(batch[0]), batch[1]).backward()
        optimizer.step()

    return step


def watch(step, model, optimizer, **kwargs):
    """What is published in each of three iterations, and the weights."""
    trainer = Engine(step)
    monitor = CurvatureHandler(model, optimizer, **kwargs)
    monitor.attach(trainer, Events.ITERATION_STARTED)
    seen = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda _: seen.append(dict(monitor.metrics)))
    trainer.run([data(seed) for seed in range(3)])
    return seen, [each.detach() for each in model.parameters()]


@pytest.mark.parametrize("first", ["generator", "discriminator"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_of_a_gan_the_loss_that_is_stepped_on_counts(first, set_to_none):
    """The generator's backward reaches the discriminator too."""

    def train(with_generator):
        torch.manual_seed(0)
        model, generator = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)), nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def own(batch):
            optimizer.zero_grad(set_to_none)
            F.mse_loss(model(batch[0]), batch[1]).backward()
            optimizer.step()

        def other(batch):
            if with_generator:
                model(generator(batch[0])).square().mean().backward()

        steps = (own, other) if first == "discriminator" else (other, own)
        return watch(lambda engine, batch: [each(batch) for each in steps], model, optimizer)

    found, expected = train(True)[0], train(False)[0]
    if first == "generator" and not set_to_none:
        assert found == [{}] * 3  # that it was zeroed is known too late to look anew
    else:
        assert found == expected
        assert all(found)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.net, self.reentrant = Net(dropout=0.3), reentrant

    def forward(self, x):
        if self.reentrant is None:
            return self.net(x)
        return torch.utils.checkpoint.checkpoint(self.net, x.clone().requires_grad_(), use_reentrant=self.reentrant)


def test_checkpoints_are_looked_through_or_refused(caplog):
    found = {}
    for reentrant in (None, False, True):
        torch.manual_seed(0)
        model = Checkpointed(reentrant)
        step = step_of(model, optimizer := torch.optim.SGD(model.parameters(), 0.1))
        with caplog.at_level(logging.WARNING):
            found[reentrant] = watch(step, model, optimizer)
    for ours, theirs in zip(found[False][0], found[None][0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert all(map(torch.equal, found[False][1], found[None][1]))
    assert found[True][0] == [{}] * 3
    assert caplog.text.count("use_reentrant=False") == 1


def test_compiled_models_and_a_factor_of_backward():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    found = []
    for how in ("plain", "compiled", "factor"):
        model = copy.deepcopy(plain)
        model = torch.compile(model, backend="aot_eager") if how == "compiled" else model
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step = step_of(model, optimizer)
        if how == "factor":

            def step(engine, batch, model=model, optimizer=optimizer):
                optimizer.zero_grad()
                F.mse_loss(model(batch[0]), batch[1], reduction="sum").backward(torch.tensor(1 / 32))
                optimizer.step()

        found.append(watch(step, model, optimizer)[0])
    for other in found[1:]:
        assert [pytest.approx(each, rel=1e-3) for each in found[0]] == other


@pytest.mark.parametrize("what", ["autograd.backward", "sparse"])
def test_where_nothing_can_be_known_it_is_said_once(what, caplog):
    model = nn.Sequential(nn.Embedding(10, 4, sparse=what == "sparse"), nn.Flatten(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(engine, batch):
        optimizer.zero_grad()
        loss = F.mse_loss(model(batch[0].abs().long()), batch[1])
        torch.autograd.backward(loss) if what == "autograd.backward" else loss.backward()
        optimizer.step()

    with caplog.at_level(logging.WARNING):
        assert watch(step, model, optimizer)[0] == [{}] * 3
    assert caplog.text.count("nothing is published") == 1


def test_a_limit_only_of_optimizers_that_have_one():
    for kind in (torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adagrad, torch.optim.SGD, torch.optim.Adam):
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        optimizer = kind(model.parameters(), 0.01)
        seen, _ = watch(step_of(model, optimizer), model, optimizer)
        assert [("curvature/stability_threshold" in each) for each in seen] == [kind.__name__ in ("SGD", "Adam")] * 3
        assert [("curvature/hessian_max_eigenvalue_preconditioned" in each) for each in seen] == [
            kind.__name__ == "Adam"
        ] * 3


def test_gradients_that_are_retained_and_other_monitors_do_not_see_it():
    found = []
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
        for monitor in [*others, CurvatureHandler(model, optimizer)][: 2 + watched]:
            monitor.attach(trainer, Events.ITERATION_STARTED)
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda _, o=others, s=seen: s.extend(dict(each.metrics) for each in o)
        )
        trainer.run([data(seed) for seed in range(3)])
        found.append(seen)
    assert found[0] == found[1]


def test_along_the_step_of_adam():
    """The curvature of the preconditioned Hessian along the preconditioned gradient, in float64."""
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-3)
    batch = tuple(each.double() for each in data())
    gradient, matrix = exact(model, batch)
    scale = gradient.abs() + 1e-3
    expected = (gradient / scale) @ matrix @ (gradient / scale) / (gradient @ (gradient / scale))
    found = run(model, optimizer, [batch], make()).metrics["curvature/along_gradient_preconditioned"]
    assert found == pytest.approx(float(expected), rel=1e-4)
