"""Adapters of peft, models of torch_geometric, and more of transformers at tiny sizes."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.compatibility._cases import CASES, CLASSES, LENGTH, VOCABULARY, Case, pictures, squares

MORE: dict[str, Case] = {}

# peft: a Llama of two layers, of which the adapters alone are trained


def llama() -> nn.Module:
    config = CASES["transformers Llama"]
    return config.make()


def adapted(name: str, **options: Any) -> None:
    def make() -> nn.Module:
        peft = importlib.import_module("peft")
        return peft.get_peft_model(llama(), getattr(peft, f"{name}Config")(task_type="CAUSAL_LM", **options))

    title = "DoRA" if options.get("use_dora") else name
    MORE[f"peft {title}"] = Case("peft", make, CASES["transformers Llama"].batch, squares)


_TARGETS = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
adapted("Lora", r=2, lora_dropout=0.1, **_TARGETS)
adapted("Lora", r=2, use_dora=True, **_TARGETS)
adapted("AdaLora", init_r=4, target_r=2, total_step=100, **_TARGETS)
adapted("LoHa", r=2, **_TARGETS)
adapted("LoKr", r=2, **_TARGETS)
adapted("OFT", oft_block_size=4, target_modules=["q_proj"])
adapted("BOFT", boft_block_size=4, target_modules=["q_proj"])
adapted("FourierFT", n_frequency=20, **_TARGETS)
adapted("IA3", feedforward_modules=["down_proj"], **_TARGETS)
adapted("PromptTuning", num_virtual_tokens=3)
adapted("PrefixTuning", num_virtual_tokens=3)
adapted("PromptEncoder", num_virtual_tokens=3, encoder_hidden_size=8)

# torch_geometric: convolutions on a random graph of 12 nodes


def graph() -> dict[str, Any]:
    return {"0": torch.randn(12, 6), "1": torch.randint(0, 12, (2, 40))}


def convolving(name: str, **options: Any) -> None:
    def make() -> nn.Module:
        return getattr(importlib.import_module("torch_geometric.nn"), name)(6, 8, 2, CLASSES, **options)

    MORE[f"torch_geometric {name}"] = Case("torch_geometric", make, graph, squares)


convolving("GCN", dropout=0.1)
convolving("GraphSAGE", norm="batch_norm")
convolving("GIN", norm="layer_norm")
convolving("GAT", heads=2, v2=True)
convolving("EdgeCNN", jk="cat")
convolving("PNA", aggregators=["mean", "max"], scalers=["identity", "amplification"], deg=torch.tensor([0, 1, 3, 5, 3]))

# transformers


def hugging(name: str, head: str, batch: Callable[[], dict[str, Any]], config: dict[str, Any]) -> None:
    def make() -> nn.Module:
        of = importlib.import_module("transformers")
        return getattr(of, f"{name}{head}")(getattr(of, f"{name}Config")(**config))

    MORE[f"transformers {name}"] = Case("transformers", make, batch, squares)


words = CASES["transformers Llama"].batch
padded = CASES["transformers Bert"].batch
_TEXT = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 24, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2}  # fmt: skip
_CAUSAL = _TEXT | {"num_key_value_heads": 2, "use_cache": False}
_STILL = _TEXT | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "type_vocab_size": 2}
_IMAGE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
          "image_size": 16, "patch_size": 4, "num_labels": CLASSES}  # fmt: skip

causal = functools.partial(hugging, head="ForCausalLM", batch=words)
causal("Gemma2", config=_CAUSAL | {"head_dim": 4, "query_pre_attn_scalar": 4, "sliding_window": 4})
causal("Cohere", config=_CAUSAL)
causal("Granite", config=_CAUSAL)
causal("Starcoder2", config=_CAUSAL)
causal("Olmo", config=_CAUSAL)
causal("Nemotron", config=_CAUSAL)
causal("Glm", config=_CAUSAL | {"head_dim": 4})
causal("SmolLM3", config=_CAUSAL)
causal("Falcon", config=_TEXT | {"use_cache": False, "new_decoder_architecture": True, "num_kv_heads": 2})
causal("GPTNeo", config={"vocab_size": VOCABULARY, "hidden_size": 16, "num_layers": 2, "num_heads": 4,
       "attention_types": [[["global", "local"], 1]], "window_size": 4, "max_position_embeddings": 16,
       "intermediate_size": 24, "use_cache": False})  # fmt: skip
causal("GPTJ", config={"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4,
       "rotary_dim": 4, "use_cache": False})  # fmt: skip
masked = functools.partial(hugging, head="ForMaskedLM", batch=padded)
masked("MPNet", config=_STILL)
masked("RoFormer", config=_STILL | {"embedding_size": 16})
masked("ConvBert", config=_STILL | {"embedding_size": 16, "head_ratio": 2, "conv_kernel_size": 3})
masked("ModernBert", config=_TEXT | {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 4})
_SPEECH = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
           "intermediate_size": 24, "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3),
           "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0,
           "feat_extract_norm": "layer", "mask_time_prob": 0.0}  # fmt: skip


def speech() -> dict[str, Any]:
    return {"input_values": torch.randn(2, 400), "labels": torch.randint(3, VOCABULARY, (2, LENGTH))}


hugging("Wav2Vec2", "ForCTC", speech, _SPEECH)
hugging("Hubert", "ForCTC", speech, _SPEECH)
for kind in ("DeiT", "ViTMSN", "IJepa"):
    hugging(kind, "ForImageClassification", pictures(16, "pixel_values"), _IMAGE)
hugging("Segformer", "ForImageClassification", pictures(32, "pixel_values"), {
        "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16],
        "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
        "num_labels": CLASSES, "drop_path_rate": 0.0})  # fmt: skip
hugging("ConvNextV2", "ForImageClassification", pictures(32, "pixel_values"), {
        "num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": CLASSES})  # fmt: skip

EVERY_CASE = CASES | MORE
