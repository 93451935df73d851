"""Parametrizations of models that people train, of transformers, torchvision, timm and PEFT, at tiny sizes.

What the layers should be is written down from the models' definitions; every weight that grows has to be one of them.
"""

from __future__ import annotations

import copy
import functools
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ignite_monitor.scaling import TracingError, parametrize
from tests.scaling._models import weight_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import families

SMALL, LARGE = 16, 32
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of one of these packages about another


@functools.cache
def parametrized(name):
    case = families.CASES[name]()
    return case, parametrize(case.make, (SMALL, LARGE), sample_input=families.probe(case))


def made(name):
    try:
        case, parametrization = parametrized(name)
    except ImportError as error:
        pytest.skip(f"{error}")
    return case, copy.deepcopy(parametrization)


@pytest.mark.parametrize("name", families.CASES)
def test_every_weight_that_grows_has_a_rate_and_the_model_trains(name):
    case, parametrization = made(name)
    held = [id(each) for group in parametrization.param_groups for each in group["params"]]
    assert sorted(held) == sorted(map(id, parametrization.model.parameters()))
    sizes = {key: each.shape for key, each in case.make(SMALL).named_parameters()}
    layers = {id(weight_of(parametrization, name)) for name in parametrization.layers}
    tables = ("pos_embed", "position_embedding", "wpe", "cls_token", "class_token", "norm")  # added, or multiplied with
    for key, each in parametrization.model.named_parameters():
        if (
            each.ndim > 1
            and each.requires_grad
            and each.shape != sizes[key]
            and not any(part in key for part in tables)
        ):
            assert id(each) in layers, key
    before = [each.detach().clone() for each in parametrization.model.parameters()]
    optimizer = torch.optim.Adam(parametrization.param_groups)
    for _ in range(4):  # what starts at zero hands gradients back from the second step on
        case.step(parametrization.model, optimizer, case.inputs())
    after = list(parametrization.model.parameters())
    assert all(each.isfinite().all() for each in after)
    moved = [not torch.equal(one, other) for one, other in zip(before, after, strict=True)]
    trained = [each.requires_grad and each.grad is not None for each in after]
    assert sum(moved) >= 0.9 * sum(trained)


EXPONENTS = {"embedding": (-0.5, 0.5), "hidden": (0.0, 1.0), "readout": (0.5, 0.5)}


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("Llama, GQA (transformers)", (1, 14, 1)),
        ("GPT-2 (transformers)", (2, 8, 1)),  # positions are embedded, too
        ("T5 (transformers)", (4, 32, 1)),  # two for relative positions
        ("Gemma (transformers)", (1, 14, 1)),
        ("BERT (transformers)", (3, 13, 1)),
        ("ViT (transformers)", (1, 12, 1)),
        ("ConvNeXt (timm)", (5, 11, 1)),  # depthwise convolutions sum over nothing that grows
    ],
)
def test_kinds_and_exponents(name, counts):
    _, parametrization = made(name)
    layers = list(parametrization.layers.values())
    assert tuple(sum(each.layer_type == kind for each in layers) for kind in EXPONENTS) == counts
    for layer in layers:
        assert (layer.a, layer.c) == pytest.approx(EXPONENTS[layer.layer_type]), layer.name


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
    assert found.a == {"embedding": -0.5, "readout": 0.5}[found.layer_type]


def test_tied_t5_is_what_it_would_be_without_its_factor():
    """The logits of T5 are divided by the root of d_model once, whoever does it."""
    transformers = pytest.importorskip("transformers")

    def make(n, tied):
        config = transformers.T5Config(
            vocab_size=13, d_model=n, d_kv=4, d_ff=n, num_layers=1, num_heads=n // 4, decoder_start_token_id=0,
            tie_word_embeddings=tied,
        )  # fmt: skip
        config.scale_decoder_outputs = tied
        return transformers.T5ForConditionalGeneration(config)

    tokens = torch.tensor([[1, 2, 3]])
    probe = {"input_ids": tokens, "labels": tokens}
    one, other = (parametrize(lambda n: make(n, tied), (8, 32), sample_input=probe).model for tied in (False, True))  # noqa: B023
    other.load_state_dict(one.state_dict() | {"lm_head.weight": one.shared.weight})
    one.load_state_dict(other.state_dict())
    assert torch.allclose(one.eval()(**probe).logits, other.eval()(**probe).logits, rtol=1e-5)


def test_experts_stacked_in_one_parameter():
    _, parametrization = made("Mixtral (transformers)")
    experts = "model.layers.1.mlp.experts"
    up, down = (parametrization.layers[f"{experts}.{name}"] for name in ("gate_up_proj", "down_proj"))
    assert [(each.layer_type, each.fan_in, each.a, each.c) for each in (up, down)] == [
        ("hidden", LARGE, 0, pytest.approx(1)),
        ("hidden", 2 * LARGE, 0, pytest.approx(1)),
    ]
    assert weight_of(parametrization, up.name).std().item() == pytest.approx(LARGE**-0.5, rel=0.05)
    gate = parametrization.layers["model.layers.1.mlp.gate"]
    assert (gate.layer_type, gate.a + gate.b) == ("readout", 1)


@pytest.mark.parametrize("way", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen2Moe"])
def test_experts_however_they_are_computed(kind, way):
    transformers = pytest.importorskip("transformers")

    def make(n):
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=13, hidden_size=n, intermediate_size=2 * n, moe_intermediate_size=n, num_hidden_layers=1,
            shared_expert_intermediate_size=n, num_attention_heads=n // 8, num_key_value_heads=n // 8, head_dim=8,
            num_experts=4, num_local_experts=4, num_experts_per_tok=2, pad_token_id=None,
        )  # fmt: skip
        config._experts_implementation = way
        return getattr(transformers, f"{kind}ForCausalLM")(config)

    kinds, sample_input = None, {"input_ids": torch.tensor([[1, 2, 3, 4, 5]])}
    if way == "eager":  # a loop over the experts that were chosen
        with pytest.raises(TracingError, match=r"modeling_\w+\.py:\d+ in forward.*kinds="):
            parametrize(make, (16, 32), sample_input=sample_input)
        kinds = {"gate_up_proj": "hidden", "down_proj": "hidden", "gate": "readout", "shared_expert_gate": "readout"}
        kinds = {key: role for key, role in kinds.items() if key != "shared_expert_gate" or kind == "Qwen2Moe"}
    layers = parametrize(make, (16, 32), sample_input=sample_input, kinds=kinds).layers
    experts = {name: each for name, each in layers.items() if "experts." in name}
    assert [(each.layer_type, each.c) for each in experts.values()] == [("hidden", pytest.approx(1))] * 2
    assert layers["lm_head"].layer_type == "readout"


def test_multi_query_keys_and_values_start_at_zero():
    _, parametrization = made("Llama, MQA (transformers)")
    zero = {name for name, layer in parametrization.layers.items() if not layer.std}
    assert zero == {f"model.layers.{place}.self_attn.{name}_proj" for place in (0, 1) for name in "kv"}


def test_the_second_layer_of_a_mixers_token_mlp_starts_at_zero():
    _, parametrization = made("MLP-Mixer (timm)")
    zero = {name for name, layer in parametrization.layers.items() if not layer.std}
    assert zero == {"blocks.0.mlp_tokens.fc2", "blocks.1.mlp_tokens.fc2", "head"}  # the last one by timm


def test_bottlenecks_in_front_of_batch_norm():
    _, parametrization = made("ResNet, Bottleneck (torchvision)")
    layers = parametrization.layers
    assert {name.rpartition(".")[2]: layer.layer_type for name, layer in layers.items()} == {
        "conv1": "embedding",
        "conv2": "hidden",
        "conv3": "hidden",
    }
    assert {layer.c for layer in layers.values()} == {0.5, 1.0}


def test_lora_on_a_frozen_llama():
    _, parametrization = made("LoRA on a frozen Llama (PEFT)")
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


@pytest.mark.parametrize("name", ["Swin", "ResMLP", "gMLP"])
def test_other_models_of_timm(name):
    """Positions of a fixed number are mixed by weights that do not grow, and are no layers."""
    models = pytest.importorskip("timm.models")
    mixer = models.mlp_mixer

    def make(n):
        options = {"img_size": 16, "patch_size": 4, "embed_dim": n, "num_classes": 5}
        if name == "Swin":
            return models.SwinTransformer(**options, depths=(1, 1), num_heads=(n // 8, n // 4), window_size=2)
        blocks = {"ResMLP": (mixer.ResBlock, mixer.Mlp), "gMLP": (mixer.SpatialGatingBlock, mixer.GatedMlp)}
        block, mlp = blocks[name]
        return mixer.MlpMixer(**options, num_blocks=1, block_layer=block, mlp_layer=mlp, mlp_ratio=4)

    found = parametrize(make, (16, 32), sample_input=torch.randn(2, 3, 16, 16))
    kinds = {key: layer.layer_type for key, layer in found.layers.items()}
    assert kinds["patch_embed.proj" if name == "Swin" else "stem.proj"] == "embedding"
    assert kinds["head.fc" if name == "Swin" else "head"] == "readout"
    assert {"Swin": 11, "ResMLP": 4, "gMLP": 4}[name] == len(kinds)
    assert set(list(kinds.values())[1:-1]) == {"hidden"}


def test_mamba():
    transformers = pytest.importorskip("transformers")

    def make(n):
        return transformers.MambaForCausalLM(
            transformers.MambaConfig(
                vocab_size=13, hidden_size=n, state_size=4, num_hidden_layers=1, time_step_rank=n // 8, pad_token_id=0
            )
        )

    layers = parametrize(make, (16, 32), sample_input={"input_ids": torch.tensor([[1, 2, 3, 4, 5]])}).layers
    assert {name.rpartition(".")[2]: each.layer_type for name, each in layers.items()} == {
        "embeddings": "embedding",
        "in_proj": "hidden",
        "conv1d": "embedding",
        "x_proj": "hidden",
        "dt_proj": "hidden",
        "out_proj": "hidden",
        "lm_head": "readout",
    }


LANGUAGE = {
    "vocab_size": 13, "num_hidden_layers": 2, "num_experts_per_tok": 2, "n_routed_experts": 4, "num_local_experts": 4,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "n_shared_experts": 1,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 4,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "options", "counts"),
    [
        ("DeepseekV2", LATENT, (5, 14, 2)),  # complex rotations; what a fixed rank gives is embedded
        ("DeepseekV3", LATENT, (5, 14, 2)),
        ("GptOss", {"head_dim": 8}, (1, 12, 3)),  # the softmax of the largest logits alone
        ("RecurrentGemma", {"block_types": ("recurrent", "attention")}, (2, 13, 1)),  # blocks with biases of their own
    ],
)
def test_other_language_models_of_transformers(kind, options, counts, caplog):
    transformers = pytest.importorskip("transformers")

    def make(n):
        sizes = {"hidden_size": n, "intermediate_size": 2 * n, "moe_intermediate_size": n, "lru_width": n}
        heads = {"num_attention_heads": n // 8, "num_key_value_heads": n // 8}
        config = getattr(transformers, f"{kind}Config")(**LANGUAGE, **options, **sizes, **heads)
        return getattr(transformers, f"{kind}ForCausalLM")(config)

    layers = parametrize(make, (SMALL, LARGE), sample_input={"input_ids": torch.tensor([[1, 2, 3]])}).layers
    assert tuple(sum(each.layer_type == kind for each in layers.values()) for kind in EXPONENTS) == counts
    assert "not drawn at random" not in caplog.text


@pytest.mark.parametrize(
    ("kind", "options", "counts"),
    [
        ("Swinv2", {"depths": [1, 1], "window_size": 4, "patch_size": 2}, (3, 13, 1)),  # positions through an MLP
        ("ConvNextV2", {"depths": [1, 1, 1, 1]}, (5, 11, 1)),  # a norm over positions
    ],
)
def test_other_image_models_of_transformers(kind, options, counts):
    transformers = pytest.importorskip("transformers")

    def make(n):
        sizes = {"embed_dim": n, "num_heads": [n // 8, n // 4], "hidden_sizes": [n, n, 2 * n, 2 * n]}
        config = getattr(transformers, f"{kind}Config")(image_size=32, num_labels=5, **options, **sizes)
        return getattr(transformers, f"{kind}ForImageClassification")(config)

    layers = parametrize(make, (SMALL, LARGE), sample_input=torch.randn(1, 3, 32, 32)).layers
    assert tuple(sum(each.layer_type == kind for each in layers.values()) for kind in EXPONENTS) == counts


def test_a_factor_of_torchvisions_own_names_its_line():
    """Keys, one part of what a layer gives, are divided by the root of the width; another scale is the way out."""
    models = pytest.importorskip("torchvision.models")

    def make(n, scale=None):
        model = models.MaxVit((32, 32), n, 4, [n, n], [1, 1], 8, 0.0, num_classes=5)
        for module in model.modules():
            if scale and hasattr(module, "scale_factor"):
                module.scale_factor = scale
        return model

    x = torch.randn(1, 3, 32, 32)
    with pytest.raises(TracingError, match=r"to_qkv is used .* and maxvit\.py:\d+\).* or by what does not depend"):
        parametrize(make, (SMALL, LARGE), sample_input=x)
    found = parametrize(lambda n: make(n, 8**-0.5), (SMALL, LARGE), sample_input=x)
    assert sum(name.endswith("to_qkv") for name in found.layers) == 4
