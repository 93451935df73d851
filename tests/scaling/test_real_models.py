"""Parametrizations of models that people train, of transformers, torchvision, timm and PEFT, at tiny sizes.

What the layers should be is written down from the models' definitions; every weight that grows has to be one of them.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

from ignite_monitor.scaling import TracingError, parametrize
from tests.scaling import _families as families
from tests.scaling._models import weight_of

SMALL, LARGE = 16, 32
SUMS = {"embedding": (0, 0), "hidden": (0.5, 1), "readout": (1, 1)}  # a + b and a + c
COUNTS = {
    "Llama, GQA (transformers)": (1, 7, 1),
    "GPT-2 (transformers)": (2, 4, 1),  # positions are embedded, too
    "T5 (transformers)": (4, 16, 1),  # two for relative positions
    "Gemma (transformers)": (1, 7, 1),
    "Mixtral (transformers)": (1, 6, 2),
    "DeepSeek (transformers)": (3, 8, 2),  # complex rotations; what a fixed rank gives is embedded
    "GPT-OSS (transformers)": (1, 6, 2),  # softmax of the largest logits
    "Swin (transformers)": (3, 13, 1),  # positions by an MLP
    "ConvNeXt (transformers)": (3, 5, 1),  # a norm over positions
    "LSTM language model": (1, 4, 1),
    "nn.Transformer": (2, 10, 1),
}
# The others run in `make compatibility`, as do the models of packages that `make test` does not install.
USUAL = {
    *("GPT-2 (transformers)", "T5 (transformers)", "Mixtral (transformers)"),
    *("LSTM language model", "nn.Transformer"),
}
OWN = {  # exponents of the model's own factors
    "Gemma (transformers)": {"model.embed_tokens": 0.5},  # times the root of hidden_size, inside of a subclass
    "T5 (transformers)": {"lm_head": -0.5, "encoder.embed_tokens": 0.0},  # its input times d_model ** -0.5
    "Llama, GQA (transformers)": {"model.embed_tokens": 0.0},
}
# Parts of names of parameters that are added, or multiplied with, element by element or in blocks of a fixed size.
OTHERS = (
    *("pos_embed", "position_embedding", "wpe", "cls_token", "class_token", "norm", "grn", "bias"),
    *("logit_scale", "gate_weight"),
)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of one of these packages about another


@functools.cache
def parametrized(name):
    make, sample_input = families.CASES[name]()
    return make(SMALL), parametrize(make, (SMALL, LARGE), sample_input=sample_input)


def made(name):
    try:
        return parametrized(name)
    except ImportError as error:
        pytest.skip(f"{error}")


@pytest.mark.parametrize(
    "name", [name if name in USUAL else pytest.param(name, marks=pytest.mark.compatibility) for name in families.CASES]
)
def test_every_weight_that_grows_has_its_role_and_a_rate(name):
    small, parametrization = made(name)
    layers = parametrization.layers.values()
    types = [layer.role for layer in layers]
    assert tuple(map(types.count, SUMS)) == COUNTS.get(name, tuple(map(types.count, SUMS)))
    if name in COUNTS:
        for layer in layers:
            assert (layer.a + layer.b, layer.a + layer.c) == pytest.approx(SUMS[layer.role]), layer.name
    for key, own in OWN.get(name, {}).items():
        layer = parametrization.layers[key]
        assert layer.multiplier * LARGE**own == pytest.approx(LARGE**-layer.a)
    held = [id(parameter) for group in parametrization.param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(map(id, parametrization.model.parameters()))
    sizes = {key: parameter.shape for key, parameter in small.named_parameters()}
    weights = {id(weight_of(parametrization, layer.name)) for layer in layers}
    for key, parameter in parametrization.model.named_parameters():
        grows = parameter.ndim > 1 and parameter.requires_grad and parameter.shape != sizes[key]
        assert not grows or any(part in key for part in OTHERS) or id(parameter) in weights, key


@pytest.mark.compatibility
def test_bottlenecks_in_front_of_batch_norm():
    _, parametrization = made("ResNet, Bottleneck (torchvision)")
    result = {(name.rpartition(".")[2], layer.role, layer.c) for name, layer in parametrization.layers.items()}
    assert result == {("conv1", "embedding", 0.5), ("conv2", "hidden", 1.0), ("conv3", "hidden", 1.0)}


@pytest.mark.parametrize("way", ["default", pytest.param("batched_mm", marks=pytest.mark.compatibility), "eager"])
def test_experts_however_they_are_computed(way):
    make, sample_input = families.CASES["Mixtral (transformers)"]()

    def make_model(n):
        model = make(n)
        model.config._experts_implementation = way
        return model

    options = {"make_model": make_model, "widths": (SMALL, LARGE), "sample_input": sample_input}
    if way == "eager":  # a loop over the experts that were chosen
        with pytest.raises(TracingError, match=r"modeling_\w+\.py:\d+ in forward"):
            parametrize(**options)
        return
    layers = (made("Mixtral (transformers)")[1] if way == "default" else parametrize(**options)).layers
    assert [(layer.role, layer.width, layer.c) for name, layer in layers.items() if "experts." in name] == [
        ("hidden", LARGE, pytest.approx(1)),
        ("hidden", 2 * LARGE, pytest.approx(1)),
    ]
    assert layers["model.layers.0.mlp.gate"].role == layers["lm_head"].role == "readout"


@pytest.mark.compatibility
def test_lora_on_a_frozen_llama():
    parametrization = copy.deepcopy(made("LoRA on a frozen Llama (PEFT)")[1])
    assert {name.split(".")[-2] for name in parametrization.layers} == {"lora_A", "lora_B"}
    for name, layer in parametrization.layers.items():
        assert (layer.role, layer.a, layer.c) == (
            ("hidden", 0, pytest.approx(1)) if "lora_A" in name else ("embedding", 0, pytest.approx(0))
        )
    merged = parametrization.model
    x = {"input_ids": families.IDS}
    for name in parametrization.layers:
        nn.init.normal_(weight_of(parametrization, name), std=0.1)
    before = merged(**x).logits
    assert torch.allclose(merged.merge_and_unload()(**x).logits, before, atol=1e-5)
