"""RCCHandler against whole evaluations in float64."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from ignite.engine import Engine, Events
from torch import nn

from ignite_monitor import RCCHandler
from tests._models import Lambda
from tests._truth import rcc
from tests.rcc._runs import measure, perturb


def check(model, batches, size=0.1, rel=1e-4, floor=1e-5, **arguments):
    """Measured values are the true ones, after the weights have moved."""
    handler = RCCHandler(model, **arguments)
    reference = copy.deepcopy(handler.reference)
    perturb(model, size)
    expected = {name.replace(" ", "_"): value for name, value in rcc(model, reference, batches).items()}
    result = measure(handler, batches)
    assert set(result) == set(expected)
    for name, value in expected.items():
        assert result[name] == pytest.approx(value, rel=rel, abs=floor * size), name
    return result


class Drift(nn.Module):
    """Its input and a little more, so that the next layer's input changes."""

    def __init__(self, layer):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(()))
        self.layer = layer

    def forward(self, x):
        return self.layer(x * (1 + self.shift) + self.shift)


class Scale(nn.Module):
    def __init__(self, features=6):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(features))

    def forward(self, x):
        return torch.tanh(x) * self.scale


class Attention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, key=x, value=x)[:1]


class OutputSize(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.ConvTranspose2d(4, 6, 3, stride=2, dilation=2)

    def forward(self, x):
        return self.conv(x, output_size=[15, 14])


LAYERS = {
    "Linear": (lambda: nn.Linear(6, 5), (7, 6)),
    "Linear without bias": (lambda: nn.Linear(6, 5, bias=False), (7, 3, 6)),
    "LayerNorm": (lambda: nn.LayerNorm(6), (7, 6)),
    "LayerNorm without bias": (lambda: nn.LayerNorm(6, bias=False), (7, 6)),
    "LayerNorm over two": (lambda: nn.LayerNorm((3, 6)), (7, 3, 6)),
    "RMSNorm": (lambda: nn.RMSNorm(6), (7, 6)),
    "RMSNorm, eps": (lambda: nn.RMSNorm(6, eps=1e-3), (7, 6)),
    "Conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, groups=2), (5, 4, 9)),
    "Conv1d, one sample": (lambda: nn.Conv1d(4, 6, 3), (4, 9)),
    "Conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), (5, 4, 6, 6)),
    "Conv2d without bias": (lambda: nn.Conv2d(4, 6, 3, padding="same", dilation=2, bias=False), (5, 4, 6, 6)),
    "Conv3d": (lambda: nn.Conv3d(4, 6, 2), (2, 4, 3, 4, 3)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1), (5, 4, 9)),
    "ConvTranspose2d": (OutputSize, (5, 4, 6, 5)),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(4, 6, 2, bias=False), (2, 4, 3, 4, 3)),
    "BatchNorm": (lambda: nn.BatchNorm2d(4), (5, 4, 3, 3)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (5, 4, 3)),
    "InstanceNorm, one sample": (lambda: nn.InstanceNorm1d(4, affine=True), (4, 9)),
    "InstanceNorm": (lambda: nn.InstanceNorm2d(4, affine=True), (5, 4, 3, 3)),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_layers(layer):
    make, shape = LAYERS[layer]
    torch.manual_seed(0)
    model = Drift(make())
    result = check(model, [torch.randn(shape) for _ in range(2)])
    assert min(value for name, value in result.items() if name.endswith(("/layer", "/layer.conv"))) > 0


class Overridden(nn.Linear):
    def forward(self, x):
        return super().forward(x).square()


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
        lambda: nn.utils.weight_norm(nn.Linear(6, 6)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
        lambda: nn.utils.spectral_norm(nn.Linear(6, 6)),
        lambda: Overridden(6, 6),
        lambda: nn.Embedding(6, 6, max_norm=0.5),
        lambda: nn.LSTM(6, 6),
        Scale,
    ],
)
def test_what_computes_otherwise_than_the_layers_of_torch_is_not_measured(make):
    torch.manual_seed(0)
    other = make()
    given = torch.arange(6) if isinstance(other, nn.Embedding) else torch.randn(6, 6)
    model = Lambda(lambda self, x: self.a(x) + self.b(given).sum() if type(other) is not nn.LSTM
                   else self.a(x) + self.b(given)[0].sum(), a=nn.Linear(6, 6), b=other)  # fmt: skip
    handler = RCCHandler(model)
    perturb(model)
    result = measure(handler, [torch.randn(7, 6)])
    assert {name.split("/")[2] for name in result if name.count("/") > 1} == {"a"}
    with pytest.raises(ValueError, match="include and exclude"):
        RCCHandler(model, include="b")


def test_embeddings_and_a_tied_head():
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.places = nn.Embedding(11, 6, padding_idx=0), nn.Embedding(5, 6)
            self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 11, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, tokens):
            return self.head(self.norm(self.tokens(tokens) + self.places(input=torch.arange(5))))

    torch.manual_seed(0)
    result = check(Language(), [torch.randint(0, 11, (3, 5)) for _ in range(2)])
    assert [name for name in result if "/tokens" in name] == ["rcc/weight_update/tokens"]
    assert "rcc/input_drift/head" in result


class Several(nn.Module):
    """Calls layers twice, by keyword, and layers that return tuples or dictionaries."""

    def __init__(self):
        super().__init__()
        self.twice, self.pair, self.named = nn.Linear(6, 6), Pair(), Named()
        self.block = nn.ModuleDict({"a b": nn.Linear(6, 6)})

    def forward(self, x):
        x = self.twice(input=torch.tanh(self.twice(x)))
        x, _ = self.pair(flag=None, x=x)
        return self.block["a b"](input=self.named({"x": x})["y"])


class Pair(Scale):
    def forward(self, x, flag):
        return super().forward(x), [flag]


class Named(Scale):
    def forward(self, given):
        return {"count": 3, "y": super().forward(given["x"])}


def test_several_calls_keywords_tuples_and_micro_batches():
    torch.manual_seed(0)
    result = check(Several(), [torch.randn(size, 6) for size in (3, 8, 1)])
    assert "rcc/input/block.a_b" in result


@pytest.mark.parametrize("size", [1e-6, 1e-7])
def test_small_updates_keep_their_digits(size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.RMSNorm(64))
    tokens = torch.arange(50)
    handler = RCCHandler(model)
    perturb(model, size)
    expected = rcc(model, handler.reference, [tokens])
    result = measure(handler, [tokens])
    for layer in range(4):
        name = f"rcc/weight_update/{layer}"
        assert result[name] == pytest.approx(expected[name], rel=2e-3)  # of the weights only whole roundings have moved
    # The inputs' own rounding errors are the limit here.
    assert result["rcc/input_drift/1"] == pytest.approx(expected["rcc/input_drift/1"], rel=1e-3)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_parts_add_up_in_random_networks(data):
    """The sum of both parts is the change of the outputs."""
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    width = data.draw(st.integers(1, 6))
    layers, size = [], width
    for _ in range(data.draw(st.integers(1, 5))):
        kind = data.draw(st.sampled_from(["linear", "matrix", "norm", "scale", "tanh", "attention", "rms"]))
        after = data.draw(st.integers(1, 6)) if kind in ("linear", "matrix") else size
        layers.append(
            {
                "linear": lambda i, j: nn.Linear(i, j),
                "matrix": lambda i, j: nn.Linear(i, j, bias=False),
                "norm": lambda i, j: nn.LayerNorm(i, eps=0.1),
                "rms": lambda i, j: nn.RMSNorm(i, eps=0.1),
                "scale": lambda i, j: Scale(i),
                "tanh": lambda i, j: nn.Tanh(),
                "attention": lambda i, j: Attention(i, 1, batch_first=True),
            }[kind](size, after)
        )
        if kind == "attention":
            layers.append(Lambda(lambda self, outputs: outputs[0]))
        size = after
    model = nn.Sequential(nn.Linear(width, width), *layers)
    shape = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=2))
    batches = [torch.randn(*shape, width) for _ in range(data.draw(st.integers(1, 3)))]
    update = data.draw(st.sampled_from([0.0, 1e-3, 1.0]))
    # Weights around 1 that move by 1e-4 keep their move to 6e-4 in float32.
    check(model, batches, update, rel=5e-3, floor=1e-3)


# Nothing has changed yet


def language_models():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=31, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    )
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=31, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, attention_dropout=0.1,
        )
    )  # fmt: skip
    return {"gpt2": gpt2, "llama": llama}


@pytest.fixture(scope="module")
def models():
    return language_models()


def tokens_of(count, size=3):
    generator = torch.Generator().manual_seed(0)
    every = [torch.randint(0, 31, (size, 6), generator=generator) for _ in range(count)]
    return [{"input_ids": tokens, "labels": tokens} for tokens in every]


class Random(nn.Module):
    """Dropout, batch statistics, and layers skipped at random."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.attention = Attention(6, 2, dropout=0.2, batch_first=True)
        self.scale = Scale()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.relu(x)
        for layer in self.layers:
            if random.random() < 0.8:
                x = self.drop(layer(x))
        return self.scale(self.attention(self.relu(self.norm(x))[None])[0])


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["random", "gpt2", "llama"])
def test_everything_is_0_before_the_first_update(models, name, autocast):
    torch.manual_seed(0)
    model = Random() if name == "random" else models[name].train()
    batches = [torch.randn(8, 6) for _ in range(4)] if name == "random" else tokens_of(2)
    result = measure(RCCHandler(model), batches, torch.autocast("cpu", torch.bfloat16) if autocast else None)
    inputs = {value for key, value in result.items() if key.startswith("rcc/input/")}
    others = {value for key, value in result.items() if not key.startswith("rcc/input/")}
    assert others == {0.0}
    assert any(key.startswith("rcc/weight_share/") for key in result)
    assert min(inputs) > 0


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_language_models(models, name):
    model = copy.deepcopy(models[name])
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    result = check(model.train(), tokens_of(2), rel=1e-3)
    layers = {key.removeprefix("rcc/weight_update/") for key in result if key.startswith("rcc/weight_update/")}
    expected = {"gpt2": "transformer.h.1.attn.c_attn", "llama": "model.layers.1.self_attn.k_proj"}
    assert {expected[name], "lm_head"} <= layers


# Training


def test_weights_that_change_between_passes():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 5)), torch.randn(4, 6)

    def batches():
        yield x
        with torch.no_grad():
            model[0].weight += 1
        yield x

    once = F.linear(x, torch.ones(5, 6)).norm(dim=-1).mean()
    assert measure(RCCHandler(model), batches())["rcc/weight_update/0"] == pytest.approx(float(once / 2), rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_compiled_models():
    torch.manual_seed(0)
    model = Several()
    compiled = torch.compile(model, backend="aot_eager")
    batch = torch.randn(5, 6)
    compiled(batch)  # hooks that come later would not be called
    handler = RCCHandler(compiled)
    reference = copy.deepcopy(handler.reference)
    perturb(model)
    compiled(batch)
    expected = {name.replace(" ", "_"): value for name, value in rcc(model, reference, [batch]).items()}
    assert measure(handler, [batch]) == pytest.approx(expected, rel=1e-4, abs=1e-6)


# References


def test_reference_that_is_given():
    torch.manual_seed(0)
    model, other = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)), None
    other = copy.deepcopy(model)
    perturb(other)
    x = torch.randn(4, 6)
    expected = rcc(model, other, [x])
    other.eval()
    for reference in (other, nn.DataParallel(other)):
        assert measure(RCCHandler(model, reference=reference), [x]) == pytest.approx(expected, rel=1e-4)
    assert not other.training
    assert all(item.requires_grad for item in other.parameters())
    with pytest.raises(ValueError, match="module '1' is ReLU in it, not Tanh"):
        RCCHandler(model, reference=nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)))


# Not reported


def test_include_and_exclude():
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6, bias=False))
    result = measure(RCCHandler(model, include="[12]", exclude="1"), [torch.randn(2, 6)])
    names = {"weight_update", "input_drift", "weight_share", "input", "input_change", "output_change"}
    assert {name for name in result if "/" in name.removeprefix("rcc/")} == {f"rcc/{name}/2" for name in names}
    with pytest.raises(ValueError, match="include and exclude"):
        RCCHandler(model, include="nothing")
    with pytest.raises(ValueError, match="include"):
        RCCHandler(model, include="(")
    with pytest.raises(TypeError, match="reference"):
        RCCHandler(model, reference=3)


def test_evaluation_is_not_measured(caplog):
    handler = RCCHandler(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).eval())
    assert measure(handler, [torch.ones(2, 6)]) == {}
    assert "none of 1 monitored iterations had a forward pass" in caplog.text


def test_own_copy_follows_the_model_to_another_device():
    model = nn.Sequential(nn.Linear(6, 6))
    handler = RCCHandler(model)
    model.to("meta")
    measure_nothing = Engine(lambda *_: model(torch.ones(2, 6, device="meta")))
    handler.attach(measure_nothing)
    measure_nothing.run([0])
    assert handler.reference[0].weight.device.type == "meta"


@pytest.mark.parametrize("x", [1.0, 0.0])
def test_what_is_not_finite_is_absent(x):
    torch.manual_seed(0)
    model = Lambda(
        lambda self, x: self.finite(x) + self.other(x / 0).nan_to_num(),
        finite=nn.Linear(6, 3),
        other=nn.Linear(6, 3),
    )
    handler = RCCHandler(model)
    perturb(handler.model)
    result = measure(handler, [torch.full((2, 6), x)])
    assert {name.split("/")[2] for name in result if name.count("/") > 1} == {"finite"}
    assert result["rcc/weight_update_max"] == result["rcc/weight_update_median"] == result["rcc/weight_update/finite"]


def test_an_empty_batch_has_nothing_to_measure():
    handler = RCCHandler(nn.Linear(6, 3))
    assert measure(handler, [torch.ones(0, 6)]) == {}
    assert measure(handler, [torch.ones(2, 6)])["rcc/input/_root_"] == pytest.approx(6**0.5)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_copies_made_in_a_train_step_are_not_measured(duplicate, caplog):
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    handler = RCCHandler(model)
    runs, values = [], []
    handler.reference.register_forward_hook(lambda *_: runs.append(None))

    def train_step(engine, x):
        duplicate(model)(100 * x)
        duplicate(model)(torch.ones(9, 6))
        model(x)

    engine = Engine(train_step)
    handler.attach(engine)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda e: values.append(float(e.state.metrics["rcc/input/0"])))
    engine.run([torch.ones(4, 6)])
    assert (len(runs), values) == (1, [pytest.approx(6**0.5)])
    assert caplog.records == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0.1, 1e-2])
def test_a_normalization_in_low_precision_is_not_measured_by_its_rounding(dtype, size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.RMSNorm(64, eps=1e-6)).to(dtype)
    handler = RCCHandler(model)
    perturb(model, size)
    x = (3 * torch.randn(7, 64)).to(dtype)
    result = measure(handler, [x])
    wide, moved = x.double(), model[0].weight.detach().double() - 1
    update = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * moved
    assert result["rcc/weight_update/0"] == pytest.approx(float(update.norm(dim=-1).mean()), rel=1e-3)
    assert result["rcc/output_change/0"] == pytest.approx(float(update.norm(dim=-1).mean()), rel=1e-3)
    assert result["rcc/input_drift/0"] == 0
    assert result["rcc/input/0"] == pytest.approx(float(wide.norm(dim=-1).mean()), rel=1e-5)


def test_a_batch_norm_in_evaluation_mode_uses_its_own_running_statistics():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3, eps=1e-4))
    handler = RCCHandler(model)
    perturb(model, 0.4)
    first, norm = model
    norm.eval()
    norm.running_mean += torch.tensor([1.0, -2.0, 0.5])
    norm.running_var *= torch.tensor([4.0, 0.3, 9.0])
    x = torch.randn(6, 5)
    result = measure(handler, [x])
    reference, initial = handler.reference

    def normalized(y, mean, var, layer):
        return (y - mean.double()) / (var.double() + 1e-4).sqrt() * layer.weight.double() + layer.bias.double()

    with torch.no_grad():
        moved, before = (layer.double()(x.double()) for layer in copy.deepcopy([first, reference]))
        now = normalized(moved, norm.running_mean, norm.running_var, norm)
        then, start = (normalized(y, torch.zeros(3), torch.ones(3), initial) for y in (moved, before))
    expected = {"weight_update": now - then, "input_drift": then - start, "output_change": now - start}
    for name, change in expected.items():
        assert result[f"rcc/{name}/1"] == pytest.approx(change.norm(dim=1).mean().item(), rel=1e-5)
