"""What ActivationHandler publishes, against plain computations in float64."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ignite_monitor import ActivationHandler, Metric, MonitorEvents, record
from tests.activation.test_statistics import expected


def run(model, step=None, batches=1, size=8, event=None, **kwargs):
    """What is published in each iteration, as floats."""
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(size, 6, generator=generator) for _ in range(batches)]
    handler = ActivationHandler(model, **kwargs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(engine, x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    engine = Engine((lambda engine, x: step(handler, optimizer, x)) if step else train_step)
    handler.attach(engine, event or Events.ITERATION_STARTED)
    published = []
    engine.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda e: published.append({name: float(value) for name, value in e.state.metrics.items()}),
    )
    engine.run(data)
    handler.detach()
    return published


def part(published, start):
    start = f"{start}/"
    return {name[len(start) :]: value for name, value in published.items() if name.startswith(start)}


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def data(size=8):
    return torch.randn(size, 6, generator=torch.Generator().manual_seed(1))


def test_every_module_is_seen_with_the_built_in_set():
    model = mlp()
    reference = copy.deepcopy(model).double()
    (published,) = run(model, activations=True)
    x = data().double()
    outputs = {}
    for name, module in reference.named_children():
        x = outputs[name] = module(x)
    outputs["_root_"] = x
    assert set(published) == {f"activation/{name}/{kind}" for name in outputs for kind in expected([x])}
    for name, output in outputs.items():
        assert part(published, f"activation/{name}") == pytest.approx(expected([output]), rel=1e-4), name


def test_own_functions_with_their_own_choice_and_way():
    model = mlp()
    metrics = {
        "abs": torch.abs,
        "std": True,
        "rows": Metric(len, include="^2$", aggregate="sum"),
        "largest": Metric(lambda x: x.max(), exclude="1", aggregate="max"),
        "spread": Metric(lambda x: x.mean(), include="^0$", aggregate=lambda values: values.max() - values.min()),
        "over": lambda x: x > 0,
    }

    def step(handler, optimizer, x):
        for piece in (x[:5], x[5:]):
            model(piece)

    (published,) = run(model, step, activations=metrics, exclude="_root_")
    x = data().double()
    double = copy.deepcopy(model).double()
    outputs = {"0": double[0](x), "1": double[:2](x), "2": double(x)}
    wanted = {f"activation/{name}/abs": output.abs().mean().item() for name, output in outputs.items()}
    wanted |= {f"activation/{name}/std": output.std().item() for name, output in outputs.items()}
    wanted |= {f"activation/{name}/over": (output > 0).double().mean().item() for name, output in outputs.items()}
    wanted |= {f"activation/{name}/largest": outputs[name].max().item() for name in "02"}
    wanted["activation/2/rows"] = 8
    means = [outputs["0"][:5].mean().item(), outputs["0"][5:].mean().item()]
    wanted["activation/0/spread"] = max(means) - min(means)
    assert published == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(("name", "wrong"), [("nothing", lambda x: None), ("fails", lambda x: x.view(7, 7))])
def test_a_metric_that_fails_names_itself_module_and_shape(name, wrong):
    with pytest.raises(RuntimeError, match=rf"'{name}'.*activation/1.*\(8, 5\)") as caught:
        run(mlp(), activations={name: Metric(wrong, include="1")})
    assert isinstance(caught.value.__cause__, (RuntimeError, TypeError))


@pytest.mark.parametrize("order", [("x", "low/x", "very/low/x"), ("very/low/x", "low/x", "x")])
def test_a_metric_whose_name_ends_with_anothers_has_its_own_aggregate(order):
    """Of numbers 1, 2 and 3, whichever is given first; what takes them says which it is."""
    aggregates = {
        "x": lambda numbers: numbers.max(),
        "low/x": lambda numbers: numbers.min(),
        "very/low/x": lambda numbers: -numbers.sum(),
    }
    model = nn.Identity()
    model.weight = nn.Parameter(torch.ones(1))
    handler = ActivationHandler(
        model, activations={name: Metric(torch.mean, aggregate=aggregates[name]) for name in order}
    )
    engine = Engine(lambda _, batch: [model(each) for each in batch])
    handler.attach(engine)
    engine.run([[torch.full((2,), value) for value in (1.0, 2.0, 3.0)]])
    published = part(engine.state.metrics, "activation/_root_")
    assert published == {"x": 3.0, "low/x": 1.0, "very/low/x": -6.0}


def test_an_aggregate_that_fails_names_itself():
    def fails(values):
        raise ZeroDivisionError

    with pytest.raises(RuntimeError, match="activation/0/m") as caught:
        run(mlp(), activations={"m": Metric(torch.mean, aggregate=fails)})
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    loss: torch.Tensor | None = None


class Kinds(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(6, 4)

    def forward(self, *, x):
        y = self.layer(x)
        return {
            "tuple": lambda: (y, (y.sum(), y.argmax())),
            "dict": lambda: {"a b": y, "none": None},
            "dataclass": lambda: Output(y, y.mean()),
        }[self.kind]()


@pytest.mark.parametrize(
    ("kind", "places"), [("tuple", ["0", "1/0"]), ("dict", ["a_b"]), ("dataclass", ["hidden", "loss"])]
)
def test_outputs_of_any_structure_and_keyword_arguments(kind, places):
    model = Kinds(kind)
    (published,) = run(model, lambda handler, optimizer, x: model(x=x) and None, activations={"mean": True})
    assert set(part(published, "activation")) == {"layer/mean", *(f"_root_/{place}/mean" for place in places)}


def test_a_model_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=8, use_cache=False)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.arange(8)[None]

    def step(handler, optimizer, x):
        model(input_ids=tokens, labels=tokens).loss.backward()

    (published,) = run(model, step, activations={"mean": True}, attention=True)
    assert {"activation/_root_/loss/mean", "activation/_root_/logits/mean"} <= set(published)
    assert {"attention_entropy/transformer.h.0.attn/head_0", "attention_entropy/transformer.h.0.attn/head_1"} <= set(
        published
    )


def test_shared_weights_and_uneven_micro_batches_weigh_by_elements():
    model = mlp()

    def step(handler, optimizer, x):
        for piece in (x[:1], x[1:4], x[4:]):
            model[1](model(piece))

    (published,) = run(model, step, activations=True, include="^1$")
    x, double = data().double(), copy.deepcopy(model).double()
    outputs = [each for p in (x[:1], x[1:4], x[4:]) for each in (double[:2](p), double(p).relu())]
    assert part(published, "activation/1") == pytest.approx(expected(outputs), rel=1e-4)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_checkpointing_repeats_is_no_second_pass(use_reentrant):
    model = mlp()

    def step(handler, optimizer, x):
        x = x.clone().requires_grad_()
        checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()

    (published,) = run(model, step, activations={"passes": Metric(lambda x: 1.0, aggregate="sum")})
    assert set(published.values()) == {1.0}


def test_in_place_operations_come_too_late():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.relu = nn.Linear(6, 5), nn.ReLU(inplace=True)

        def forward(self, x):
            return self.relu(self.layer(x))

    model = InPlace()
    double = copy.deepcopy(model).double()
    (published,) = run(model, activations={"mean": True, "smallest": lambda x: x.min()})
    output = double.layer(data().double())
    assert published["activation/layer/mean"] == pytest.approx(output.mean().item(), rel=1e-4)
    assert published["activation/layer/smallest"] == pytest.approx(output.min().item(), rel=1e-4)
    assert published["activation/relu/mean"] == pytest.approx(output.relu().mean().item(), rel=1e-4)


def test_eval_mode_and_pauses_are_not_seen():
    model = mlp()

    def step(handler, optimizer, x):
        model(x)
        model.eval()
        model(100 * x)
        model.train()
        with handler.paused():
            model(100 * x)
            record("m", 1.0, model)

    (published,) = run(model, step, activations={"passes": Metric(lambda x: 1.0, aggregate="sum")})
    assert published == {f"activation/{name}/passes": 1.0 for name in ("_root_", "0", "1", "2")}


def test_nonfinite_activations_are_counted_and_nothing_else_is_published_of_them():
    class Broken(nn.Module):
        def forward(self, x):
            return x.masked_fill(x > 1, math.inf)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 50), Broken())
    with torch.no_grad():
        count = (model[0](data()) > 1).sum().item()
    assert count > 0
    (published,) = run(model, activations=dict.fromkeys(["mean", "std", "nonfinite_count"], True) | {"m": torch.mean})
    assert part(published, "activation/1") == {"nonfinite_count": count}
    assert set(part(published, "activation/0")) == {"mean", "std", "nonfinite_count", "m"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 300), nn.Linear(300, 300)).to(dtype)
    x = data(400).to(dtype)
    (published,) = run(model, lambda handler, optimizer, _: model(x), activations=True)
    with torch.no_grad():
        assert part(published, "activation/1") == pytest.approx(expected([model(x)]), rel=1e-6)


def test_bad_arguments():
    model = mlp()
    for error, kwargs in [
        (TypeError, {"activations": torch.mean}),
        (TypeError, {"activations": {"m": 3}}),
        (TypeError, {"activations": {3: torch.mean}}),
        (ValueError, {"activations": {"a b": torch.mean}}),
        (ValueError, {"parameters": {"dead_fraction": True}}),
        (ValueError, {"aggregate": "median"}),
        (TypeError, {"aggregate": 3}),
        (ValueError, {"include": "("}),
        (ValueError, {"activation_differences": True}),
        (ValueError, {"reference": "init"}),
        (ValueError, {"activation_differences": True, "reference": mlp()[:1]}),
        (TypeError, {"attention": "yes"}),
        (TypeError, {"scaler": 1}),
        (ValueError, {"prefix": "a b"}),
    ]:
        with pytest.raises(error, match="Argument"):
            ActivationHandler(model, **kwargs)
    with pytest.raises(TypeError, match="fn"):
        Metric("mean")


def test_two_on_one_engine_need_prefixes():
    model = mlp()
    engine = Engine(lambda engine, x: model(x).sum().item())
    first = ActivationHandler(model, activations=True)
    first.attach(engine)
    with pytest.raises(ValueError, match="prefix"):
        ActivationHandler(model, activations={"m": torch.mean}).attach(engine)
    second = ActivationHandler(model, activations=True, prefix="b")
    second.attach(engine)
    engine.run([data()])
    assert {f"b/{name}" for name in first.metrics} == set(second.metrics)


# Gradients and parameters


def gradients_of(model, x, pieces=1):
    double = copy.deepcopy(model).double()
    for piece in x.double().chunk(pieces):
        double(piece).square().mean().backward()
    return {name: parameter.grad for name, parameter in double.named_parameters()}


def without_dead(values):
    return {name: value for name, value in values.items() if name != "dead_fraction"}


@pytest.mark.parametrize("clip", [None, 0.01, 1e9])
@pytest.mark.parametrize("pieces", [1, 2])
def test_gradients_before_and_after_clipping_though_the_step_zeroes_them(clip, pieces):
    model = mlp()
    gradients = gradients_of(model, data(), pieces)

    def step(handler, optimizer, x):
        for piece in x.chunk(pieces):
            model(piece).square().mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()

    (published,) = run(model, step, gradients=True)
    factor = min(1.0, (clip or 1e9) / math.sqrt(sum(g.square().sum().item() for g in gradients.values())))
    for name, gradient in gradients.items():
        wanted = without_dead(expected([gradient]))
        assert part(published, f"gradient/{name}") == pytest.approx(wanted, rel=1e-4, abs=1e-9), name
        after = without_dead(expected([gradient * factor])) if clip == 0.01 else {}
        assert part(published, f"gradient_after_clip/{name}") == pytest.approx(after, rel=1e-4, abs=1e-9), name


def test_gradients_that_a_backward_does_not_reach_are_not_measured_for_having_been_changed():
    model = mlp()
    first, _, last = model
    truth = {}

    def step(handler, optimizer, x):
        model.zero_grad(set_to_none=False)
        last(torch.randn(4, last.in_features)).square().mean().backward()
        truth.update((name, each.grad.clone()) for name, each in model.named_parameters() if name.startswith("2"))
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        if len(truth) == 2:
            first(torch.randn(4, first.in_features)).square().mean().backward(inputs=[first.weight])
        optimizer.step()

    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    (published,) = run(model, step, gradients=True)
    for name, gradient in truth.items():
        assert part(published, f"gradient/{name}") == pytest.approx(without_dead(expected([gradient])), rel=1e-4)
        assert part(published, f"gradient_after_clip/{name}")["max_abs"] < 1e-2


def test_scaled_gradients_are_unscaled_and_an_overflow_is_counted():
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    gradients = gradients_of(model, data())
    calls = []

    def step(handler, optimizer, x):
        calls.append(1)
        optimizer.zero_grad()
        loss = model(x).square().mean() * (math.inf if len(calls) == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    published = run(model, step, batches=2, gradients=True, scaler=scaler)
    for name, gradient in gradients.items():
        wanted = without_dead(expected([gradient]))
        assert part(published[0], f"gradient/{name}") == pytest.approx(wanted, rel=1e-4, abs=1e-9)
        assert set(part(published[1], f"gradient/{name}")) == {"nonfinite_count"}
    assert not part(published[0], "gradient_after_clip")


@pytest.mark.parametrize("wanted", ["nothing", "metric", "handler"])
def test_parameters_have_a_hook_only_where_gradients_are_wanted(wanted):
    model, seen, ready = nn.Linear(3, 2), [], []

    def train_step(engine, batch):
        model(batch).sum().backward()
        seen.extend(bool(each._post_accumulate_grad_hooks) for each in model.parameters())

    trainer = Engine(train_step)
    ActivationHandler(model, activations=True, gradients={"mean": True} if wanted == "metric" else None).attach(trainer)
    if wanted == "handler":
        trainer.add_event_handler(MonitorEvents.GRADIENTS_READY, lambda: ready.append(1))
    trainer.run([torch.ones(4, 3)] * 2)
    assert seen == [wanted != "nothing"] * 4
    assert len(ready) == (2 if wanted == "handler" else 0)
    assert ("gradient/weight/mean" in trainer.state.metrics) is (wanted == "metric")


def test_gradients_of_an_earlier_iteration_are_none():
    model = mlp()
    calls = []

    def step(handler, optimizer, x):
        calls.append(1)
        if len(calls) != 2:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

    published = run(model, step, batches=3, gradients={"n": torch.norm})
    assert [len(each) for each in published] == [4, 0, 4]


def test_parameters_are_those_that_the_forward_pass_used():
    model = mlp()
    initial = copy.deepcopy(model)
    published = run(
        model, batches=2, parameters={"n": torch.norm, "mean": True}, include="weight", reference="init",
        parameter_differences={"d": lambda now, then: (now - then).norm()},
    )  # fmt: skip
    for name, parameter in initial.named_parameters():
        wanted = {"n": parameter.double().norm().item(), "mean": parameter.double().mean().item()}
        assert part(published[0], f"parameter/{name}") == pytest.approx(wanted if "weight" in name else {}, rel=1e-5)
    differences = [part(each, "parameter_difference") for each in published]
    assert set(differences[0].values()) == {0.0}
    assert min(differences[1].values()) > 0


# The reference


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.norm(self.layer(x)))


@pytest.mark.parametrize("offload", [False, True])
def test_differences_from_the_start_are_0_before_the_first_update(offload):
    torch.manual_seed(0)
    model, plain = Noisy(), Noisy()
    plain.load_state_dict(model.state_dict())
    initial = copy.deepcopy(model)
    torch.manual_seed(3)
    published = run(model, batches=2, activation_differences=True, reference="init", offload=offload)
    drawn = torch.get_rng_state()
    torch.manual_seed(3)
    run(plain, batches=2)
    assert torch.equal(drawn, torch.get_rng_state())
    for ours, theirs in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    assert set(part(published[0], "activation_difference")) == {
        f"{name}/{kind}" for name in ("layer", "norm", "drop", "_root_")
        for kind in ("mean", "std", "l2_norm", "max_abs", "nonfinite_count")
    }  # fmt: skip
    assert set(published[0].values()) == {0.0}
    # After one step, of the linear layer, which needs no random number.
    torch.manual_seed(3)
    again = copy.deepcopy(initial)
    optimizer = torch.optim.SGD(again.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randn(8, 6, generator=generator) for _ in range(2))
    again(first).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        wanted = expected([again.layer(second).double() - initial.layer(second).double()])
    assert part(published[1], "activation_difference/layer") == pytest.approx(without_dead(wanted), rel=1e-3, abs=1e-8)


def test_a_metric_of_differences_that_fails_is_raised():
    def wrong(ours, theirs):
        raise KeyError("mine")

    with pytest.raises(RuntimeError, match=r"Metric 'm' of activation_difference/0, .* \(8, 5\), failed: ") as error:
        run(mlp(), activation_differences={"m": wrong}, reference="init")
    assert isinstance(error.value.__cause__, KeyError)


@pytest.mark.parametrize("whole", [1, 3, None])
def test_one_warning_where_there_was_no_pass_to_compare(whole, caplog):
    model, calls = mlp(), []

    def step(handler, optimizer, x):
        calls.append(x)
        if len(calls) == whole:
            model(x)
        for layer in model:
            x = layer(x)

    with caplog.at_level(logging.WARNING):
        published = run(model, step, batches=3, activation_differences=True, reference="init")
    assert [bool(values) for values in published] == [i == whole for i in (1, 2, 3)]
    messages = [each.getMessage() for each in caplog.records if "forward pass of the whole model" in each.getMessage()]
    assert len(messages) == (whole is None)


def test_a_module_as_the_reference_and_own_functions_of_two():
    model, other = mlp(), mlp(1)
    (published,) = run(
        model, activation_differences={"d": lambda a, b: (a - b).abs().max()}, reference=other, include="^0$"
    )
    x, weights = data().double(), [mlp(seed)[0].double() for seed in (0, 1)]
    wanted = (weights[0](x) - weights[1](x)).abs().max().item()
    assert published == pytest.approx({"activation_difference/0/d": wanted}, rel=1e-4)


def test_the_reference_is_resumed():
    model = mlp()
    handler = ActivationHandler(model, parameter_differences=True, reference="init")
    state = handler.state_dict()
    resumed = ActivationHandler(mlp(5), parameter_differences=True, reference="init")
    resumed.load_state_dict(state)
    assert torch.equal(resumed.reference[0].weight, model[0].weight)
    with pytest.raises(ValueError, match="reference"):
        ActivationHandler(mlp()).load_state_dict(state)


# Recording


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x):
        y = self.layer(x)
        record("open", y > 0)
        record("bias", 2, module=self.layer)
        return y


def test_record_weighs_by_elements_and_is_nothing_elsewhere():
    model = Gate()

    def step(handler, optimizer, x):
        model(x[:2]), model(x[2:])

    (published,) = run(model, step)
    wanted = (model.layer(data()) > 0).double().mean().item()
    assert published == pytest.approx({"activation/_root_/open": wanted, "activation/layer/bias": 2.0})
    assert run(model, step, event=Events.ITERATION_STARTED(every=2)) == [{}]
    model(data())
    record("outside", 1.0)


class Colliding(nn.Module):
    """Returns and records things that are called alike."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x):
        y = self.layer(x)
        record("mean", 100.0, module=self.layer)
        record("own", 200.0, module=self.layer)
        record("a b/mean", 300.0)
        record("kept", 400.0)
        record("ke pt", 500.0)
        record("ke_pt", 600.0)
        return {"a b": y, "a_b": y + 1, "x": {"y": y + 2}, "x/y": y + 3}


def test_names_that_collide_are_told_apart():
    model = Colliding()

    def step(handler, optimizer, x):
        model(x)

    metrics = {"mean": True, "own": torch.mean}
    wanted = model.layer(data()).double().mean().item()
    expected_means = {"layer": 0, "_root_/a_b": 0, "_root_/a_b_2": 1, "_root_/x/y": 2, "_root_/x/y_2": 3}
    recorded = {
        "layer/mean_2": 100.0,
        "layer/own_2": 200.0,
        "_root_/a_b/mean_2": 300.0,
        "_root_/kept": 400.0,
        "_root_/ke_pt": 500.0,
        "_root_/ke_pt_2": 600.0,
    }
    (published,) = run(model, step, activations=metrics)
    assert part(published, "activation") == pytest.approx(
        {f"{place}/{name}": wanted + more for place, more in expected_means.items() for name in metrics} | recorded
    )
    (published,) = run(model, step, activation_differences={"max_abs": True}, reference="init")
    assert {name for name in published if "difference" in name} == {
        f"activation_difference/{place}/max_abs" for place in expected_means
    }


# Attention


class Attention(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.qkv = nn.Linear(6, 36)
        self.kwargs = kwargs

    def forward(self, x):
        q, k, v = self.qkv(x.unflatten(0, (2, -1))).unflatten(-1, (9, 4)).transpose(1, 2).chunk(3, 1)
        self.seen = q, k, v
        return F.scaled_dot_product_attention(q, k, v, **self.kwargs)


@pytest.mark.parametrize("kwargs", [{}, {"is_causal": True}, {"scale": 2.0}])
def test_attention_per_head(kwargs):
    torch.manual_seed(0)
    model = Attention(**kwargs)
    (published,) = run(model, activations=True, attention=True, include="_root_")
    q, k, v = (each.detach().double() for each in model.seen)
    scores = q @ k.mT * kwargs.get("scale", 0.5)
    if kwargs.get("is_causal"):
        scores = scores.masked_fill(torch.ones(4, 4).triu(1).bool(), -math.inf)
    p = scores.softmax(-1)
    entropy = -torch.special.xlogy(p, p).sum(-1).mean((0, 2))
    assert part(published, "attention_entropy/_root_") == pytest.approx(
        {f"head_{i}": entropy[i].item() for i in range(3)}, rel=1e-4
    )
    for i in range(3):
        for name, tensor in (("query", q), ("key", k), ("value", v)):
            found = part(published, f"activation/_root_/head_{i}/{name}")
            assert found == pytest.approx(expected([tensor[:, i]]), rel=1e-5)


# Loggers


def test_tensorboard_has_every_name_as_it_is(tmp_path):
    from ignite.handlers.tensorboard_logger import TensorboardLogger

    from tests.monitor.test_contract import scalars

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.ModuleDict({"a b": nn.Linear(6, 4), "a_b": nn.Linear(6, 4)})

        def forward(self, x):
            return {"x y": self.inner["a b"](x) + self.inner["a_b"](x)}

    model = Odd()
    handler = ActivationHandler(
        model, activations=True, gradients=True, parameters=True, parameter_differences=True, reference="init"
    )

    def step(engine, x):
        model(x)["x y"].sum().backward()

    engine = Engine(step)
    with TensorboardLogger(log_dir=tmp_path) as logger:
        handler.log_to(logger, engine)
        handler.attach(engine)
        engine.run([data()])
    assert {name: points[0][1] for name, points in scalars(tmp_path).items()} == pytest.approx(
        {name: float(value) for name, value in handler.metrics.items()}, rel=1e-6
    )
    families = {name.partition("/")[0] for name in handler.metrics}
    assert families == {"activation", "gradient", "parameter", "parameter_difference"}
    assert {"activation/inner.a_b/mean", "activation/inner.a_b_2/mean", "activation/_root_/x_y/mean"} <= {
        *handler.metrics
    }


# Leaving training as it is


def test_selective_checkpointing_is_not_disturbed():
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE

    def gradients(**kwargs):
        model = mlp()

        def step(handler, optimizer, x):
            context = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
            checkpoint(model, x, use_reentrant=False, context_fn=context).square().sum().backward()

        run(model, step, **kwargs)
        return [parameter.grad for parameter in model.parameters()]

    for ours, theirs in zip(gradients(activations=True, attention=True), gradients(), strict=True):
        assert torch.equal(ours, theirs)


def test_vmap_is_left_alone_with_one_warning(caplog):
    model = mlp()

    def step(handler, optimizer, x):
        torch.func.vmap(model)(x)

    with caplog.at_level(logging.WARNING):
        published = run(model, step, batches=3, activations=True)
    assert published == [{}] * 3
    assert len([each for each in caplog.records if "vmap" in each.getMessage()]) == 1


@pytest.mark.skipif(not __import__("shutil").which("g++"), reason="no C++ compiler")
def test_compiled_with_inductor():
    from torch._dynamo.utils import counters

    class Recording(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 5)

        def forward(self, x):
            y = self.layer(x).relu()
            record("open", y > 0)
            return y

    model = nn.Sequential(Recording(), nn.Linear(5, 3))
    fast = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen, states = {}, []

    def step(engine, x):
        states.append((dict(counters["stats"]), dict(counters["graph_break"]), dict(counters["recompiles"])))
        optimizer.zero_grad()
        fast(x).square().mean().backward()
        optimizer.step()

    engine = Engine(step)
    ActivationHandler(fast, activations={"mean": True}).attach(engine, Events.ITERATION_STARTED(every=3))
    engine.add_event_handler(
        Events.ITERATION_COMPLETED, lambda e: seen.update({e.state.iteration: set(e.state.metrics)})
    )
    counters.clear()
    engine.run([data()] * 7)
    names = {f"activation/{name}/mean" for name in ("_root_", "0", "0.layer", "1")} | {"activation/0/open"}
    assert seen == {i: names if i % 3 == 0 else set() for i in range(1, 8)}
    assert states[1][0]["unique_graphs"] == 1  # compiled in the first iteration, and never again
    assert states[1] == states[-1]
    assert states[-1][1:] == ({}, {})


class Stored(nn.Module):
    """Parameters of dtypes that few operations know."""

    def __init__(self, dtype):
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.stored = nn.Parameter((torch.arange(1, 7).reshape(2, 3) / 4).to(dtype), requires_grad=dtype.is_complex)

    def forward(self, x):
        kept = self.stored if self.stored.is_complex() else self.stored.float()
        record("phase", kept.sum())
        record("number", 1 + 2j if self.stored.is_complex() else 3.0)
        return (self.linear(x) * kept[0]).abs()


@pytest.mark.parametrize("size", [3, 70_000])
def test_complex_parameters_have_no_built_in_statistics(size, caplog):
    model = Stored(torch.complex64)
    model.large = nn.Parameter(torch.ones(size, dtype=torch.complex64))
    with caplog.at_level(logging.WARNING):
        published = run(
            model,
            batches=2,
            activations=True,
            parameters={"mean": True, "largest": lambda x: x.abs().max()},
            gradients=True,
            parameter_differences=True,
            reference="init",
        )
    for values in published:
        assert {name for name in values if "stored" in name or "large/" in name} == {
            "parameter/stored/largest",
            "parameter/large/largest",
        }
        assert "gradient/linear.weight/mean" in values
        assert not {"activation/_root_/phase", "activation/_root_/number"} & set(values)
    assert [each.getMessage() for each in caplog.records if "ActivationHandler" in each.name] == [
        "built-in metrics are of real numbers, and left out for stored, large",
        "complex numbers that are recorded are left out: _root_/number, _root_/phase",
    ]


def test_a_metric_that_returns_a_complex_number_fails():
    with pytest.raises(RuntimeError, match=r"Metric 'mean' of parameter/stored.* a tensor of torch\.complex64"):
        run(Stored(torch.complex64), parameters={"mean": torch.mean})


class Cast(nn.Module):
    def forward(self, x):
        return x.detach().to(torch.float8_e4m3fn)


class Cached(nn.Module):
    """Holds weights in float8, and makes an activation in float8."""

    def __init__(self, rows):
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.cast = Cast()
        self.stored = nn.Parameter(torch.arange(3.0).repeat(rows, 1).to(torch.float8_e5m2), requires_grad=False)

    def forward(self, x):
        self.cast(x)
        return self.linear(x)


@pytest.mark.parametrize("rows", [2, 30_000])
def test_float8_is_measured_as_what_it_stands_for(rows):
    model, other = Cached(rows), Cached(rows)
    with torch.no_grad():
        other.stored.zero_()
    (values,) = run(
        model,
        activations=True,
        parameters=True,
        parameter_differences=True,
        activation_differences=True,
        reference=other,
    )
    stored = without_dead(expected([model.stored.double()]))
    assert part(values, "parameter/stored") == pytest.approx(stored, rel=1e-6)
    assert part(values, "parameter_difference/stored") == pytest.approx(stored, rel=1e-6)
    cast = expected([data().to(torch.float8_e4m3fn).double()])
    assert part(values, "activation/cast") == pytest.approx(cast, rel=1e-6)
    assert part(values, "activation_difference/cast")["max_abs"] == 0


def test_errors_leave_no_hook():
    model = mlp()
    with contextlib.suppress(RuntimeError):
        run(model, lambda handler, optimizer, x: model(x[:, :3]), activations=True, attention=True)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert torch._C._len_torch_function_stack() == 0
    record("outside", 1.0)


class Turning(nn.Module):
    """Calls one layer in the reference, and another one later on."""

    def __init__(self):
        super().__init__()
        self.early, self.late = nn.Linear(6, 6), nn.Linear(6, 6)
        self.turned = False

    def forward(self, x):
        return self.late(x) if self.turned else self.early(x)


def test_what_cannot_be_compared_is_warned_of_once_in_several_runs(caplog):
    model = Turning()
    differences = {"norm": lambda ours, theirs: (ours - theirs).norm()}
    handlers = [
        ActivationHandler(model, activation_differences=differences, reference="init", prefix=prefix)
        for prefix in ("a", "b")
    ]
    model.turned = True
    engine = Engine(lambda _, x: model(x).sum().backward())
    for handler in handlers:
        handler.attach(engine)
    for epoch in range(3):
        engine.run([data()] * 2, max_epochs=epoch + 1)
    told = [record.getMessage() for record in caplog.records if "is not compared" in record.getMessage()]
    reason = "is not compared: it is called other than in the reference"
    assert sorted(told) == [f"early {reason}"] * 2 + [f"late {reason}"] * 2  # each handler for itself


def test_a_run_after_one_that_could_not_be_compared_is_judged_by_itself(caplog):
    """In the first nothing can be compared, in the second there is nothing to compare: two things to say."""
    model = Turning()
    handler = ActivationHandler(
        model, activation_differences={"norm": lambda ours, theirs: ours.norm()}, reference="init"
    )
    model.turned = True
    engine = Engine(lambda _, x: model(x))
    handler.attach(engine)
    engine.run([data()])
    assert "forward pass of the whole model" not in caplog.text
    model.eval()
    engine.run([data()], max_epochs=2)
    assert caplog.text.count("none of 1 monitored iterations had a forward pass of the whole model") == 1


@pytest.mark.parametrize("dtype", [True, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_what_would_be_lost_in_a_dtype(dtype):
    """Against thresholds: half the smallest number, and the middle of the largest and what would be the next one."""
    smallest, largest = {
        torch.float16: (2.0**-24, 65520.0),
        torch.bfloat16: (2.0**-133, (2 - 2.0**-8) * 2.0**127),
        torch.float8_e4m3fn: (2.0**-9, 464.0),
        torch.float8_e5m2: (2.0**-16, 61440.0),
    }[torch.float16 if dtype is True else dtype]
    torch.manual_seed(0)
    spread = torch.randn(7, 50) * 10 ** torch.empty(7, 50).uniform_(-44, 38)
    x = torch.cat([spread, torch.zeros(1, 50), torch.full((1, 50), 1.0)])
    weight = nn.Parameter(x)
    model = nn.ParameterDict({"w": weight})
    optimizer = torch.optim.SGD([weight], lr=0.0)
    given = {"underflow_fraction": dtype, "overflow_fraction": dtype}
    handler = ActivationHandler(model, parameters=given)
    trainer = Engine(lambda *_: optimizer.step())
    handler.attach(trainer)
    trainer.run([None])
    exact = x.double().abs()
    assert handler.metrics == pytest.approx({
        "parameter/w/underflow_fraction": float(((exact > 0) & (exact <= smallest / 2)).double().mean()),
        "parameter/w/overflow_fraction": float((exact >= largest).double().mean()),
    })  # fmt: skip
    assert handler.metrics["parameter/w/underflow_fraction"] > 0


def test_lost_fractions_of_activations_and_what_is_refused():
    model = nn.Linear(4, 4)
    handler = ActivationHandler(model, activations={"overflow_fraction": torch.float16})
    trainer = Engine(lambda _, batch: model(batch).sum().backward())
    handler.attach(trainer)
    trainer.run([torch.full((2, 4), 1e9)])
    assert handler.metrics["activation/_root_/overflow_fraction"] == 1.0
    for wrong in ({"overflow_fraction": torch.int8}, {"underflow": True}):
        with pytest.raises(ValueError, match="activations"):
            ActivationHandler(model, activations=wrong)
    with pytest.raises(ValueError, match="parameter_differences"):
        ActivationHandler(model, parameter_differences={"underflow_fraction": True}, reference="init")


class ByHand(nn.Module):
    """Attention as a softmax of a product, before which there may be what is none."""

    def __init__(self, how):
        super().__init__()
        self.how, self.router, self.soft = how, nn.Linear(8, 4), nn.Softmax(-1)

    def forward(self, x):
        weight = self.router(x).softmax(-1).mean()
        if self.how == "matmul":
            return weight * (F.dropout(torch.softmax(torch.matmul(x, x.mT), -1), 0.1) @ x)
        if self.how == "module":
            return weight * torch.bmm(self.soft(torch.bmm(x, x.mT)), x)
        if self.how == "einsum":
            return weight * torch.einsum("blm,bme->ble", torch.einsum("ble,bme->blm", x, x).softmax(-1), x)
        return weight * F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("how", ["matmul", "module", "einsum", "sdpa"])
def test_attention_that_is_written_out_is_said_once_with_the_remedy(how, caplog):
    model = nn.Sequential(nn.Linear(8, 8), ByHand(how))
    handler = ActivationHandler(model, attention=True)
    trainer = Engine(lambda _, batch: model(batch).sum().backward())
    handler.attach(trainer)
    trainer.run([torch.randn(2, 5, 8)] * 3, max_epochs=2)
    said = [each for each in caplog.messages if "written out" in each]
    assert len(said) == (how != "sdpa")
    assert all(" in 1:" in each and "scaled_dot_product_attention" in each for each in said)


@pytest.mark.parametrize("attention", [False, True])
def test_modes_of_the_users_see_the_model_alone(attention):
    """A mode that keeps or counts what is called would have ours among it."""
    seen = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(getattr(func, "__name__", func))
            return func(*args, **(kwargs or {}))

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    model = mlp()
    model(data())
    with Functions(), Operations():
        model(data())
    alone = seen[:]
    assert len(alone) > 3

    def step(handler, optimizer, x):
        with handler.paused():
            model(data())
        seen.clear()
        with Functions(), Operations():
            model(data())

    run(model, step=step, batches=3, activations=True, attention=attention)
    assert seen == alone


def test_what_an_output_costs_in_calls():
    """Counted, since times differ from one machine to another: a hook, what it does, and a copy in a stack."""
    calls = []

    def follow(frame, event, argument):
        if event == "call" and "/ignite_monitor/" in frame.f_code.co_filename.replace("\\", "/"):
            calls.append(frame.f_code.co_name)

    def of(layers):
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(layers)))
        counts = []

        def step(handler, optimizer, x):
            calls.clear()
            sys.setprofile(follow)
            model(x)
            sys.setprofile(None)
            counts.append(len(calls))

        run(model, step=step, batches=3, activations=True)
        return counts[-1]

    assert of(40) - of(10) <= 3 * 30
