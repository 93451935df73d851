from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import nn

from ignite_monitor.model.sampling import fnv1a_64
from ignite_monitor.scaling import PRESETS, InfeasibleError, Parametrization, ParametrizedModule, TracingError
from tests.scaling import _models

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def by_name(parametrization, bias=False):
    return {group["layer_name"]: group for group in parametrization.param_groups if group["bias"] is bias}


def test_mlp_has_what_mup_says():
    """Of width 64: outputs times n^-a, weights of n^-b, Adam's learning rates of n^-c; b = 1/2 everywhere."""
    torch.manual_seed(0)
    model = _models.mlp(64, _models.wrapped)
    parametrization = Parametrization(model, lr_prefactor=0.1, std_prefactor=2.0)
    groups, biases = by_name(parametrization), by_name(parametrization, bias=True)
    expected = {"0": (-0.5, 0.5, -0.5 + 1), "3": (0.0, 1.0, 0.0), "6": (0.5, 0.5, -0.5)}
    for name, (a, c, bias_c) in expected.items():
        inner = model[int(name)].module
        group = groups[name]
        assert (group["fan_in"], group["c"], group["lr"]) == (64, pytest.approx(c), pytest.approx(0.1 * 64**-c))
        assert [id(each) for each in group["params"]] == [id(inner.weight)]
        assert biases[name]["lr"] == pytest.approx(0.1 * 64**-bias_c)
        assert [id(each) for each in biases[name]["params"]] == [id(inner.bias)]
        assert inner.weight.std().item() == pytest.approx(2 / 8, rel=4 / math.sqrt(2 * inner.weight.numel()))
        assert abs(inner.weight.mean().item()) < 4 * 2 / 8 / math.sqrt(inner.weight.numel())
        assert not inner.bias.any()
        x = torch.randn(2, inner.in_features)
        assert torch.equal(model[int(name)](x), inner(x) * 64**-a)
    (other,) = [group for group in parametrization.param_groups if group["layer_name"] == "_other"]
    assert (other["lr"], other["c"], other["fan_in"]) == (0.1, 0.0, 1)
    assert [id(each) for each in other["params"]] == [id(each) for each in model[4].parameters()]
    assert torch.equal(model[4].weight, torch.ones(64))


def test_groups_hold_every_parameter_once():
    parametrization = Parametrization(_models.Transformer(16, _models.wrapped), sample_input=_models.TOKENS)
    held = [id(parameter) for group in parametrization.param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(map(id, parametrization.model.parameters()))
    optimizer = torch.optim.AdamW(parametrization.param_groups)
    assert optimizer.param_groups[0]["layer_name"] == "tokens"
    torch.load(io.BytesIO(saved(optimizer.state_dict())), weights_only=True)


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def test_groups_hold_the_parameters_that_the_model_has_now():
    """Sharding, and what makes a model of one on the meta device, put others in their place."""
    model = _models.mlp(8, _models.wrapped)
    parametrization = Parametrization(model)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = nn.Parameter(parameter.detach().clone())
    groups = parametrization.param_groups
    assert {id(each) for group in groups for each in group["params"]} == {id(each) for each in model.parameters()}
    (hidden,) = (group for group in groups if group["layer_name"] == "3" and not group["bias"])
    assert [id(each) for each in hidden["params"]] == [id(model[3].module.weight)]
    assert parametrization.layers["3"].weights["module.weight"] is model[3].module.weight


def test_layers_say_what_was_done():
    model = _models.mlp(16, _models.wrapped)
    parametrization = Parametrization(model, ab_overrides={"3": (0.25, 0.25)}, std_prefactor=3.0)
    layer = parametrization.layers["3"]
    assert layer.module is model[3]
    assert (layer.layer_type, layer.fan_in, layer.a, layer.b) == ("hidden", 16, 0.25, 0.25)
    assert layer.c == pytest.approx(0.75)
    assert layer.std == pytest.approx(3 * 16**-0.25)
    assert layer.weights == {"module.weight": model[3].module.weight}
    assert layer.biases == {"module.bias": model[3].module.bias}


def test_initial_weights_come_back_from_their_seeds():
    torch.manual_seed(1)
    model = nn.Sequential(
        _models.wrapped(nn.Embedding(7, 8, padding_idx=2), 8, "embedding"),
        _models.wrapped(nn.Linear(8, 8).bfloat16(), 8, "hidden"),
    )
    parametrization = Parametrization(model)
    before = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    for name, layer in parametrization.layers.items():
        initial = layer.initial_weight("module.weight")
        assert torch.equal(initial, before[int(name)].module.weight)
        assert initial.dtype == before[int(name)].module.weight.dtype
    assert not before[0].module.weight[2].any()


def test_weights_lie_where_the_model_does():
    model = _models.mlp(8, _models.wrapped)
    torch.manual_seed(0)
    with torch.device("meta"):
        Parametrization(model)
        assert (
            Parametrization(_models.mlp(8, _models.wrapped), sample_input=X.to("meta")).model[0].module.weight.is_meta
        )
    first = model[0].module.weight.clone()
    torch.manual_seed(0)
    Parametrization(model)
    assert torch.equal(first, model[0].module.weight)


def test_seed_of_torch_decides():
    def weights(seed):
        torch.manual_seed(seed)
        model = _models.mlp(8, _models.wrapped)
        Parametrization(model)
        return torch.cat([model[0].module.weight.flatten(), model[3].module.weight.flatten()])

    first = weights(0)
    assert torch.equal(first, weights(0))
    assert not torch.equal(first, weights(1))
    assert not torch.equal(first[:8], first[48:56])
    assert fnv1a_64("0.module.weight") != fnv1a_64("3.module.weight")


def nested():
    n = 8
    return nn.ModuleDict(
        {
            "front": nn.Sequential(_models.wrapped(nn.Linear(6, n), n, "embedding")),
            "a": nn.ModuleDict({"fc": _models.wrapped(nn.Linear(n, n), n, "hidden")}),
            "b": nn.ModuleDict({"fc": _models.wrapped(nn.Linear(n, n), n, "hidden")}),
            "c": nn.ModuleDict({"up": _models.wrapped(nn.Linear(n, n), n, "hidden")}),
            "head": _models.wrapped(nn.Linear(n, 3), n, "readout"),
        }
    )


def test_overrides_by_name_then_last_part_then_type():
    c = {"hidden": 1.1, "fc": 1.2, "a.fc": 1.3}
    found = Parametrization(nested(), c_overrides=c).solution.c
    assert found == pytest.approx({"front.0": 0.5, "a.fc": 1.3, "b.fc": 1.2, "c.up": 1.1, "head": 0.5})
    ab = {"fc": (0.25, 0.25), "b.fc": (0.5, 0.0), "readout": (0.0, 0.5)}
    layers = Parametrization(nested(), ab_overrides=ab).layers
    assert {name: layer.a for name, layer in layers.items()} == {
        "front.0": -0.5,
        "a.fc": 0.25,
        "b.fc": 0.5,
        "c.up": 0.0,
        "head": 0.0,
    }
    alignments = Parametrization(nested(), alignment="no", alignment_overrides={"fc": "full", "head": (0.7, 0.5, 0.8)})
    expected = {"front.0": 0.5, "a.fc": 1.0, "b.fc": 1.0, "c.up": 0.5, "head": 0.2}
    # u - alpha = 0.1 of the head is as cheap in it as in c.up, which comes first and stays
    assert alignments.solution.c == pytest.approx(expected | {"head": 0.3})


def test_overrides_prevail_over_the_module_and_that_over_the_preset():
    n = 8
    layers = [ParametrizedModule(nn.Linear(n, n), width_dim=n, layer_type="hidden", a=0.1, b=0.4, c=1.5) for _ in "ab"]
    found = Parametrization(nn.Sequential(*layers), ab_overrides={"1": (0.2, 0.3)}, c_overrides={"1": 1.25}).layers
    assert [(each.a, each.b, each.c) for each in found.values()] == [(0.1, 0.4, 1.5), (0.2, 0.3, 1.25)]


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_as_overrides(preset):
    found = Parametrization(_models.mlp(8, _models.wrapped), ab_overrides=PRESETS[preset]).layers
    assert {each.layer_type: (each.a, each.b) for each in found.values()}.items() <= PRESETS[preset].items()


def test_traced_graph():
    model = _models.Transformer(16, _models.wrapped)
    alignments = {"head": (1.0, 1.2, 1.0)}
    chained = Parametrization(model, alignment_overrides=alignments)
    traced = Parametrization(model, alignment_overrides=alignments, sample_input=_models.TOKENS)
    slow = {f"blocks.{n}.{each}" for n in (0, 1) for each in ("attention.out", "mlp.down")}
    assert traced.solution.c["tokens"] == pytest.approx(0.7)
    assert all(traced.solution.c[name] == pytest.approx(1.2) for name in slow)
    assert chained.solution.c["blocks.0.mlp.gate"] == pytest.approx(traced.solution.c["blocks.0.mlp.gate"])
    assert chained.solution.r["blocks.0.mlp.gate"] == pytest.approx(0.2)


def test_solve_again_changes_nothing():
    parametrization = Parametrization(_models.mlp(8, _models.wrapped))
    before = copy.deepcopy(parametrization.solution)
    again = parametrization.solve({"3": (0.75, 0.5, 0.75)})
    assert again.c == pytest.approx({"0": 0.5, "3": 0.75, "6": 0.5})
    assert parametrization.solution == before
    with pytest.raises(ValueError, match=r"name layers, but given \['4'\]"):
        parametrization.solve({"4": "full"})


def test_attention_as_a_layer():
    n = 8
    model = nn.Sequential()
    model.q = _models.wrapped(nn.Linear(n, n), n, "hidden")
    model.scores = ParametrizedModule(lambda q, k: q @ k.mT, width_dim=n, layer_type="attention")
    model.forward = lambda x: model.scores(model.q(x), model.q(x))
    parametrization = Parametrization(model, sample_input=torch.zeros(2, n))
    x = torch.randn(3, n)
    assert torch.allclose(model(x), model.q(x) @ model.q(x).mT / n)
    assert parametrization.layers["scores"].c is None
    assert [group["layer_name"] for group in parametrization.param_groups] == ["q", "q"]


def test_tied_weights_have_one_group():
    class Tied(nn.Module):
        def __init__(self, n=8):
            super().__init__()
            self.tokens = _models.wrapped(nn.Embedding(11, n), n, "embedding")
            self.head = _models.wrapped(nn.Linear(n, 11), n, "readout")
            self.head.module.weight = self.tokens.module.weight

        def forward(self, x):
            return self.head(self.tokens(x))

    for sample_input in (None, _models.TOKENS):
        model = Tied()
        parametrization = Parametrization(model, alignment="no", sample_input=sample_input)
        groups = by_name(parametrization)
        assert list(groups) == ["tokens"]
        assert groups["tokens"]["c"] == pytest.approx(0.5)
        assert parametrization.layers["head"].c == parametrization.layers["tokens"].c
        for layer in parametrization.layers.values():
            assert torch.equal(layer.initial_weight("module.weight"), model.tokens.module.weight)
        torch.optim.Adam(parametrization.param_groups)
    with pytest.raises(ValueError, match=r"tokens and head share their weights, .* but they have 8 and 8, and 0 and 0"):
        Parametrization(Tied(), ab_overrides=PRESETS["standard"])
    with pytest.raises(ValueError, match="different c"):
        Parametrization(Tied(), c_overrides={"tokens": 0.5, "head": 0.75})
    pinned = Parametrization(Tied(), c_overrides={"head": 0.75})
    assert pinned.solution.c == {"tokens": pytest.approx(0.75)}


def test_a_failure_leaves_the_model_as_it_was():
    model = _models.mlp(8, _models.wrapped)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with pytest.raises(InfeasibleError):
        Parametrization(model, c_overrides={"3": 0.5})
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model[3](X[:, :1].expand(4, 8)), model[3].module(X[:, :1].expand(4, 8)))


def test_wrapped_models_keep_the_layers_names():
    model = torch.compile(_models.mlp(8, _models.wrapped), backend="eager")
    assert list(Parametrization(model).layers) == ["0", "3", "6"]


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, scale=1.0):
        return {"out": (self.linear(x) * scale, x.argmax(-1))}


def test_module_with_other_outputs():
    model = ParametrizedModule(Pair(), width_dim=4, layer_type="readout")
    Parametrization(model)
    x = torch.randn(2, 4)
    ours, theirs = model(x, scale=2.0)["out"], model.module(x, scale=2.0)["out"]
    assert torch.equal(ours[0], theirs[0] / 2)
    assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"width_dim": 4.0}, TypeError, "width_dim should be an integer"),
        ({"width_dim": 0}, ValueError, "width_dim should be at least 1"),
        ({"layer_type": "output"}, ValueError, "layer_type should be one of"),
        ({"layer_type": "attention"}, ValueError, "should have no weights as a layer of type 'attention'"),
        ({"module": torch.matmul, "layer_type": "attention", "c": 1.0}, ValueError, "b and c should be None"),
        ({"a": "1"}, TypeError, "a should be a number"),
        ({"b": math.inf}, ValueError, "b should be finite"),
        ({"module": nn.ReLU()}, ValueError, "should have weights"),
        ({"module": 3}, TypeError, "module should be of type torch.nn.Module or a function"),
    ],
)
def test_wrong_layers(arguments, error, match):
    arguments = {"module": nn.Linear(4, 4), "width_dim": 4, "layer_type": "hidden"} | arguments
    with pytest.raises(error, match=match):
        ParametrizedModule(arguments.pop("module"), **arguments)


def inside():
    return nn.Sequential(_models.wrapped(nn.Sequential(_models.wrapped(nn.Linear(4, 4), 4, "hidden")), 4, "hidden"))


@pytest.mark.parametrize(
    ("model", "arguments", "error", "match"),
    [
        (3, {}, TypeError, "model should be of type torch.nn.Module"),
        (nn.Linear(3, 3), {}, ValueError, "at least one ParametrizedModule"),
        (inside(), {}, ValueError, r"Layer 0\.module\.0 is a part of layer 0"),
        (None, {"optimizer_type": "lion"}, ValueError, "optimizer_type should be one of"),
        (None, {"alignment": "half"}, ValueError, "alignment should be one of"),
        (None, {"lr_prefactor": 0.0}, ValueError, "lr_prefactor should be a number greater than 0|greater than 0"),
        (None, {"std_prefactor": -1.0}, ValueError, "std_prefactor should be greater than 0"),
        (None, {"ab_overrides": {"3": 0.5}}, TypeError, r"ab_overrides\['3'\] should be two numbers"),
        (None, {"ab_overrides": {"3": (0.5, 0.5)}}, ValueError, r"Layer 3 should have a \+ b equal to 0\.5"),
        (None, {"ab_overrides": [1]}, TypeError, "ab_overrides should be of type Mapping or None"),
        (None, {"c_overrides": {"4": 0.5}}, ValueError, r"name layers of the model or layer types, but given \['4'\]"),
        (None, {"alignment_overrides": {"3": (1, 2)}}, TypeError, r"alignment_overrides\['3'\] should be one of"),
    ],
)
def test_wrong_arguments(model, arguments, error, match):
    with pytest.raises(error, match=match):
        Parametrization(_models.mlp(4, _models.wrapped) if model is None else model, **arguments)


def test_tracing_errors_are_the_users_to_see():
    model = nn.Sequential(
        _models.mlp(4, _models.wrapped)[0], nn.Linear(4, 4), _models.wrapped(nn.Linear(4, 1), 4, "readout")
    )
    with pytest.raises(TracingError, match=r"1\.weight"):
        Parametrization(model, sample_input=X)


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_weights_that_are_computed_are_refused(norm):
    """Drawn from the distribution of the weight, what it is computed from would give another weight."""
    model = _models.mlp(8, _models.wrapped)
    norm(model[3].module)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(ValueError, match=r"Layer 3 \(Linear\) computes its weight from .* freeze it"):
        Parametrization(model)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    model[3].requires_grad_(False)
    assert not Parametrization(model).layers["3"].seeds
    assert all(torch.equal(parameter, before[name]) for name, parameter in model[3].named_parameters("3"))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
def test_weight_norm_starts_with_the_norm_of_its_weight(norm, dim):
    model = _models.mlp(64, _models.wrapped)
    norm(model[3].module, dim=dim)
    layer = Parametrization(model).layers["3"]
    model(torch.zeros(1, 6))  # the older norm computes its weight when it runs
    (key,) = layer.weights
    assert torch.allclose(model[3].module.weight, layer.initial_weight(key), atol=1e-6)
    assert model[3].module.weight.std().item() == pytest.approx(1 / 8, rel=0.1)
    assert len(layer.biases) == 2


def test_biases_of_recurrent_layers_start_at_zero():
    model = ParametrizedModule(nn.LSTM(4, 4), width_dim=4, layer_type="hidden")
    layer = Parametrization(model).layers[""]
    assert list(layer.biases) == ["module.bias_ih_l0", "module.bias_hh_l0"]
    assert not any(bias.any() for bias in layer.biases.values())


def test_frozen_and_zero_weights_keep_their_values():
    model = _models.mlp(8, _models.wrapped)
    model[0].module.weight.requires_grad_(False)
    nn.init.zeros_(model[6].module.weight)
    before = model[0].module.weight.clone()
    parametrization = Parametrization(model)
    assert torch.equal(model[0].module.weight, before)
    assert not model[6].module.weight.any()
    first, last = parametrization.layers["0"], parametrization.layers["6"]
    assert first.seeds == last.seeds == {}
    nn.init.ones_(model[6].module.weight)
    assert torch.equal(first.initial_weight("module.weight"), before)
    assert not last.initial_weight("module.weight").any()
