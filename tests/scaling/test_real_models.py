"""Parametrizations of models that people train, of transformers, torchvision, timm and PEFT, at tiny sizes.

What the layers should be is written down from the models' definitions; every weight that grows has to be one of them.
"""

from __future__ import annotations

import copy
import functools
import random

import pytest
import torch
from torch import nn

from ignite_monitor.scaling import TracingError, parametrize
from tests.scaling import _families as families
from tests.scaling._models import weight_of

SMALL, LARGE = 16, 32
EXPONENTS = {"embedding": (-0.5, 0.5), "hidden": (0.0, 1.0), "readout": (0.5, 0.5)}
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


def kinds_of(parametrization):
    types = [layer.layer_type for layer in parametrization.layers.values()]
    return tuple(types.count(kind) for kind in EXPONENTS)


COUNTS = {
    "Llama, GQA (transformers)": (1, 7, 1),
    "GPT-2 (transformers)": (2, 4, 1),  # positions are embedded, too
    "T5 (transformers)": (4, 16, 1),  # two for relative positions
    "Gemma (transformers)": (1, 7, 1),
    "BERT (transformers)": (3, 7, 1),
    "ViT (transformers)": (1, 6, 1),
    "ConvNeXt (timm)": (5, 11, 1),  # depthwise convolutions sum over nothing that grows
    "LSTM language model": (1, 4, 1),
    "nn.Transformer": (2, 10, 1),
}


@pytest.mark.parametrize("name", COUNTS)
def test_kinds_and_exponents(name):
    _, parametrization = made(name)
    assert kinds_of(parametrization) == COUNTS[name]
    for layer in parametrization.layers.values():
        assert (layer.a, layer.c) == pytest.approx(EXPONENTS[layer.layer_type]), layer.name


@pytest.mark.parametrize(
    "name", [f"{kind} (transformers)" for kind in ("GPT-2", "Llama, GQA", "Mixtral", "T5", "Gemma")]
)
def test_the_program_gives_the_closed_form_for_random_alignments(name):
    """c = max(alpha, u) - a, and -a for embeddings, whatever omega is; tied weights have the larger of two."""
    _, parametrization = made(name)
    rng = random.Random(0)
    for _ in range(5):
        alignment = {layer: [rng.uniform(0.3, 1.2) for _ in range(3)] for layer in parametrization.layers}
        expected: dict[str, float] = {}
        for layer in parametrization.layers.values():
            alpha, _, u = alignment[layer.name]
            gain = 0.0 if layer.layer_type == "embedding" else min(max(alpha, u, 0.5), 1.0)
            expected[layer.weight] = max(expected.get(layer.weight, -1.0), gain - layer.a)
        c = parametrization.solve(alignment).c
        found = {layer.weight: c[layer.name] for layer in parametrization.layers.values()}
        assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "layer", "own"),
    [
        ("Gemma (transformers)", "model.embed_tokens", 0.5),  # times the root of hidden_size, inside of a subclass
        ("T5 (transformers)", "lm_head", -0.5),  # its input times d_model ** -0.5
        ("T5 (transformers)", "encoder.embed_tokens", 0.0),
        ("Llama, GQA (transformers)", "model.embed_tokens", 0.0),
    ],
)
def test_own_factors(name, layer, own):
    _, parametrization = made(name)
    found = parametrization.layers[layer]
    assert found.multiplier * LARGE**own == pytest.approx(LARGE**-found.a)


def test_experts_stacked_in_one_parameter():
    _, parametrization = made("Mixtral (transformers)")
    layers = parametrization.layers
    up, down = (layers[f"model.layers.0.mlp.experts.{name}"] for name in ("gate_up_proj", "down_proj"))
    assert [(each.layer_type, each.fan_in, each.a, each.c) for each in (up, down)] == [
        ("hidden", LARGE, 0, pytest.approx(1)),
        ("hidden", 2 * LARGE, 0, pytest.approx(1)),
    ]
    gate = layers["model.layers.0.mlp.gate"]
    assert (gate.layer_type, gate.a + gate.b) == ("readout", 1)


def test_bottlenecks_in_front_of_batch_norm():
    _, parametrization = made("ResNet, Bottleneck (torchvision)")
    found = {(name.rpartition(".")[2], layer.layer_type, layer.c) for name, layer in parametrization.layers.items()}
    assert found == {("conv1", "embedding", 0.5), ("conv2", "hidden", 1.0), ("conv3", "hidden", 1.0)}


@pytest.mark.parametrize("way", ["eager", "batched_mm"])
def test_experts_however_they_are_computed(way):
    transformers = pytest.importorskip("transformers")

    def make(n):
        config = transformers.MixtralConfig(
            vocab_size=13, hidden_size=n, intermediate_size=2 * n, num_hidden_layers=1, num_attention_heads=n // 8,
            num_key_value_heads=n // 8, head_dim=8, num_local_experts=4, num_experts_per_tok=2, pad_token_id=None,
        )  # fmt: skip
        config._experts_implementation = way
        return transformers.MixtralForCausalLM(config)

    kinds, sample_input = None, {"input_ids": torch.tensor([[1, 2, 3, 4, 5]])}
    if way == "eager":  # a loop over the experts that were chosen
        with pytest.raises(TracingError, match=r"modeling_\w+\.py:\d+ in forward.*kinds="):
            parametrize(make, (16, 32), sample_input=sample_input)
        kinds = {"gate_up_proj": "hidden", "down_proj": "hidden", "gate": "readout"}
    layers = parametrize(make, (16, 32), sample_input=sample_input, kinds=kinds).layers
    experts = {name: each for name, each in layers.items() if "experts." in name}
    assert [(each.layer_type, each.c) for each in experts.values()] == [("hidden", pytest.approx(1))] * 2
    assert layers["lm_head"].layer_type == "readout"


LANGUAGE = {
    "vocab_size": 13, "num_hidden_layers": 2, "num_experts_per_tok": 2, "n_routed_experts": 4, "num_local_experts": 4,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "n_shared_experts": 1,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 4,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
}  # fmt: skip
IMAGES = {"image_size": 32, "num_labels": 5}


@pytest.mark.parametrize(
    ("kind", "options", "counts"),
    [
        ("DeepseekV2", LANGUAGE | LATENT, (5, 14, 2)),  # complex rotations; what a fixed rank gives is embedded
        ("GptOss", LANGUAGE | {"head_dim": 8, "num_hidden_layers": 1}, (1, 6, 2)),  # softmax of the largest logits
        ("RecurrentGemma", LANGUAGE | {"block_types": ("recurrent", "attention")}, (2, 13, 1)),  # biases of blocks
        ("Swinv2", IMAGES | {"depths": [1, 1], "window_size": 4, "patch_size": 2}, (3, 13, 1)),  # positions by an MLP
        ("ConvNextV2", IMAGES | {"depths": [1, 1, 1, 1]}, (5, 11, 1)),  # a norm over positions
    ],
)
def test_other_models_of_transformers(kind, options, counts):
    transformers = pytest.importorskip("transformers")
    is_text = "vocab_size" in options

    def make(n):
        if is_text:
            sizes = {"hidden_size": n, "intermediate_size": 2 * n, "moe_intermediate_size": n, "lru_width": n}
            sizes |= {"num_attention_heads": n // 8, "num_key_value_heads": n // 8}
        else:
            sizes = {"embed_dim": n, "num_heads": [n // 8, n // 4], "hidden_sizes": [n, n, 2 * n, 2 * n]}
        model = getattr(transformers, f"{kind}{'ForCausalLM' if is_text else 'ForImageClassification'}")
        return model(getattr(transformers, f"{kind}Config")(**options, **sizes))

    sample_input = {"input_ids": torch.tensor([[1, 2, 3]])} if is_text else torch.randn(1, 3, 32, 32)
    assert kinds_of(parametrize(make, (SMALL, LARGE), sample_input=sample_input)) == counts


def test_lora_on_a_frozen_llama():
    parametrization = copy.deepcopy(made("LoRA on a frozen Llama (PEFT)")[1])
    assert {name.split(".")[-2] for name in parametrization.layers} == {"lora_A", "lora_B"}
    for name, layer in parametrization.layers.items():
        assert (layer.layer_type, layer.a, layer.c) == (
            ("hidden", 0, pytest.approx(1)) if "lora_A" in name else ("embedding", 0, pytest.approx(0))
        )
    merged = parametrization.model
    x = {"input_ids": torch.tensor([[1, 2, 3]])}
    for name in parametrization.layers:
        nn.init.normal_(weight_of(parametrization, name), std=0.1)
    before = merged(**x).logits
    assert torch.allclose(merged.merge_and_unload()(**x).logits, before, atol=1e-5)


@pytest.mark.parametrize("name", families.CASES)
def test_every_weight_that_grows_has_a_rate(name):
    small, parametrization = made(name)
    held = [id(each) for group in parametrization.param_groups for each in group["params"]]
    assert sorted(held) == sorted(map(id, parametrization.model.parameters()))
    sizes = {key: each.shape for key, each in small.named_parameters()}
    layers = {id(weight_of(parametrization, name)) for name in parametrization.layers}
    tables = ("pos_embed", "position_embedding", "wpe", "cls_token", "class_token", "norm")  # added, or multiplied with
    for key, each in parametrization.model.named_parameters():
        grows = each.ndim > 1 and each.requires_grad and each.shape != sizes[key]
        if grows and not any(part in key for part in tables):
            assert id(each) in layers, key
