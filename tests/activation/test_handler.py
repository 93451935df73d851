"""Metrics of ActivationHandler, compared with plain computations in float64."""

from __future__ import annotations

import copy
import math

import numpy
import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ignite_monitor import ActivationHandler, HistogramHandler, Metric, record
from ignite_monitor.activation.measurement import Measurement
from tests._helpers import assert_same, in_turn, make_step, run_monitored, square_loss
from tests._models import FrozenEncoder, Lambda
from tests._truth import statistics


def expected(parts):
    return statistics([part.detach() for part in parts], -1 if parts[0].ndim > 1 else None)


def run(model, step=None, batches=1, size=8, event=None, kind=ActivationHandler, options=None, **kwargs):
    """Return the published values of each iteration, as floats."""
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(size, 6, generator=generator) for _ in range(batches)]
    handler, optimizer = kind(model, **kwargs), torch.optim.SGD(model.parameters(), lr=0.1)
    train_step = make_step(model, optimizer, loss_of=square_loss, **options or {})
    if step is not None:
        train_step = lambda engine, x: step(handler, optimizer, x)  # noqa: E731
    published = run_monitored(train_step, data, handler, event=event)
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


def test_own_functions_with_their_own_choice_and_way():
    model = mlp()
    metrics = {
        "abs": torch.abs,
        "std": True,
        "rows": Metric(len, include="^2$", aggregate="sum"),
        "largest": Metric(lambda x: x.max(), exclude="1", aggregate="max"),
        "least": Metric(lambda x: x.mean(), include="^0$", aggregate="min"),
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
    wanted["activation/0/least"] = min(means)
    assert published == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(("name", "wrong"), [("nothing", lambda x: None), ("fails", lambda x: x.view(7, 7))])
def test_a_metric_that_fails_names_itself_module_and_shape(name, wrong):
    with pytest.raises(RuntimeError, match=rf"'{name}'.*activation/1.*\(8, 5\)") as caught:
        run(mlp(), activations={name: Metric(wrong, include="1")})
    assert isinstance(caught.value.__cause__, (RuntimeError, TypeError))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_checkpointing_repeats_is_no_second_pass(use_reentrant):
    model = mlp()

    def step(handler, optimizer, x):
        x = x.clone().requires_grad_()
        checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()

    (published,) = run(model, step, activations={"passes": Metric(lambda x: 1.0, aggregate="sum")})
    assert set(published.values()) == {1.0}


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
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 50), Lambda(lambda self, x: x.masked_fill(x > 1, math.inf)))
    with torch.no_grad():
        count = (model[0](data()) > 1).sum().item()
    assert count > 0
    (published,) = run(model, activations=dict.fromkeys(["mean", "std", "nonfinite_count"], True) | {"m": torch.mean})
    assert part(published, "activation/1") == {"nonfinite_count": count}
    assert set(part(published, "activation/0")) == {"mean", "std", "nonfinite_count", "m"}


# Gradients and parameters


def expected_of_weights(parts):
    return statistics([part.detach() for part in parts], None)


def gradients_of(model, x, pieces=1):
    double = copy.deepcopy(model).double()
    for piece in x.double().chunk(pieces):
        double(piece).square().mean().backward()
    return {name: parameter.grad for name, parameter in double.named_parameters()}


@pytest.mark.parametrize("clip", [None, 0.01, 1e9])
@pytest.mark.parametrize("pieces", [1, 2])
def test_gradients_are_those_of_the_step_though_it_zeroes_them(clip, pieces):
    model = mlp()
    gradients = gradients_of(model, data(), pieces)
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    factor = 1.0 if clip is None else min(1.0, clip / norm)
    (published,) = run(model, options={"parts": pieces, "clip": clip, "zero_at": "end"}, gradients=True)
    for name, gradient in gradients.items():
        wanted = expected_of_weights([factor * gradient])
        assert part(published, f"gradient/{name}") == pytest.approx(wanted, rel=1e-4, abs=1e-9), name


@pytest.mark.parametrize("backwards", [1, 4])
def test_gradients_are_measured_once_in_the_first_step_that_uses_them(monkeypatch, backwards):
    measured, add = [], Measurement.add
    monkeypatch.setattr(
        Measurement, "add", lambda self, *args, **kwargs: measured.append(args[0]) or add(self, *args, **kwargs)
    )
    model, truth = mlp(), []
    parts = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]

    def step(handler, optimizer, x):
        if truth:  # no step: an iteration of accumulation
            truth.append({})
            model(x).square().mean().backward()
            return
        for _ in range(backwards):
            model(x).square().mean().backward()
        truth.append({f"{name}/n": item.grad.norm().item() for name, item in model.named_parameters()})
        for _ in range(2):
            for item in parts:
                item.step()
            model.zero_grad()
            model(x).square().mean().backward()

    published = run(model, step, batches=2, gradients={"n": torch.norm})
    assert measured == [name for name, _ in model.named_parameters()]
    for values, norms in zip(published, truth, strict=True):
        assert part(values, "gradient") == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("scale", [1024.0, 700.3])
def test_scaled_gradients_are_unscaled_and_absent_after_an_overflow(scale):
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    gradients = gradients_of(model, data())
    options = {"scaler": scaler, "factor": lambda engine: math.inf if engine.state.iteration == 2 else 1.0}
    published = run(model, batches=2, options=options, gradients=True)
    for name, gradient in gradients.items():
        wanted = expected_of_weights([gradient])
        assert part(published[0], f"gradient/{name}") == pytest.approx(wanted, rel=1e-4, abs=1e-9)
    assert published[1] == {}  # the scaler makes no step


# Recording


class Recording(nn.Module):
    """Records a value of some kind, in what a transform, a checkpoint or nothing is around."""

    def __init__(self, around, value):
        super().__init__()
        self.layer, self.last = nn.Linear(6, 8), nn.Linear(8, 1)
        self.around, self.value = around, value

    def inner(self, x):
        h = self.layer(x)
        if self.value is not None:
            record("value", self.value(h.detach()), module=self)
        h = h / h.abs().mean()
        return self.last(h.tanh() * h.square().mean().sqrt())

    def forward(self, x):
        return self.around(self.inner, x)


AROUND = {
    "nothing": lambda function, x: function(x),
    "vmap": lambda function, x: torch.func.vmap(function)(x),
    "checkpoint": lambda function, x: checkpoint(function, x, use_reentrant=False),
}
RECORDED = {
    "tensor": lambda h: h > 0,
    "number": lambda h: 3,
    "numpy": lambda h: numpy.array([1.0, 2.0]),
    "numpy number": lambda h: numpy.float32(3),
    "list": lambda h: [1, 2, 4.5],
    "empty": lambda h: numpy.ones(0),
    "complex": lambda h: 1j,
    "text": lambda h: "1.0",
    "object": lambda h: object(),
}
WANTED = {"number": 3.0, "numpy": 1.5, "numpy number": 3.0, "list": 2.5}
SKIPPED = ("complex", "text", "object")


@pytest.mark.parametrize("value", RECORDED)
@pytest.mark.parametrize("around", AROUND)
def test_recording_leaves_training_as_it_is(around, value, caplog):
    def train(recorded, monitored):
        torch.manual_seed(0)
        model, gradients = Recording(AROUND[around], RECORDED[value] if recorded else None), []

        def keep(engine):
            gradients.extend(item.grad.clone().view(torch.uint8) for item in model.parameters())

        event = None if monitored else Events.ITERATION_STARTED(once=9)
        published = run(model, batches=2, event=event, options={"before_step": keep})
        return gradients, published, (model.layer(data()) > 0).double().mean().item()

    plain, _, _ = train(False, False)
    gradients, published, _ = train(True, True)
    assert_same([*gradients], [*plain])
    skipped = value in SKIPPED or (value == "tensor" and around == "vmap")
    assert [bool(item) for item in published] == [not skipped and value != "empty"] * 2
    assert sum("skipped _root_: " in message for message in caplog.messages) == skipped
    if value in WANTED:
        assert published == [{"recorded/_root_/value": WANTED[value]}] * 2


def test_recorded_values_weigh_by_elements_and_names_are_checked(caplog):
    def forward(self, x):
        y = self.layer(x)
        record("open", y > 0)
        record("bias", 2, module=self.layer)
        record("a b", 1.0)
        record(3, 1.0)
        return y

    model = Lambda(forward, layer=nn.Linear(6, 4))

    def step(handler, optimizer, x):
        model(x[:2]), model(x[2:])

    (published,) = run(model, step)
    wanted = (model.layer(data()) > 0).double().mean().item()
    assert published == pytest.approx({"recorded/_root_/open": wanted, "recorded/layer/bias": 2.0})
    assert sum("under names of letters" in message for message in caplog.messages) == 1
    assert run(model, step, event=Events.ITERATION_STARTED(every=2)) == [{}]
    model(data())
    record("outside", 1.0)


@pytest.mark.parametrize(("given", "warned"), [({}, True), ({"activations": {"mean": True}}, False)])
def test_one_warning_where_nothing_is_measured(given, warned, caplog):
    published = run(mlp(), batches=3, **given)
    assert [bool(values) for values in published] == [not warned] * 3
    assert sum("nothing was measured, because no metrics" in text for text in caplog.messages) == warned
    caplog.clear()
    assert run(Recording(AROUND["nothing"], RECORDED["number"])) == [{"recorded/_root_/value": 3.0}]
    assert not any("nothing is measured" in text for text in caplog.messages)


# Attention


class Attention(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.qkv = nn.Linear(6, 36)
        self.kwargs = kwargs

    def forward(self, x):
        q, k, v = self.qkv(x.unflatten(0, (2, -1))).unflatten(-1, (9, 4)).transpose(1, 2).chunk(3, 1)
        self.seen = q, k
        return F.scaled_dot_product_attention(q, k, v, **self.kwargs)


@pytest.mark.parametrize("kwargs", [{}, {"is_causal": True}, {"scale": 2.0}])
def test_attention_per_head(kwargs):
    torch.manual_seed(0)
    model = Attention(**kwargs)
    (published,) = run(model, attention=True, include="_root_")
    q, k = (item.detach().double() for item in model.seen)
    scores = q @ k.mT * kwargs.get("scale", 0.5)
    if kwargs.get("is_causal"):
        scores = scores.masked_fill(torch.ones(4, 4).triu(1).bool(), -math.inf)
    p = scores.softmax(-1)
    entropy = -torch.special.xlogy(p, p).sum(-1).mean((0, 2))
    assert part(published, "attention_entropy/_root_") == pytest.approx(
        {f"head_{i}": entropy[i].item() for i in range(3)}, rel=1e-4
    )


@pytest.mark.parametrize("kind", ["gating", "attention", "bias"])
def test_one_warning_where_no_attention_is_measured(kind, caplog):
    class Gating(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(4, 6, 6))
            self.attention = nn.MultiheadAttention(6, 2, add_bias_kv=kind == "bias")

        def forward(self, x):
            gate = torch.softmax(x @ self.gate, -1)
            x = torch.einsum("be,ebo->bo", gate, torch.einsum("bi,eio->ebo", x, self.experts))
            return x if kind == "gating" else self.attention(*[x[None]] * 3)[0]

    published = run(Gating(), batches=3, attention=True)
    assert [bool(item) for item in published] == [kind == "attention"] * 3
    wanted = {"gating": ["attention=True measured no attention call"], "bias": ["skipped attention: ", "bias_k"]}.get(
        kind, []
    )
    messages = [message for message in caplog.messages if "attention" in message]
    assert len(messages) == bool(wanted)
    assert all(text in message for message in messages for text in wanted)


# Units and micro-batches

CONVOLUTIONS = {
    kind: (getattr(nn, kind), [3, *[7, 6, 5][: int(kind[-2])]])
    for kind in ("Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
}


@pytest.mark.parametrize("batch", [[4], []])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_dead_units_of_convolutions_are_channels(kind, batch):
    convolution, shape = CONVOLUTIONS[kind]
    torch.manual_seed(0)
    model = nn.Sequential(convolution(3, 8, 3, padding=1), nn.ReLU(), nn.Identity(), nn.Flatten(0), nn.LazyLinear(1))
    x = torch.randn(*batch, *shape)
    with torch.no_grad():
        model(x)
        model[0].bias[:4] = -1e3
        model[0].bias[4:] = 1e3
    (published,) = run(model, lambda handler, optimizer, _: model(x), activations={"dead_fraction": True})
    result = [published[f"activation/{name}/dead_fraction"] for name in "012"]
    assert result == [0.0, 0.5, 0.5]


GATED = Lambda(lambda self, x: x * (x > 0))  # an activation of one's own
MULTIPLIED = Lambda(lambda self, x: x @ torch.ones(8, 8))
TRANSPOSED = Lambda(lambda self, x: x.transpose_(1, 3))
PAIR, SECOND = Lambda(lambda self, x: (2 * x, x)), Lambda(lambda self, x: x[1])


UNITS = {  # input, model, and the share of dead units by module; three of eight are 0
    "features last": ((2, 5, 6, 8), [nn.Linear(8, 8), nn.SiLU(), nn.ReLU(), nn.Dropout(0.0)], [0, 3 / 8, 3 / 8, 3 / 8]),
    "channels": ((2, 3, 6, 5), [nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), GATED], [0, 0, None]),
    "as many channels as pixels": ((2, 3, 8, 8), [nn.Conv2d(3, 8, 1), nn.ReLU()], [0, 3 / 8]),
    "a functional layer": ((2, 3, 8, 8), [nn.Conv2d(3, 8, 1), MULTIPLIED, nn.ReLU()], [0, None, None]),
    "in place": ((2, 3, 8, 8), [nn.Conv2d(3, 8, 1), TRANSPOSED, nn.ReLU(inplace=True)], [0, None, None]),
    "in a tuple": ((2, 8), [nn.Linear(8, 8), PAIR, nn.Identity(), SECOND], [0, None, None, 0]),
    "several dimensions": ((2, 6, 8), [nn.LayerNorm((6, 8)), nn.ReLU()], [None, None]),
    "weights of attention": ((2, 6, 8), [nn.Embedding(4, 8)], [0]),
}


@pytest.mark.parametrize("case", UNITS)
def test_units_are_those_of_the_layer_that_made_a_tensor(case):
    shape, layers, wanted = UNITS[case]
    torch.manual_seed(0)
    model = nn.Sequential(*copy.deepcopy(layers))
    with torch.no_grad():
        for layer in model:
            if getattr(layer, "bias", None) is not None and layer.bias.shape == (8,):
                layer.bias[:3], layer.bias[3:] = -1e3, 1e3
    x = torch.randint(4, (2, 6)) if isinstance(layers[0], nn.Embedding) else torch.randn(*shape)
    (published,) = run(model, lambda handler, optimizer, _: model(x), activations={"dead_fraction": True})
    result = [published.get(f"activation/{i}/dead_fraction") for i in range(len(layers))]
    assert result == pytest.approx([item if item is None else float(item) for item in wanted])
    assert published.get("activation/_root_/dead_fraction") == result[-1]


@pytest.mark.parametrize("scale", [1e-170, 1e165])
def test_statistics_whose_squares_leave_the_range_of_float64_are_absent(scale):
    x = scale * torch.randn(8, 6, dtype=torch.float64)
    model = nn.Sequential(nn.Identity(), nn.Linear(6, 1).double())
    step = lambda handler, optimizer, _: model(x)  # noqa: E731
    (published,) = run(model, step, activations=dict.fromkeys(["std", "max_over_rms", "max_abs", "l2_norm"], True))
    assert part(published, "activation/0") == {"max_abs": x.abs().max().item()}


def test_values_recorded_outside_of_the_model_are_reported(caplog):
    model, other = mlp(), nn.Linear(6, 1)

    def step(handler, optimizer, x):
        record("loss", model(x).mean())
        record("other", 1.0, module=other)

    assert run(model, step, batches=2) == [{}] * 2
    assert [("skipped loss, other" in text, "module=" in text) for text in caplog.messages] == [(True, True)]


@pytest.mark.parametrize("aggregate", ["mean", "sum", "max", "min"])
def test_an_empty_micro_batch_has_weight_0(aggregate):
    def step(micro_batches):
        return lambda handler, optimizer, x: [model(item) for item in micro_batches(x.abs())] and None

    model = Lambda(lambda self, x: self.expert(x[x[:, 0] > 0]), expert=nn.Linear(6, 6))
    metrics = {"mean": True, "large": Metric(lambda x: x.abs() > 0.5, aggregate=aggregate)}
    (alone,) = run(model, step(lambda x: [x]), activations=metrics, include="expert")
    (both,) = run(model, step(lambda x: [x, -x]), activations=metrics, include="expert")
    assert set(alone) == {"activation/expert/mean", "activation/expert/large"}
    assert both == alone


# Leaving training as it is


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(
    "chosen",
    [{"activations": True}, {"attention": True}, {"activations": True, "attention": True}, {"kind": HistogramHandler}],
)
@pytest.mark.parametrize("trainable", [False, True])
def test_an_encoder_in_evaluation_mode_keeps_its_fast_path(trainable, chosen, nested, caplog, monkeypatch):
    """The fast path computes other last bits, and zeros where padding is."""

    padding = torch.arange(4)[None] >= torch.tensor([[4], [3]])
    fast, calls = torch._transformer_encoder_layer_fwd, []
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *args: calls.append(1) or fast(*args))

    def train(**kwargs):
        torch.manual_seed(0)
        calls.clear()
        model = nn.Sequential(nn.Unflatten(0, (2, 4)), FrozenEncoder(6, padding, trainable, nested)).train()
        published = run(model, batches=3, **kwargs)
        return model[1].head.weight.detach().view(torch.uint8), len(calls), published

    plain, count, _ = train(event=Events.ITERATION_STARTED(once=9))
    monitored, same_count, published = train(**chosen)
    assert_same(plain, monitored)
    assert same_count == count > 0
    assert not any(".layers." in name for item in published for name in item)
    assert sum("fast path" in message for message in caplog.messages) == ("kind" not in chosen)


def test_tensors_in_transforms_are_skipped_with_one_warning(caplog):
    model = mlp()

    def step(handler, optimizer, x):
        torch.func.vmap(model)(x)

    assert run(model, step, batches=3, activations=True) == [{}] * 3
    assert [("skipped 0, 1, 2, _root_" in message) for message in caplog.messages] == [True]


def test_a_compiled_model_is_compiled_once_and_measured_eagerly():
    from torch._dynamo.utils import counters

    def forward(self, x):
        y = self.layer(x).relu()
        record("open", y > 0)
        return y

    model = nn.Sequential(Lambda(forward, layer=nn.Linear(6, 5)), nn.Linear(5, 3))
    fast = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen, states = {}, []

    def start(engine, x):
        states.append((dict(counters["stats"]), dict(counters["graph_break"]), dict(counters["recompiles"])))

    engine = Engine(in_turn(start, make_step(fast, optimizer, loss_of=square_loss)))
    ActivationHandler(fast, activations={"mean": True}).attach(engine, Events.ITERATION_STARTED(every=3))
    engine.add_event_handler(
        Events.ITERATION_COMPLETED, lambda e: seen.update({e.state.iteration: set(e.state.metrics)})
    )
    counters.clear()
    engine.run([data()] * 7)
    names = {f"activation/{name}/mean" for name in ("_root_", "0", "0.layer", "1")} | {"recorded/0/open"}
    assert seen == {i: names if i % 3 == 0 else set() for i in range(1, 8)}
    assert states[1][0]["unique_graphs"] == 1  # compiled in the first iteration, and never again
    assert states[1] == states[-1]
    assert states[-1][1:] == ({}, {})


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


def test_names_are_in_the_order_of_execution():
    """Reports name the first non-finite output by it, whatever the shapes."""
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3), nn.Tanh())
    trainer = Engine(lambda engine, batch: model(batch).sum().backward())
    ActivationHandler(model, activations={"std": True}).attach(trainer)
    trainer.run([torch.randn(4, 6)])
    names = [f"activation/{name}/std" for name in ("0", "1", "2", "3", "_root_")]
    assert [name for name in trainer.state.metrics if name.startswith("activation/")] == names
