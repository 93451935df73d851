from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from ignite_monitor.scaling import PRESETS, Parametrization, ParametrizedModule, TracingError, parametrize
from ignite_monitor.scaling.module import multiplier_of
from tests.scaling import _models

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
CASES = {"mlp": (_models.mlp, X), "transformer": (_models.Transformer, _models.TOKENS)}
OPTIONS = [
    {},
    {"optimizer_type": "sgd", "alignment": "no", "lr_prefactor": 0.3},
    {"ab_overrides": PRESETS["ntk"], "std_prefactor": 0.5},
    {"alignment_overrides": {"readout": (0.8, 0.7, 1.1)}, "c_overrides": {"down": 1.5}},
]


@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
@pytest.mark.parametrize("case", CASES)
def test_the_same_as_wrapped_by_hand(case, options):
    make, sample_input = CASES[case]
    if case == "mlp" and "c_overrides" in options:
        options = options | {"c_overrides": {"hidden": 1.5}}
    torch.manual_seed(0)
    by_hand = Parametrization(make(32, _models.wrapped), sample_input=sample_input, **options)
    torch.manual_seed(0)
    found = parametrize(make, widths=(16, 32), sample_input=sample_input, **options)
    assert list(found.layers) == list(by_hand.layers)
    for name, layer in by_hand.layers.items():
        other = found.layers[name]
        assert (layer.layer_type, layer.fan_in, layer.a, layer.b, layer.c, layer.std) == (
            other.layer_type,
            other.fan_in,
            other.a,
            other.b,
            other.c,
            other.std,
        )
        assert multiplier_of(layer.module).value == multiplier_of(other.module).value == layer.fan_in**-layer.a
    assert len(found.param_groups) == len(by_hand.param_groups)
    for ours, theirs in zip(found.param_groups, by_hand.param_groups, strict=True):
        assert {key: ours[key] for key in ours if key != "params"} == {
            key: theirs[key] for key in theirs if key != "params"
        }
        assert [each.shape for each in ours["params"]] == [each.shape for each in theirs["params"]]
    # And with the same weights the same function.
    names = {name: name.replace(".module.", ".") for name in by_hand.model.state_dict()}
    found.model.load_state_dict({names[key]: value for key, value in by_hand.model.state_dict().items()})
    assert torch.equal(found.model.eval()(sample_input), by_hand.model.eval()(sample_input))


def conv(n):
    return nn.Sequential(
        nn.Conv2d(3, n, 3, padding=1),
        nn.BatchNorm2d(n),
        nn.ReLU(),
        nn.Conv2d(n, 2 * n, 3, stride=2),
        nn.Conv2d(2 * n, 2 * n, 3, groups=2 * n),
        nn.Conv2d(2 * n, 2 * n, 1, groups=2),
        nn.ConvTranspose2d(2 * n, n, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(n, 5),
    )


def test_convolutions():
    """Of a convolution n is all that is summed over; a kernel per channel sums over nothing that grows."""
    found = parametrize(conv, widths=(4, 8), sample_input=torch.randn(1, 3, 12, 12)).layers
    assert {name: (each.layer_type, each.fan_in) for name, each in found.items()} == {
        "0": ("embedding", 8),
        "3": ("hidden", 72),
        "4": ("embedding", 16),
        "5": ("hidden", 8),
        "6": ("hidden", 64),
        "9": ("readout", 8),
    }


@pytest.mark.parametrize("tied", [False, True])
def test_llama(tied):
    found = parametrize(
        lambda n: _models.llama(n, tied=tied), widths=(32, 64), sample_input={"input_ids": _models.TOKENS}
    )
    kinds = {name: (each.layer_type, each.fan_in) for name, each in found.layers.items()}
    assert kinds["model.embed_tokens"] == ("embedding", 64)
    assert kinds["model.layers.1.self_attn.k_proj"] == ("hidden", 64)
    assert kinds["model.layers.1.mlp.down_proj"] == ("hidden", 128)
    assert kinds["lm_head"] == ("readout", 64)
    assert len(kinds) == 16
    torch.optim.Adam(found.param_groups)
    found.model(_models.TOKENS).logits.sum().backward()
    stds = {name: each.weights["weight"].std().item() for name, each in found.layers.items()}
    assert stds["model.layers.0.mlp.down_proj"] == pytest.approx(128**-0.5, rel=0.05)
    assert stds["model.embed_tokens"] == pytest.approx(64**-0.5, rel=0.1)


def test_weights_of_other_modules_by_what_they_take_and_give():
    class Dense(nn.Module):
        def __init__(self, rows, columns):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(rows, columns))

        def forward(self, x):
            return x @ self.weight

    def make(n):
        return nn.Sequential(Dense(6, n), Dense(n, 2 * n), Dense(2 * n, 3))

    found = parametrize(make, widths=(8, 16), sample_input=X).layers
    assert [(each.layer_type, each.fan_in) for each in found.values()] == [
        ("embedding", 16),
        ("hidden", 16),
        ("readout", 32),
    ]


def growing_inputs(n):
    return nn.Sequential(nn.Linear(n, n), nn.Unflatten(-1, (4, -1)), Mixing(), nn.Flatten(), nn.Linear(n, 3))


class Mixing(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x, scale=1 / x.shape[-1])


def test_inputs_that_grow_with_width():
    found = parametrize(growing_inputs, widths=(8, 16), sample_input=lambda n: torch.zeros(2, n))
    assert found.solution.c == pytest.approx({"0": 1.0, "4": 0.5})


def test_module_that_only_lends_its_weights():
    class Lending(Idle):
        def __init__(self, n):
            super().__init__(n)
            self.tokens.weight = self.shared.weight

    found = parametrize(Lending, widths=(8, 16), sample_input=_models.TOKENS)
    assert list(found.layers) == ["tokens", "head"]
    with pytest.raises(TracingError, match=r"does not run shared \(Embedding\)"):
        parametrize(Idle, widths=(8, 16), sample_input=_models.TOKENS)


class Idle(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.shared, self.tokens, self.head = nn.Embedding(11, n), nn.Embedding(11, n), nn.Linear(n, 11)

    def forward(self, x):
        return self.head(self.tokens(x))


def outputs(model):
    torch.manual_seed(3)
    return model.eval()(X)


def test_multipliers_are_copied_pickled_and_saved_with_the_model():
    parametrization = parametrize(_models.mlp, widths=(8, 16), sample_input=X)
    model = parametrization.model
    expected = outputs(model)
    twin = copy.deepcopy(model)
    assert torch.equal(outputs(twin), expected)
    assert multiplier_of(twin[0]) is not multiplier_of(model[0])
    assert torch.equal(outputs(pickle.loads(pickle.dumps(model))), expected)
    assert set(model.state_dict()) == set(_models.mlp(16).state_dict())


@pytest.mark.parametrize("make", [_models.mlp, lambda n: _models.mlp(n, _models.wrapped)], ids=["found", "by hand"])
def test_compiles_without_a_graph_break(make):
    if make is _models.mlp:
        model = parametrize(make, widths=(8, 16), sample_input=X).model
    else:
        model = make(16)
        Parametrization(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(outputs(compiled), outputs(model))
    inner = getattr(model[0], "module", model[0])
    assert torch.equal(model[0](X), nn.functional.linear(X, inner.weight, inner.bias) * 4)


def test_only_the_large_model_moves_the_random_numbers():
    torch.manual_seed(5)
    found = parametrize(_models.mlp, widths=(8, 16), sample_input=X)
    after = torch.rand(3)
    torch.manual_seed(5)
    Parametrization(_models.mlp(16, _models.wrapped))
    assert torch.equal(torch.rand(3), after)
    assert found.model[0].weight.shape == (16, 6)


def other_depth(n):
    return nn.Sequential(*(nn.Linear(n, n) for _ in range(n // 8)))


def other_kind(n):
    return nn.Sequential(nn.Linear(6, n), nn.ReLU() if n == 8 else nn.GELU(), nn.Linear(n, 3))


def odd_weight(n):
    model = _models.mlp(n)
    model.mixing = nn.Parameter(torch.randn(n, n))
    return model


def other_parameters(n):
    return nn.Sequential(nn.Linear(6, n, bias=n > 8))


@pytest.mark.parametrize(
    ("make", "widths", "error", "match"),
    [
        (_models.mlp(8), (8, 16), TypeError, "make_model should be a function of the width"),
        (_models.mlp, (16, 8), ValueError, "a small and a large width"),
        (_models.mlp, 8, TypeError, "a small and a large width"),
        (_models.mlp, (8.0, 16.0), TypeError, "widths should be an integer"),
        (_models.mlp, (8, 8), ValueError, "a small and a large width"),
        (lambda n: n, (8, 16), TypeError, "make_model should be of type a function that returns"),
        (lambda n: nn.Linear(6, 3), (8, 16), ValueError, "whose weights grow with width, but none does"),
        (other_depth, (8, 16), ValueError, "differ in sizes alone, but they have other modules"),
        (other_parameters, (8, 16), ValueError, "differ in sizes alone, but 0 differs"),
        (other_kind, (8, 16), ValueError, r"other modules, first 1 \(ReLU\) in the smaller and 1 \(GELU\) in the lar"),
        (odd_weight, (8, 16), TracingError, r"does not run the model \(Sequential\), whose mixing grows with width"),
        (
            lambda n: nn.Embedding(n, 2 * n),
            (8, 16),
            ValueError,
            r"embedding, with more rows at larger widths, uses wei",
        ),
    ],
)
def test_models_it_can_not_compare(make, widths, error, match):
    sample_input = torch.zeros(2, dtype=torch.long) if "embedding" in match else X
    with pytest.raises(error, match=match):
        parametrize(make, widths=widths, sample_input=sample_input)


@pytest.mark.parametrize(
    ("heads", "scale", "warns"),
    [
        (lambda n: n // 4, lambda size: None, False),
        (lambda n: 2, lambda size: None, True),
        (lambda n: 2, lambda size: 3 / size, False),
        (lambda n: 2, lambda size: 0.5, True),
    ],
)
def test_attention_that_grows_is_told(heads, scale, warns, caplog):
    class Model(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.first, self.last = nn.Linear(6, 3 * n), nn.Linear(n, 3)
            self.heads = heads(n)

        def forward(self, x):
            q, k, v = self.first(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
            return self.last(nn.functional.scaled_dot_product_attention(q, k, v, scale=scale(q.shape[-1])).flatten(-2))

    parametrize(Model, widths=(8, 16), sample_input=X[None])
    assert [record.message.startswith("scaled_dot_product_attention: the heads grow") for record in caplog.records] == [
        True
    ] * warns


def test_wrong_options_are_the_parametrizations():
    with pytest.raises(ValueError, match="optimizer_type should be one of"):
        parametrize(_models.mlp, widths=(8, 16), sample_input=X, optimizer_type="lion")
    with pytest.raises(TypeError, match="unexpected keyword"):
        parametrize(_models.mlp, widths=(8, 16), sample_input=X, learning_rate=1)


def tied_by_hand(n):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.hidden = nn.Embedding(11, n), nn.Linear(n, n)

        def forward(self, x):
            return nn.functional.linear(self.hidden(self.tokens(x)), self.tokens.weight)

    return Model()


def with_bilinear(n, wrap=False):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, n), nn.Bilinear(n, 6, 3)
            if wrap:
                self.last = ParametrizedModule(self.last, width_dim=n, layer_type="readout")

        def forward(self, x):
            return self.last(self.first(x), x)

    return Model()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            tied_by_hand,
            r"What tokens\.weight\.linear gives can't be multiplied, .* nn\.Linear whose weight is the same",
        ),
        (
            with_bilinear,
            r"last\.bilinear uses last\.weight, .* last \(Bilinear\) has no exponents: put it into a Param",
        ),
        (
            lambda n: nn.Sequential(nn.Linear(6, n), nn.utils.parametrizations.spectral_norm(nn.Linear(n, 3))),
            r"1 \(Linear\) computes its weight from other parameters",
        ),
    ],
    ids=["tied", "bilinear", "spectral norm"],
)
def test_weights_of_which_it_is_not_known_what_for_are_named(make, match):
    sample_input = _models.TOKENS if make is tied_by_hand else X
    with pytest.raises(ValueError, match=match):
        parametrize(make, widths=(8, 16), sample_input=sample_input)


def test_the_way_out_that_errors_name():
    """ParametrizedModules in the model are taken as they are."""
    found = parametrize(lambda n: with_bilinear(n, wrap=True), widths=(8, 16), sample_input=X)
    assert {name: (each.layer_type, each.c) for name, each in found.layers.items()} == {
        "first": ("embedding", pytest.approx(0.5)),
        "last": ("readout", pytest.approx(0.5)),
    }
    assert multiplier_of(found.model.last).value == 16**-0.5

    class Tied(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.tokens, self.hidden, self.head = nn.Embedding(11, n), nn.Linear(n, n), nn.Linear(n, 11, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, x):
            return self.head(self.hidden(self.tokens(x)))

    assert list(parametrize(Tied, widths=(8, 16), sample_input=_models.TOKENS).layers) == ["tokens", "hidden", "head"]


class Awkward(nn.Module):
    """A layer with something behind it, or a parameter beside it, that can't be followed."""

    def __init__(self, n, way):
        super().__init__()
        self.n, self.way, self.mix = n, way, nn.LazyLinear(n) if way == "lazy" else nn.Linear(n, n)
        if way == "factor":
            self.mix = ParametrizedModule(self.mix, width_dim=n, layer_type="hidden", a=0.0, b=0.5)
        self.mask, self.segments = nn.Parameter(torch.ones(2, n)), nn.Parameter(torch.ones(2, n))

    def forward(self, x):
        y = self.mix(x)
        if self.way == "numpy":
            y = torch.from_numpy(y.detach().numpy())
        elif self.way == "fft":
            y = torch.fft.fft(y).real
        elif self.way == "factor":
            y = y * self.n**-0.5
        return y if self.way == "unused" else y + (self.mask + self.segments).sum(0)


def freeze(model, n):
    model.mask.requires_grad, model.segments.requires_grad = False, False
    return model


def run_once(model, n):
    model(torch.zeros(1, n))
    return model


def wrap(model, n):
    return ParametrizedModule(model, width_dim=n, layer_type="hidden")


def multiply(model, n):
    model.mix, model.n = ParametrizedModule(model.mix.module, width_dim=n, layer_type="hidden", a=0.5, b=0.0), 1
    return model


@pytest.mark.parametrize(
    ("way", "match", "out"),
    [
        ("numpy", r"1\.numpy takes activations out .* Put the module that does so, with a layer in it, into", wrap),
        ("fft", r"2 takes its input from 1\.fft_fft, .* Put the module that gives it, with a layer in it, into", wrap),
        ("factor", r"1\.mix, a ParametrizedModule, .* let the ParametrizedModule multiply, with a and b", multiply),
        ("lazy", r"1\.mix is one: run it once there", run_once),
        ("unused", r"1 \(Awkward\), whose mask grows .*; 1 \(Awkward\), whose segments .* or freeze", freeze),
    ],
)
def test_ways_out(way, match, out):
    def make(n, out=lambda model, n: model):
        return nn.Sequential(nn.Linear(6, n), out(Awkward(n, way), n), nn.Linear(n, 3))

    with pytest.raises((TracingError, ValueError), match=match):
        parametrize(make, widths=(8, 16), sample_input=X)
    found = parametrize(lambda n: make(n, out), widths=(8, 16), sample_input=X)
    assert [each.layer_type for each in found.layers.values()] == ["embedding", "hidden", "readout"]


def test_wrapped_by_hand_is_the_same_as_found():
    by_hand = parametrize(lambda n: _models.mlp(n, _models.wrapped), (8, 16), sample_input=X)
    found = parametrize(_models.mlp, (8, 16), sample_input=X)
    assert by_hand.solution.c == found.solution.c
    weights = {name.replace(".module.", "."): value for name, value in by_hand.model.state_dict().items()}
    found.model.load_state_dict(weights)
    assert torch.equal(outputs(by_hand.model), outputs(found.model))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda n: nn.Sequential(nn.LazyLinear(n)), "lazy modules, but 0 is one: run it once"),
        (lambda n: nn.Sequential(nn.Linear(6, n), torch.jit.script(nn.Linear(n, 3))), "scripted modules, but 1 is one"),
    ],
)
def test_modules_that_can_not_be_looked_into_are_named(make, what):
    with pytest.raises(ValueError, match=f"make_model should make a model without {what}"):
        parametrize(make, widths=(8, 16), sample_input=X)


def test_transposed_convolutions_in_groups():
    """One kernel for each channel sums over nothing that grows; of several groups each is a fan-in of its own."""

    def make(n):
        return nn.Sequential(
            nn.Conv2d(3, n, 1),
            nn.ConvTranspose2d(n, 2 * n, 2, groups=n),
            nn.ConvTranspose2d(2 * n, n, 3, groups=4),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(n, 5),
        )

    found = parametrize(make, widths=(8, 16), sample_input=torch.randn(1, 3, 4, 4)).layers
    assert {name: (each.layer_type, each.fan_in) for name, each in found.items()} == {
        "0": ("embedding", 16),
        "1": ("embedding", 32),
        "2": ("hidden", 8 * 9),
        "5": ("readout", 16),
    }


def test_tables_that_do_not_learn_keep_their_values():
    """As sinusoids of positions."""

    class Model(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.tokens, self.places, self.head = nn.Embedding(11, n), nn.Embedding(5, n), nn.Linear(n, 11)
            self.places.weight.requires_grad_(False)
            with torch.no_grad():
                self.places.weight.copy_(torch.arange(5 * n).view(5, n).sin())

        def forward(self, x):
            return self.head(self.tokens(x) + self.places(torch.arange(x.shape[-1])))

    found = parametrize(Model, widths=(8, 16), sample_input=_models.TOKENS)
    assert list(found.layers) == ["tokens", "head"]
    assert torch.equal(found.model.places.weight, torch.arange(80).view(5, 16).sin())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_scores_with_a_learned_bias(attention):
    """T5's, of relative positions: it is added to them, and does not grow."""
    transformers = pytest.importorskip("transformers")

    def make(n):
        return transformers.T5EncoderModel(
            transformers.T5Config(
                vocab_size=13,
                d_model=n,
                d_kv=n // 2,
                d_ff=2 * n,
                num_layers=1,
                num_heads=2,
                attn_implementation=attention,
            )
        )

    found = parametrize(make, widths=(16, 32), sample_input=_models.TOKENS).layers
    kinds = {name.rpartition(".")[2]: each.layer_type for name, each in found.items()}
    assert kinds == {"embed_tokens": "embedding"} | dict.fromkeys(("q", "k", "v", "o", "wi", "wo"), "hidden")


@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("factor", [False, True])
def test_tied_weights_are_checked_in_whatever_order_they_are_made(head_first, factor):
    """With a factor of the model's own that no module gives, both can't have the same standard deviation."""

    class Tied(nn.Module):
        def __init__(self, n):
            super().__init__()
            if head_first:
                self.head = nn.Linear(n, 11, bias=False)
            self.tokens = nn.Embedding(11, n)
            if not head_first:
                self.head = nn.Linear(n, 11, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, x):
            x = self.tokens(x).tanh()
            return torch.nn.functional.linear(x, self.head.weight).tanh() if factor else self.head(x)

    def made():
        return parametrize(Tied, (8, 32), sample_input=torch.tensor([[1, 2]]))

    if factor:
        with pytest.raises(ValueError, match="share their weights, so both should have the same width and b"):
            made()
    else:
        parametrization = made()
        assert len({layer.std for layer in parametrization.layers.values()}) == 1
        assert sum(len(group["params"]) for group in parametrization.param_groups) == 1
