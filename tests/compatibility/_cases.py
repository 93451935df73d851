"""Models of other packages at tiny sizes, one for each way to build a model, with a batch and a loss."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

CLASSES, VOCABULARY, LENGTH = 5, 40, 7


class Case(NamedTuple):
    """A model and what it is trained on.

    Attributes:
        library: the package it is of, which may be missing.
        make: makes the model.
        batch: makes the arguments of a call.
        loss: of the model's output.
    """

    library: str
    make: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Any]]
    loss: Callable[[Any], Tensor]

    @property
    def has_routers(self) -> bool:
        """Check whether the model is a mixture of experts with known routers."""
        return self in [CASES[f"transformers {name}"] for name in MIXTURES]


def squares(output: Any) -> Tensor:
    """A loss of any output: its own, or how far its numbers are from some that are all different."""
    if isinstance(output, dict):
        if output.get("loss") is not None:
            return output["loss"]
        output = next(item for item in output.values() if isinstance(item, Tensor))
    if isinstance(output, (tuple, list)):
        output = output[0]
    return (output - torch.linspace(-1, 1, output.shape[-1])).square().mean()


def pictures(size: int = 32, name: str = "", count: int = 4) -> Callable[[], dict[str, Any]]:
    return lambda: {name or "0": torch.randn(count, 3, size, size)}


CASES: dict[str, Case] = {}
MIXTURES = ("Mixtral", "Qwen3Moe", "Olmoe", "GptOss", "DeepseekV3")


def vision(name: str, make: Callable[[Any], nn.Module], size: int = 32, module: str = "torchvision.models") -> None:
    library = module.partition(".")[0]
    CASES[f"{library} {name}"] = Case(library, lambda: make(importlib.import_module(module)), pictures(size), squares)


def block(kind: str, *settings: Any, **options: Any) -> Callable[[Any], nn.Module]:
    """A model of a class that takes lists of settings of its own."""
    return lambda of: getattr(of, kind)(*settings, **options)


# torchvision

vision("DenseNet", block("DenseNet", growth_rate=4, block_config=(2, 2), num_init_features=8, num_classes=CLASSES))
vision("MobileNetV3", lambda of: of.MobileNetV3(
    [of.mobilenetv3.InvertedResidualConfig(8, 3, 16, 8, True, "RE", 2, 1, 1),
     of.mobilenetv3.InvertedResidualConfig(8, 3, 24, 12, False, "HS", 1, 1, 1)],
    last_channel=16, num_classes=CLASSES))  # fmt: skip
vision("ShuffleNetV2", block("ShuffleNetV2", [2, 2, 2], [8, 8, 16, 16, 16], num_classes=CLASSES))
vision("ConvNeXt", lambda of: of.ConvNeXt(
    [of.convnext.CNBlockConfig(8, 16, 1), of.convnext.CNBlockConfig(16, None, 1)], num_classes=CLASSES,
    stochastic_depth_prob=0.1))  # fmt: skip
vision("VisionTransformer", block("VisionTransformer", 16, 4, 2, 4, 16, 32, num_classes=CLASSES), 16)
vision("SwinTransformer V2", lambda of: of.SwinTransformer(
    [2, 2], 8, [2, 2], [2, 4], [4, 4], num_classes=CLASSES, block=of.swin_transformer.SwinTransformerBlockV2,
    downsample_layer=of.swin_transformer.PatchMergingV2))  # fmt: skip
vision("MaxVit", block("MaxVit", (32, 32), 8, 4, [8, 16], [1, 1], 4, 0.1, num_classes=CLASSES))

# timm


def of_timm(name: str, size: int = 32, **options: Any) -> None:
    vision(name, lambda of: of.create_model(name, num_classes=CLASSES, **options), size, module="timm")


_VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 4}
of_timm("seresnext26d_32x4d", channels=(8, 8, 8, 8), layers=(1, 1, 1, 1), base_width=16, cardinality=2, stem_width=8)
of_timm("vit_tiny_patch16_224", 16, **_VIT)
of_timm("beit_base_patch16_224", 16, **_VIT)
of_timm("xcit_nano_12_p16_224", 16, **(_VIT | {"patch_size": 8}))
_MIXER = {"img_size": 16, "patch_size": 4, "num_blocks": 2, "embed_dim": 16, "num_classes": CLASSES}
_NEXT = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16), "num_classes": CLASSES}
for title, size, make in (
    ("gMLP", 16, lambda of: of.mlp_mixer.MlpMixer(
        **_MIXER, block_layer=of.mlp_mixer.SpatialGatingBlock, mlp_layer=of.mlp_mixer.GatedMlp, mlp_ratio=4
    )),
    ("ConvNeXt V2", 32, lambda of: of.convnext.ConvNeXt(**_NEXT, use_grn=True, ls_init_value=None)),
    ("PoolFormer", 32, lambda of: of.metaformer.MetaFormer(
        depths=(1, 1), dims=(8, 16), token_mixers=of.metaformer.Pooling, num_classes=CLASSES
    )),
):  # fmt: skip
    vision(title, make, size, module="timm.models")

# transformers

_TEXT = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 24, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2}  # fmt: skip
_GROUPED = _TEXT | {"num_key_value_heads": 2}
_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_IMAGE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
          "image_size": 16, "patch_size": 4, "num_labels": CLASSES}  # fmt: skip


def hugging(name: str, head: str, config: dict[str, Any], batch: Callable[[], dict[str, Any]], kind: str = "") -> None:
    def make() -> nn.Module:
        transformers = importlib.import_module("transformers")
        settings = getattr(transformers, f"{kind or name}Config")(**config)
        return getattr(transformers, f"{name}{head}")(settings)

    CASES[f"transformers {name}"] = Case("transformers", make, batch, squares)


def words() -> dict[str, Any]:
    ids = torch.randint(3, VOCABULARY, (3, LENGTH))
    return {"input_ids": ids, "labels": ids}


def padded() -> dict[str, Any]:
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    mask[0, 5:] = 0
    return words() | {"attention_mask": mask}


_MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "conv_kernel": 3}
_LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
_GROUPS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_QUIET_GPT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
for kind, config in {
    "Llama": _GROUPED,
    "Gemma": _GROUPED | {"head_dim": 4},
    "Mixtral": _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "GPT2": {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4, **_QUIET_GPT},
    "Bloom": {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.1},
    "Mamba": _MAMBA,
    "Mamba2": _MAMBA | {"num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 4, "pad_token_id": 0},
    "Qwen3Moe": _GROUPED | {"head_dim": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "Olmoe": _GROUPED | {"num_experts": 4, "num_experts_per_tok": 2},
    "GptOss": _GROUPED | {"head_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": _TEXT | _LATENT | _GROUPS | {"num_key_value_heads": 4, "moe_intermediate_size": 8},
}.items():
    hugging(kind, "LMHeadModel" if kind == "GPT2" else "ForCausalLM", {**config, "use_cache": False}, words)
for kind in ("Bert", "Albert"):
    hugging(kind, "ForMaskedLM", _TEXT | _STILL | {"embedding_size": 16, "type_vocab_size": 2}, padded)
hugging("DebertaV2", "ForMaskedLM", _TEXT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, padded)
hugging("T5", "ForConditionalGeneration", {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 4, "d_ff": 24,
        "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0, "dropout_rate": 0.0, "use_cache": False},
        words)  # fmt: skip
hugging("SwitchTransformers", "ForConditionalGeneration", {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 4,
        "d_ff": 24, "num_layers": 2, "num_sparse_encoder_layers": 1, "num_decoder_layers": 2,
        "num_sparse_decoder_layers": 1, "num_heads": 4, "num_experts": 4, "expert_capacity": 3, "dropout_rate": 0.0,
        "decoder_start_token_id": 0, "pad_token_id": 0, "use_cache": False}, words)  # fmt: skip


def detr() -> nn.Module:
    of = importlib.import_module("transformers")
    backbone = of.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    layers = {f"{part}_{name}": size for part in ("encoder", "decoder")
              for name, size in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 24))}  # fmt: skip
    layers |= {"d_model": 16, "num_queries": 4, "num_labels": 3, "dropout": 0.0}
    return of.DetrForObjectDetection(of.DetrConfig(use_timm_backbone=False, backbone_config=backbone, **layers))


CASES["transformers Detr"] = Case(
    "transformers",
    detr,
    pictures(32, "pixel_values"),
    lambda output: squares(output.logits) + squares(output.pred_boxes),
)
hugging("Dinov2", "ForImageClassification", _IMAGE | _STILL, pictures(16, "pixel_values"))
_SPEECH = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
           "intermediate_size": 24, "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3),
           "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0,
           "feat_extract_norm": "layer", "mask_time_prob": 0.0}  # fmt: skip
hugging("Wav2Vec2", "ForCTC", _SPEECH, lambda: {
    "input_values": torch.randn(2, 400), "labels": torch.randint(3, VOCABULARY, (2, LENGTH))})  # fmt: skip

# diffusers

_BLOCKS = {"block_out_channels": (8, 16), "norm_num_groups": 4, "sample_size": 8}


def diffusing(name: str, config: dict[str, Any], batch: Callable[[], dict[str, Any]]) -> None:
    def make() -> nn.Module:
        return getattr(importlib.import_module("diffusers"), name)(**_BLOCKS, **config)

    CASES[f"diffusers {name}"] = Case("diffusers", make, batch, squares)


diffusing(
    "UNet2DModel",
    {"layers_per_block": 1, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "attention_head_dim": 4,
     "up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
    lambda: {"sample": torch.randn(2, 3, 8, 8), "timestep": torch.tensor([1, 5])},
)  # fmt: skip
diffusing(
    "AutoencoderKL",
    {"latent_channels": 2, "down_block_types": ("DownEncoderBlock2D",) * 2,
     "up_block_types": ("UpDecoderBlock2D",) * 2},
    pictures(8, "sample", 2),
)  # fmt: skip

# peft: a Llama of two layers, of which the adapters alone are trained


def adapted(name: str, title: str = "", **options: Any) -> None:
    def make() -> nn.Module:
        peft, config = importlib.import_module("peft"), {"task_type": "CAUSAL_LM", **options}
        return peft.get_peft_model(CASES["transformers Llama"].make(), getattr(peft, f"{name}Config")(**config))

    CASES[f"peft {title or name}"] = Case("peft", make, CASES["transformers Llama"].batch, squares)


_TARGETS = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
adapted("Lora", r=2, lora_dropout=0.1, **_TARGETS)
adapted("Lora", "DoRA", r=2, use_dora=True, **_TARGETS)
adapted("OFT", oft_block_size=4, target_modules=["q_proj"])
adapted("FourierFT", n_frequency=20, **_TARGETS)
adapted("IA3", feedforward_modules=["down_proj"], **_TARGETS)
adapted("PrefixTuning", num_virtual_tokens=3)

# torch_geometric: convolutions on a random graph of 12 nodes


def convolving(name: str, **options: Any) -> None:
    def make() -> nn.Module:
        return getattr(importlib.import_module("torch_geometric.nn"), name)(6, 8, 2, CLASSES, **options)

    def graph() -> dict[str, Any]:
        return {"0": torch.randn(12, 6), "1": torch.randint(0, 12, (2, 40))}

    CASES[f"torch_geometric {name}"] = Case("torch_geometric", make, graph, squares)


convolving("GIN", norm="layer_norm")
convolving("GAT", heads=2, v2=True)
convolving("PNA", aggregators=["mean", "max"], scalers=["identity", "amplification"], deg=torch.tensor([0, 1, 3, 5, 3]))
