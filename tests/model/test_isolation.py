"""A second pass leaves RNG state, buffers and training flags as it found them."""

from __future__ import annotations

import collections
import functools
import io
import random

import numpy as np
import pytest
import torch
from ignite.engine import Engine, Events
from torch import nn

from ignite_monitor import CurvatureHandler, GradMonitor, RCCHandler, ReplayCheckHandler
from ignite_monitor.model.isolation import (
    capture_rng_state,
    generators_of,
    in_second_pass,
    isolated_pass,
    preserved_rng_state,
    restore_rng_state,
)
from ignite_monitor.scaling import AlignmentHandler

BIT_GENERATORS = [np.random.MT19937, np.random.PCG64, np.random.Philox, np.random.SFC64, np.random.PCG64DXSM]


@pytest.fixture(params=BIT_GENERATORS, ids=lambda kind: kind.__name__)
def bit_generator(request):
    """NumPy's global generator is of another kind, and has a normal number in store."""
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(request.param(3))
    np.random.randn()
    yield
    np.random.set_bit_generator(before)


def draws():
    return [*torch.rand(2).tolist(), random.random(), random.gauss(0, 1), *np.random.randn(3), np.random.randint(99)]


def test_rng_state_is_plain_data_that_draws_the_same_again(bit_generator):
    random.gauss(0, 1)  # Python keeps the second of a pair
    file = io.BytesIO()
    torch.save(capture_rng_state(), file)
    expected = draws()
    file.seek(0)
    restore_rng_state(torch.load(file, weights_only=True))
    assert draws() == expected


def test_rng_state_is_preserved_after_an_error(bit_generator):
    state = capture_rng_state()
    expected = draws()
    restore_rng_state(state)
    with pytest.raises(ZeroDivisionError), preserved_rng_state():
        draws()[0] / 0
    assert draws() == expected


def test_a_state_of_devices_that_do_not_exist_is_restored_without_them():
    state = capture_rng_state()
    restore_rng_state(state | {"devices": {"cuda:99": torch.zeros(16, dtype=torch.uint8)}})


GLOBAL = torch.Generator()


class Drawing(nn.Module):
    """Holds generators in every place that is searched."""

    shared = torch.Generator()

    def __init__(self):
        super().__init__()
        self.own, listed, late = (torch.Generator() for _ in range(3))
        self.listed, self.queue, self.one = [listed], collections.deque([random.Random(1)]), {late}
        self.many = {str(i): None for i in range(1001)} | {"last": np.random.default_rng(2)}
        self.older = np.random.RandomState(3)
        self.inner = nn.Dropout()
        self.register_buffer("calls", torch.zeros(()))
        self.generators = self.own, listed, late, self.shared

    def forward(self):
        values = [float(torch.rand((), generator=item)) for item in (*self.generators, GLOBAL)]
        values += [self.queue[0].random(), float(self.many["last"].random()), float(self.older.rand())]
        self.calls += 1
        self.calls = self.calls.clone()
        self.inner.eval()
        return values


class Loss:
    """A function, and a method, with a generator among the object's attributes."""

    def __init__(self):
        self.generator = torch.Generator()

    def __call__(self, model, batch, generator=None):
        raise NotImplementedError

    def method(self, model, batch):
        raise NotImplementedError


@pytest.mark.parametrize(
    "function",
    [
        lambda loss: loss,
        lambda loss: loss.method,
        lambda loss: functools.partial(loss),
        lambda loss: functools.partial(lambda model, batch, generator: None, generator=loss.generator),
        lambda loss: functools.partial(functools.partial(lambda held, model, batch: None, loss)),
        lambda loss: lambda model, batch: loss(model, batch),
    ],
)
def test_generators_of_functions_of_all_kinds_are_found(function):
    loss = Loss()
    found = generators_of(nn.Linear(1, 1), (), function(loss))
    assert {*map(id, found)} == {id(loss.generator), id(GLOBAL)}  # each once, and that of this file


def test_an_isolated_pass_restores_generators_buffers_and_flags():
    model = Drawing()
    assert len(generators_of(model)) == 8
    calls = model.calls
    state = capture_rng_state()
    expected = draws()
    restore_rng_state(state)
    with isolated_pass(model, generators_of(model)):
        assert in_second_pass()
        first = model()
        draws()
    assert not in_second_pass()
    assert model.calls is calls
    assert model.calls == 0
    assert model.inner.training
    assert draws() == expected
    assert model() == first


class Counting(nn.Module):
    def __init__(self, buffer):
        super().__init__()
        self.register_buffer("total", buffer)

    def forward(self, x):
        self.total += x
        return self.total.clone()


def test_a_buffer_of_several_modules_is_one_in_an_isolated_pass():
    total = torch.zeros(2)
    model = nn.Sequential(Counting(total), Counting(total))
    x = torch.tensor([1.0, -2.0])
    with isolated_pass(model, []):
        assert model[0].total is model[1].total
        assert torch.equal(model(x), 2 * x)  # x + x; a copy of each module would count x alone
    assert model[0].total is model[1].total is total
    assert not total.any()


@pytest.mark.parametrize("generator", [torch.Generator(), random.Random(), np.random.default_rng()], ids=type)
def test_generators_that_the_user_names_are_restored(generator):
    def draw():
        return torch.rand((), generator=generator) if isinstance(generator, torch.Generator) else generator.random()

    with isolated_pass(nn.Linear(1, 1), [generator]):
        inside = draw()
    assert inside == draw()


class Service:
    """An object of a library, in which no generator is looked for."""

    __module__ = "torch.service"

    def __init__(self):
        self.random = torch.Generator().manual_seed(0)


class Served(nn.Module):
    def __init__(self, service):
        super().__init__()
        self.linear, self.noise = nn.Linear(3, 3), lambda x: torch.rand(x.shape, generator=service.random)

    def forward(self, x):
        return self.linear(x * self.noise(x))


MAKE = {
    "RCCHandler": lambda model, _, **options: RCCHandler(model, **options),
    "AlignmentHandler": lambda model, _, **options: AlignmentHandler(model, **options),
    "CurvatureHandler": lambda model, optimizer, **options: CurvatureHandler(
        model, optimizer, loss=lambda model, batch: model(batch).square().mean(), **options
    ),
    "ReplayCheckHandler": lambda model, _, **options: ReplayCheckHandler(
        model, loss=lambda model, batch: model(batch).square().mean(), **options
    ),
    "GradMonitor": GradMonitor,
}


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_handlers_restore_the_generators_that_they_are_given(make):
    def train(generators=None):
        torch.manual_seed(0)
        service = Service()
        model = Served(service)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train_step(engine, x):
            optimizer.zero_grad()
            (model(x).sum() / (engine.state.iteration != 2)).backward()  # whose source GradMonitor looks for
            if engine.state.iteration != 2:
                optimizer.step()

        trainer = Engine(train_step)
        if generators is not None:
            monitor = make(model, optimizer, generators=generators(service.random))
            monitor.attach(trainer, Events.ITERATION_STARTED)
        trainer.run([torch.ones(2, 3)] * 3)
        return service.random.get_state()

    expected = train()
    assert torch.equal(train(lambda generator: [generator]), expected)
    assert not torch.equal(train(lambda _: ()), expected)
    for refused in (3, torch.Generator(), [3]):
        with pytest.raises(TypeError, match="generators should be of type"):
            train(lambda _, refused=refused: refused)


class CountedLSTM(nn.LSTM):
    count = 0  # of the calls of all

    def forward(self, *args):
        CountedLSTM.count += 1
        return super().forward(*args)


class Recurrent(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.layer, self.head = CountedLSTM(3, 3, 2, dropout=dropout), nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.layer(x)[0])


@pytest.mark.parametrize("dropout", [0.5, 0.0])
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_no_second_pass_runs_where_cudnn_draws_dropout(make, dropout, monkeypatch):
    monkeypatch.setattr("ignite_monitor.model.isolation._runs_on_cudnn", lambda module: True)
    model, count = Recurrent(dropout), CountedLSTM.count
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(engine, x):
        optimizer.zero_grad()
        (model(x).sum() / (engine.state.iteration != 2)).backward()  # whose source GradMonitor looks for
        if engine.state.iteration != 2:
            optimizer.step()

    trainer, monitor = Engine(train_step), make(model, optimizer)
    monitor.attach(trainer, Events.ITERATION_STARTED)
    trainer.run([torch.ones(2, 3)] * 3)
    texts = [report.text for report in monitor.reports if "which cuDNN draws" in report.text]
    assert len(texts) == (dropout > 0)
    assert all("a second pass would change the dropout of layer (CountedLSTM)" in text for text in texts)
    assert (CountedLSTM.count - count == 3) == (dropout > 0)


class Device:
    """A module of torch for a device, such as ``torch.cuda``."""

    def __init__(self):
        self.state, self.written = torch.zeros(4), 0
        self.is_available, self.device_count = lambda: True, lambda: 1

    def get_rng_state(self, device):
        return self.state.clone()

    def set_rng_state(self, state, device):
        self.state, self.written = state, self.written + 1


@pytest.mark.parametrize("drawn", [0, 1])
def test_the_rng_state_of_a_device_is_set_if_it_has_changed(drawn, monkeypatch):
    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    with preserved_rng_state([torch.device("cuda", 0)]):
        device.state += drawn
    assert device.written == drawn
    assert not device.state.any()
