"""The producer of the first number that is not finite is named, and training is none the wiser."""

from __future__ import annotations

import copy
import io
import logging
import math
import os
import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine
from torch import nn

from ignite_monitor import GradMonitor, MonitorEvents, SpikeMonitor, StaticThreshold
from ignite_monitor.monitor import transfer
from ignite_monitor.nonfinite.locator import NonFiniteLocator
from tests._helpers import same
from tests._models import GPT, Lambda
from tests.nonfinite._models import IN_BACKWARD, MODELS, loss_of, nan_in_output, plant


def called(kind):
    """The names of the modules that are called."""
    make, batches = MODELS[kind]
    model, names = make(), []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: names.append(name))
    loss_of(model, batches(1)[0])
    return list(dict.fromkeys(names))


def planted(kind, plants, make=None):
    """Plant in every second iteration, and leave its step out: what is found each time, None for nothing."""
    make_model, batches = MODELS[kind]
    torch.manual_seed(0)
    model = (make or make_model)()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    result = [[] for _ in plants]

    def step(engine, batch):
        optimizer.zero_grad()
        place, is_planted = divmod(engine.state.iteration - 1, 2)
        undo = plants[place](model) if is_planted else None
        loss = loss_of(model, batch)
        loss.backward()
        if undo is not None:
            undo()
        if not is_planted:
            assert loss.isfinite()
            optimizer.step()

    def note(engine):
        assert engine.state.iteration % 2 == 0
        result[engine.state.iteration // 2 - 1].append(engine.state.spike.source)

    engine = Engine(step)
    GradMonitor(model, optimizer, threshold=StaticThreshold(1e30)).attach(engine)
    engine.add_event_handler(MonitorEvents.SPIKE_DETECTED, note)
    engine.run(batches(2 * len(plants)))
    assert all(len(item) == 1 for item in result)
    return [item[0] for item in result]


def planted_in(name, change):
    return lambda model: plant(model.get_submodule(name), change)


def fill(name):
    def plant_in(model):
        weight = model.get_parameter(name)
        kept = weight.detach().clone()
        weight.data.fill_(math.nan)
        return lambda: weight.data.copy_(kept)

    return plant_in


@pytest.mark.parametrize("kind", MODELS)
def test_nan_in_each_activation(kind):
    names = called(kind)
    result = planted(kind, [planted_in(name, nan_in_output) for name in names])
    assert [(item.kind, item.name) for item in result] == [("forward", name or "_root_") for name in names]


@pytest.mark.parametrize("kind", MODELS)
def test_nan_in_each_weight(kind):
    names = [name for name, _ in MODELS[kind][0]().named_parameters()]
    result = planted(kind, [fill(name) for name in names])
    assert [(item.kind, item.name) for item in result] == [("forward", name.rpartition(".")[0]) for name in names]
    assert all(item.text.endswith(f"its parameter {name}") for item, name in zip(result, names, strict=True))


@pytest.mark.parametrize("first", range(4) if os.environ.get("FULL_MATRIX") == "1" else [0])
@pytest.mark.parametrize("kind", MODELS)
def test_nan_in_each_backward(kind, first):
    """One way after the other; in the whole matrix, each way in each module."""
    names, ways = called(kind), list(IN_BACKWARD.values())
    ways = [ways[(first + i) % len(ways)] for i in range(len(names))]
    result = planted(kind, [planted_in(name, way) for name, way in zip(names, ways, strict=True)])
    assert {item.kind for item in result} == {"backward"}
    for item, name, way in zip(result, names, ways, strict=True):
        # A hook belongs to the operation of its tensor, which another module may have called.
        assert way is IN_BACKWARD["gradient_hook"] or item.name == (name or "_root_")


def trained(model, batches, loss_of=loss_of, *, monitored=True, planting=None, at=2, **options):
    """Return the located sources, and the whole training state, for a fault planted before an iteration."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    result, losses, gradients = [], [], []

    def step(engine, batch):
        optimizer.zero_grad()
        undo = planting(model) if planting is not None and engine.state.iteration == at else None
        loss = loss_of(model, batch)
        loss.backward()
        gradients.append([None if item.grad is None else item.grad.clone() for item in model.parameters()])
        if undo is not None:
            undo()
        if loss.isfinite() and all(item is None or item.isfinite().all() for item in gradients[-1]):
            optimizer.step()
        losses.append(loss.detach())

    engine = Engine(step)
    if monitored:
        GradMonitor(model, optimizer, threshold=StaticThreshold(1e30), **options).attach(engine)
        engine.add_event_handler(MonitorEvents.SPIKE_DETECTED, lambda engine: result.append(engine.state.spike.source))
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    engine.run(batches)
    return result, {
        "losses": losses,
        "gradients": gradients,
        "model": {name: item.clone() for name, item in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),
    }


class Careless(nn.Module):
    """Keeps state that its output depends on, and draws from all kinds of RNG."""

    def __init__(self, draws="all"):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.history, self.mean, self.number = [], torch.zeros(1), 0.0
        self.draws = draws
        self.generator = torch.Generator().manual_seed(3) if draws else None

    def forward(self, x):
        x = self.norm(self.first(x))
        value = x.detach().nan_to_num().sum()
        self.history.append(value)
        self.mean.mul_(0.9).add_(value)
        self.number += float(value)
        x = x + 1e-3 * (sum(self.history) + self.mean + self.number)
        if self.draws == "all":
            x = x + random.random() * 1e-3 + float(np.random.rand()) * 1e-3
        if self.draws:
            x = x + torch.rand(4, generator=self.generator) * 1e-3
        self.newest = x
        return self.last(F.dropout(x, 0.5, self.training))


class Normalized(nn.Module):
    """Draws from torch's generator alone, and keeps no state but that of its normalization."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(F.dropout(self.norm(self.first(x)), 0.5, self.training))


def vectors(count, width=4, classes=3):
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(8, width, generator=generator), torch.randint(classes, (8,), generator=generator))
        for _ in range(count)
    ]


def make(kind, *args, **kwargs):
    torch.manual_seed(0)
    return kind(*args, **kwargs)


@pytest.mark.parametrize("draws", ["", "own", "all"])
@pytest.mark.parametrize("planting", [fill("last.bias"), planted_in("norm", IN_BACKWARD["sqrt_at_zero"])])
def test_training_is_the_same_after_the_second_measurement(planting, draws):
    outcomes = []
    for monitored in (False, True):
        model = make(Careless, draws)
        result, outcome = trained(model, vectors(5), monitored=monitored, planting=planting)
        outcome["attributes"] = [model.history, model.mean, model.number, model.newest.detach()]
        outcome["random"] += (model.generator.get_state() if draws else None,)
        outcomes.append(outcome)
    assert same(*outcomes)
    # The states of Python's and NumPy's global generators are not known.
    assert [origin is None for origin in result] == [draws == "all"]


class Unlucky(nn.Linear):
    """Makes NaN of one draw in four of a generator of its own."""

    def __init__(self, replaced):
        super().__init__(4, 4)
        self.generator, self.replaced = torch.Generator().manual_seed(2), replaced

    def forward(self, x):
        if self.replaced:
            self.generator = torch.Generator().manual_seed(int(torch.randint(99, ())))
        return super().forward(x) * (math.nan if torch.rand((), generator=self.generator) < 0.25 else 1.0)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_generator_of_the_model_draws_the_same_again(replaced, caplog):
    model = make(lambda: nn.Sequential(Unlucky(replaced), nn.Linear(4, 3)))
    result, _ = trained(model, vectors(20))
    assert len(result) > 2
    assert [origin and origin.name for origin in result] == [None if replaced else "0"] * len(result)
    assert ("a random number generator of the model has been replaced" in caplog.text) == replaced


class Unlike:
    """An object that answers no question about its class, as a proxy of an object that is gone."""

    @property
    def __class__(self):
        raise ReferenceError


class Closed(list):
    """A container that does not show its members."""

    def __iter__(self):
        raise ReferenceError


@pytest.mark.parametrize("held", [[list(range(10**6)), Unlike()], Closed([1])], ids=["proxy", "container"])
def test_a_module_that_holds_objects_of_any_kind_trains_on(held, caplog):
    model = make(Careless, "")
    model.held = held
    result, _ = trained(model, vectors(3), planting=fill("last.bias"))
    is_closed = isinstance(held, Closed)
    assert [item and item.name for item in result] == [None if is_closed else "last"]
    assert ("could not be located" in caplog.text) == is_closed


def test_nan_in_the_data_is_no_modules():
    batches = vectors(3)
    batches[1][0][2, 1] = math.nan
    assert [(item.kind, item.name) for item in trained(make(Careless, ""), batches)[0]] == [("input", "")]
    batches[1][0][2, 1] = -math.inf
    assert [(item.kind, item.name) for item in trained(make(Careless, ""), batches)[0]] == [("input", "")]


@pytest.mark.parametrize("planting", [None, planted_in("norm", IN_BACKWARD["sqrt_at_zero"])])
@pytest.mark.parametrize("of_loss", [lambda loss: loss * math.nan, lambda loss: (loss * 0).sqrt() + loss])
def test_what_starts_in_the_loss(of_loss, planting):
    """Also where the model's backward would make another one."""
    counter = iter(range(9))
    result, _ = trained(
        make(Careless, ""),
        vectors(4),
        lambda model, batch: of_loss(loss_of(model, batch)) if next(counter) == 1 else loss_of(model, batch),
        planting=planting,
    )
    assert [(item.kind, item.name) for item in result] == [("loss", "")]


def test_what_a_hook_of_the_user_makes_is_not_the_loss(caplog):
    model = make(nn.Sequential, nn.Linear(4, 4), nn.Linear(4, 3))
    model.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * math.nan,))
    result, _ = trained(model, vectors(1), lambda model, batch: loss_of(model, (batch[0].requires_grad_(), batch[1])))
    assert result == [None]
    assert "could not be located: hooks may have changed the gradient of the model's outputs" in caplog.text


class Parts(nn.Module):
    """Outputs that the loss uses, and others."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.extra = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, batch):
        x = self.body(batch["x"] * 1).relu()
        return {"logits": self.head(x), "extra": [self.extra(x), (x * 0).square().sum(-1).sqrt()]}


def test_outputs_and_calls_that_the_loss_does_not_use_are_no_source():
    """One has a non-finite backward, one is not finite itself, and one call had a non-finite input."""

    def loss(model, batch, factor=math.nan):
        model({"x": batch[0] * math.inf})
        return F.cross_entropy(model({"x": batch[0]})["logits"], batch[1]) * factor

    cases = [(loss, None), (loss, fill("extra.weight")), (partial(loss, factor=2.0), fill("head.bias"))]
    results = [trained(make(Parts), vectors(1), loss, planting=planting, at=1)[0] for loss, planting in cases]
    assert [[(item.kind, item.name) for item in result] for result in results] == [
        [("loss", "")], [("loss", "")], [("forward", "head")]
    ]  # fmt: skip


class Changing(nn.Module):
    """Does something else in each of its calls, of which a copy makes the second."""

    def __init__(self, *changes):
        super().__init__()
        self.body, self.head, self.changes = nn.Linear(4, 6), nn.Linear(6, 3), [*changes]

    def forward(self, x):
        return self.head(self.changes.pop(0)(self.body(x).tanh()))


@pytest.mark.parametrize("second", [nan_in_output, torch.neg])
def test_a_copy_that_does_something_else_shows_nothing(second, caplog):
    result, _ = trained(make(Changing, nan_in_output, torch.clone), vectors(1))
    assert result == [None]
    model = make(Changing, torch.clone, second)
    result, _ = trained(model, vectors(1), planting=lambda model: hook_on_gradient(model.body.bias).remove, at=1)
    assert result == [None]
    assert caplog.text.count("a copy of the model returns other outputs than the model in the train step") == 2


@pytest.mark.parametrize(("second", "expected"), [(torch.clone, "head"), (torch.neg, None)])
def test_a_sample_of_a_large_output_is_compared(second, expected):
    """The element that is not finite is not in it."""
    batch = torch.randn(999, 4, generator=torch.Generator().manual_seed(4)), torch.zeros(999, dtype=torch.long)
    changes = iter([torch.clone, second])
    model = make(Lambda, lambda self, x: self.head(x), head=nn.Linear(4, 3))
    planting = planted_in("head", lambda output: nan_in_output(next(changes)(output)))
    result, _ = trained(model, [batch], planting=planting, at=1)
    assert [item and item.name for item in result] == [expected]


@pytest.mark.parametrize("way", IN_BACKWARD)
def test_what_the_model_makes_of_one_output_is_not_the_loss_of_another(way):
    """In an autoencoder that returns its code too, and in a model that is called on its own output."""

    def code(self, x):
        z = self.encoder(x)
        return self.decoder(self.inner(z)), z

    layers = {"encoder": nn.Linear(4, 2), "inner": nn.Linear(2, 2), "decoder": nn.Linear(2, 4)}
    cases = [
        (code, lambda model, batch: sum(item.square().mean() for item in model(batch[0]))),
        (lambda self, x: code(self, x)[0], lambda model, batch: model(model(batch[0])).square().mean()),
    ]
    for forward, loss in cases:
        planting = planted_in("inner", IN_BACKWARD[way])
        result, _ = trained(make(Lambda, forward, **layers), vectors(1), loss, planting=planting, at=1)
        assert [(item.kind, item.name) for item in result] == [("backward", "inner")]


def test_a_penalty_of_an_output_that_others_are_computed_from():
    def loss(model, batch):
        decoded, code = model(batch[0])
        return decoded.square().mean() + (code * 0).abs().sqrt().sum()

    layers = {"encoder": nn.Linear(4, 2), "decoder": nn.Linear(2, 4)}
    model = make(Lambda, lambda self, x: (self.decoder(code := self.encoder(x)), code), **layers)
    assert [item.kind for item in trained(model, vectors(1), loss)[0]] == ["loss"]


def test_missing_values_that_the_model_replaces_are_no_source(caplog):
    model = make(Lambda, lambda self, x: self.layer(x.nan_to_num(0.0)) / self.zero, layer=nn.Linear(4, 3), zero=0.0)
    data = vectors(1)
    data[0][0][:, 1] = math.nan
    model.zero = torch.zeros(3)
    assert trained(model, data)[0] == [None]
    assert "with zeros in their place its outputs are not" in caplog.text


def test_of_two_modules_none_is_named(caplog):
    """The infinite values of the first are replaced."""
    members = {"first": nn.Linear(4, 4), "last": nn.Linear(4, 3)}
    model = make(Lambda, lambda self, x: self.last(self.first(x).nan_to_num(0.0)), **members)

    def planting(model):
        undo = plant(model.first, nan_in_output), plant(model.last, nan_in_output)
        return lambda: [item() for item in undo]

    assert trained(model, vectors(1), planting=planting, at=1)[0] == [None]
    assert "first and last make non-finite outputs of finite inputs" in caplog.text


@pytest.mark.parametrize("is_opaque", [False, True])
def test_inputs_that_may_have_changed_are_not_run_again(is_opaque, caplog):
    """In place, in a dict, after the call; and in an object, in which no tensor is seen."""

    def loss(model, batch):
        held = {"x": batch[0].clone()} | ({"of": Unlike} if not is_opaque else {"of": Opaque()})
        logits = model(held)["logits"]
        if not is_opaque:
            held["x"].zero_()
        return F.cross_entropy(logits, batch[1])

    result, _ = trained(make(Parts), vectors(1), loss, planting=fill("head.bias"), at=1)
    assert result == [None]
    assert ("inputs have been changed in place" in caplog.text) != is_opaque
    assert ("changes of the model's inputs can't be seen" in caplog.text) == is_opaque


class Opaque:
    pass


def test_a_hook_of_the_model_on_its_own_output_is_not_the_loss():
    result, _ = trained(make(Careless, ""), vectors(3), planting=planted_in("last", IN_BACKWARD["gradient_hook"]))
    assert [item.kind for item in result] == ["backward"]


def test_frozen_parts_are_named_as_far_as_their_use_is_seen():
    """Their outputs have no graph, which would show the use."""

    def forward(self, x):
        with torch.no_grad():
            x = self.backbone(x)
        return self.head(self.frozen(x))

    for name, wanted in (("backbone.0", "_root_"), ("frozen", "_root_")):
        layers = {"backbone": nn.Sequential(nn.Linear(4, 4), nn.Tanh()), "frozen": nn.Linear(4, 4)}
        model = make(Lambda, forward, **layers, head=nn.Linear(4, 3))
        model.frozen.requires_grad_(False)
        result, _ = trained(model, vectors(2), planting=fill(f"{name}.bias"))
        assert [(item.kind, item.name) for item in result] == [("forward", wanted)]


def hook_on_gradient(parameter):
    return parameter.register_hook(lambda gradient: gradient * math.nan)


def hook_on_accumulated(parameter):
    def fill_gradient(parameter):
        parameter.grad.fill_(math.nan)

    return parameter.register_post_accumulate_grad_hook(fill_gradient)


@pytest.mark.parametrize("hook", [hook_on_gradient, hook_on_accumulated])
def test_what_a_hook_on_a_parameter_makes_is_not_located(hook, caplog):
    result, _ = trained(make(Careless, ""), vectors(3), planting=lambda model: hook(model.norm.bias).remove)
    assert result == [None]
    assert "could not be located: forward and backward of a copy of the model are finite" in caplog.text


@pytest.mark.parametrize("name", ["tokens", "blocks.0.attention", "head"])
def test_tied_weights(name):
    planting = planted_in(name, IN_BACKWARD["sqrt_at_zero"])
    result, _ = trained(make(GPT, tied=True), MODELS["gpt"][1](3), planting=planting)
    assert [(item.kind, item.name) for item in result] == [("backward", name)]


@pytest.mark.parametrize("name", ["layers.layers.0.linear1", "layers.layers.1.norm1", "layers", "head"])
def test_a_mask_of_minus_infinity_is_nothing_bad(name):
    mask, layer = nn.Transformer.generate_square_subsequent_mask(8), nn.TransformerEncoderLayer(8, 2, 16)
    model = make(
        Lambda,
        lambda self, x, mask: self.head(self.layers(self.embed(x), mask)),
        embed=nn.Linear(4, 8),
        layers=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        head=nn.Linear(8, 3),
    )
    result, _ = trained(
        model,
        vectors(3),
        lambda model, batch: F.cross_entropy(model(batch[0], mask), batch[1]),
        planting=planted_in(name, nan_in_output),
    )
    assert [(item.kind, item.name) for item in result] == [("forward", name)]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_the_call_that_makes_it_is_inspected(which):
    """Several calls before one backward, each with an RNG state of its own."""

    def planting(model):
        count = iter(range(99))

        return plant(model.norm, lambda output: output * math.nan if next(count) % 3 == which else output)

    def loss(model, batch):
        return sum(loss_of(model, (batch[0] * factor + torch.randn(4), batch[1])) for factor in (1, 2, 3))

    outcomes = [
        trained(make(Normalized), vectors(4), loss, monitored=item, planting=planting) for item in (False, True)
    ]
    assert [(item.kind, item.name) for item in outcomes[1][0]] == [("forward", "norm")]
    assert same(outcomes[0][1], outcomes[1][1])


def test_several_backwards_of_one_forward():
    def loss(model, batch):
        output = model(batch[0])
        first = F.cross_entropy(output, batch[1])
        first.backward(retain_graph=True)
        return first

    result, _ = trained(make(Normalized), vectors(3), loss, planting=planted_in("norm", nan_in_output))
    assert [(item.kind, item.name) for item in result] == [("forward", "norm")]


def test_dropout_is_that_of_the_training():
    """If the dropout mask decides, a second pass with another mask finds nothing or another source."""

    def forward(self, x):
        self.taken = int(torch.randint(16, ()))
        return self.paths[self.taken](x)

    def planting(model):
        for path in model.paths:
            plant(path, lambda output: output * math.nan)
        return lambda: chosen.append(model.paths[model.taken])

    chosen = []
    model = make(Lambda, forward, paths=nn.ModuleList(nn.Linear(4, 3) for _ in range(16)))
    result, _ = trained(model, vectors(2), planting=planting)
    assert [model.get_submodule(item.name) for item in result] == chosen


def test_a_row_is_inspected_once(caplog):
    model = make(nn.Linear, 4, 3)
    batches = vectors(6)
    for place in (1, 2, 3, 5):
        batches[place][0][:] = math.nan
    with caplog.at_level(logging.WARNING):
        result, _ = trained(model, batches)
    assert [item.kind for item in result] == ["input"] * 4
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[1].strip() for line in lines] == ["iteration 2", "iteration 6"]
    assert all("The model's inputs are not finite" in line for line in lines)


def test_an_overflow_is_reported_only_where_forward_is_not_finite(caplog):
    def train_scaled(planting):
        model = make(Normalized)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        scaler = torch.amp.GradScaler("cpu", init_scale=3e38)

        def step(engine, batch):
            optimizer.zero_grad()
            undo = planting(model) if engine.state.iteration == 4 else None
            scaler.scale(loss_of(model, batch) * 100).backward()
            scaler.step(optimizer)
            scaler.update(1.0)
            if undo is not None:
                undo()

        engine = Engine(step)
        monitor = GradMonitor(model, optimizer, scaler=scaler)
        monitor.attach(engine)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            engine.run(vectors(5))
        return monitor.metrics["grad/nonfinite_count"], [record.getMessage() for record in caplog.records]

    assert train_scaled(lambda model: None) == (1.0, [])
    count, lines = train_scaled(planted_in("norm", nan_in_output))
    assert count == 2.0
    assert [line.split(":")[1].strip() for line in lines] == ["iteration 4"]
    assert "It comes from the forward of norm" in lines[0]


def test_what_cannot_be_run_again_is_reported(caplog):
    class InPlace(nn.Linear):
        def forward(self, x):
            return super().forward(x.mul_(2))

    with caplog.at_level(logging.WARNING):
        result, _ = trained(make(InPlace, 4, 3), vectors(3), planting=fill("bias"))
    assert result == [None]
    assert "could not be located: the model's inputs have been changed in place" in caplog.text


def test_a_device_whose_rng_state_is_not_kept_is_named():
    model = nn.Linear(4, 1, device="meta")
    locator = NonFiniteLocator(model)
    with locator.calls:
        model(torch.zeros(2, 4, device="meta")).sum().backward()
        text = locator.locate(False, False)
    assert text.endswith("could not be located: RNG state is kept for the CPU and CUDA only")


def test_a_loss_of_another_monitor_has_the_origin_too():
    model = make(Normalized)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    result = []

    def step(engine, batch):
        undo = planted_in("norm", nan_in_output)(model) if engine.state.iteration == 2 else None
        loss = loss_of(model, batch)
        loss.backward()
        if undo is not None:
            undo()
        return loss.item()

    engine = Engine(step)
    SpikeMonitor(lambda engine: engine.state.output, prefix="loss", flag="loss_spike").attach(engine)
    GradMonitor(model, optimizer).attach(engine)
    engine.add_event_handler(MonitorEvents.SPIKE_DETECTED, lambda engine: result.append(engine.state.spike))
    engine.run(vectors(2))
    assert [(item.name, item.source.name) for item in result] == [("grad/norm", "norm"), ("loss/value", "norm")]
    assert [item.threshold for item in result] == [math.inf] * 2


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("hook", [nan_in_output, IN_BACKWARD["sqrt_at_zero"]])
def test_activation_checkpointing(hook, reentrant):
    planting = planted_in("blocks.0.mlp.1", hook)
    data = MODELS["gpt"][1](3)
    (_, plain), (result, outcome) = [
        trained(make(GPT, reentrant=reentrant), data, planting=planting, monitored=monitored)
        for monitored in (False, True)
    ]
    assert same(outcome, plain)
    if hook is nan_in_output:  # reentrant checkpointing makes no graph in forward, which would show what is used
        assert [(item.kind, item.name) for item in result] == [("forward", "_root_" if reentrant else "blocks.0.mlp.1")]
    elif reentrant:  # its graph is made in backward
        assert {(item.kind, item.name) for item in result} == {("backward", "_root_")}
        assert "CheckpointFunctionBackward" in result[0].text
    else:
        assert {(item.kind, item.name) for item in result} == {("backward", "blocks.0.mlp.1")}


def test_compiled():
    model = make(GPT)
    used = torch.compile(model, backend="eager")
    batches = MODELS["gpt"][1](3)
    result, _ = trained(used, batches, planting=lambda _: fill("blocks.0.attention.qkv.weight")(model))
    assert [(item.kind, item.name) for item in result] == [("forward", "blocks.0.attention.qkv")]


def test_recurrent_layers():
    def forward(self, x):
        return self.head(self.layer(x.unsqueeze(1))[0].squeeze(1))

    model = Lambda(forward, layer=nn.LSTM(4, 6, 2, batch_first=True, dropout=0.1), head=nn.Linear(6, 3))
    planting = planted_in("layer", lambda output: (nan_in_output(output[0]), output[1]))
    result, _ = trained(model, vectors(3), planting=planting)
    assert [(item.kind, item.name) for item in result] == [("forward", "layer")]


def test_a_model_saved_and_copied_in_the_train_step_is_not_followed():
    def loss(model, batch):
        torch.save(model, io.BytesIO())
        value = loss_of(model, batch)
        loss_of(copy.deepcopy(model), batch).backward()
        return value

    result, _ = trained(make(nn.Linear, 4, 3), vectors(3), loss, planting=fill("bias"))
    assert [(item.kind, item.name) for item in result] == [("forward", "_root_")]


def test_a_model_of_which_parts_alone_are_called(caplog):
    model = make(nn.Sequential, nn.Linear(4, 4), nn.Linear(4, 3))
    with caplog.at_level(logging.WARNING):
        result, _ = trained(
            model,
            vectors(3),
            lambda model, batch: F.cross_entropy(model[1](model[0](batch[0])), batch[1]),
            planting=fill("0.bias"),
        )
    assert result == [None]
    assert "could not be located: the model was not called as a whole" in caplog.text


def test_without_a_reader_an_accelerator_is_not_waited_for(monkeypatch, caplog):
    """If the detection is on a device, only a listener triggers the search."""
    monkeypatch.setattr(transfer, "HOST", set())
    for listens in (False, True):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            options = {"on_spike": lambda engine, norm: None} if listens else {}
            model = make(nn.Linear, 4, 3)
            engine = Engine(lambda engine, batch, model=model: loss_of(model, batch).backward())
            GradMonitor(model, **options).attach(engine)
            data = vectors(2)
            data[1][0].fill_(math.nan)
            engine.run(data)
        assert [("could not be located" in text, "not finite" in text) for text in caplog.messages] == [
            (False, True)
        ] * listens
