"""Tiny models of families that people train, at any width, with inputs for them."""

from __future__ import annotations

import importlib

import torch
from torch import nn

VOCABULARY, LENGTH, CLASSES = 64, 4, 10
HEAD = 8  # the dimension of a head, the same at all widths


IDS = torch.arange(LENGTH)[None]
TOKENS = {"input_ids": IDS, "labels": IDS}


def picture(size):
    return torch.linspace(-1, 1, 3 * size * size).reshape(1, 3, size, size)


def of_transformers(name, options, inputs=TOKENS):
    """A model of transformers, of the options that its configuration has for a width."""
    kind, _, purpose = name.partition(" ")

    def make(n):
        transformers = importlib.import_module("transformers")
        return getattr(transformers, kind + purpose)(getattr(transformers, f"{kind}Config")(**options(n)))

    return make, inputs


def language(name, sharing=2, **more):
    """A causal language model, in which so many heads share keys and values."""
    options = {"vocab_size": VOCABULARY, "num_hidden_layers": 1, "head_dim": HEAD}
    options |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))

    def sized(n):
        heads = {"num_attention_heads": n // HEAD, "num_key_value_heads": n // HEAD // sharing}
        sizes = {"hidden_size": n, "intermediate_size": 2 * n, "moe_intermediate_size": n}
        return options | heads | sizes | more

    return of_transformers(f"{name} ForCausalLM", sized)


def deepseek():
    ranks = {"kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    return language("DeepseekV2", 1, **ranks, **experts, head_dim=4, first_k_dense_replace=0, topk_method="greedy")


def stages(name, options, size=32):
    """A model for images in two stages, of which the second one is twice as wide."""
    options = options | {"image_size": size, "num_labels": CLASSES, "depths": [1, 1]}
    return of_transformers(f"{name} ForImageClassification", lambda n: options | {
        "embed_dim": n, "num_heads": [n // HEAD, 2 * n // HEAD], "hidden_sizes": [n, 2 * n], "num_stages": 2,
    }, picture(size))  # fmt: skip


def gpt2():
    options = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_layer": 1}
    return of_transformers("GPT2 LMHeadModel", lambda n: options | {"n_embd": n, "n_head": n // HEAD})


def t5():
    options = {"vocab_size": VOCABULARY, "d_kv": HEAD, "num_layers": 1, "decoder_start_token_id": 0}
    sizes = {"d_model": 1, "d_ff": 2, "num_heads": 1 / HEAD}
    return of_transformers(
        "T5 ForConditionalGeneration", lambda n: options | {key: int(n * times) for key, times in sizes.items()}
    )


def resnet_torchvision():
    """Bottlenecks, whose inner width grows; the stream between them is as torchvision makes it."""
    resnet = importlib.import_module("torchvision.models.resnet")

    def make(n):
        return resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1], num_classes=CLASSES, width_per_group=n)

    return make, picture(16)


class LSTMLanguageModel(nn.Module):
    """An embedding, two LSTM layers and a readout."""

    def __init__(self, n):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, n)
        self.lstm = nn.LSTM(n, n, num_layers=2, batch_first=True)
        self.head = nn.Linear(n, VOCABULARY)

    def forward(self, ids):
        return self.head(self.lstm(self.embedding(ids))[0])


class Seq2Seq(nn.Module):
    """``nn.Transformer`` between embeddings and a readout."""

    def __init__(self, n):
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, n), nn.Embedding(VOCABULARY, n)
        self.transformer = nn.Transformer(n, n // HEAD, 1, 1, 2 * n, dropout=0.0, batch_first=True)
        self.head = nn.Linear(n, VOCABULARY)

    def forward(self, ids):
        return self.head(self.transformer(self.source(ids), self.target(ids)))


def lora():
    peft, (base, inputs) = importlib.import_module("peft"), language("Llama")

    def make(n):
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
        return peft.get_peft_model(base(n), config)

    return make, inputs


CASES = {  # name -> function that returns a function of the width, and an input
    "Llama, GQA (transformers)": lambda: language("Llama"),
    "GPT-2 (transformers)": gpt2,
    "T5 (transformers)": t5,
    "Gemma (transformers)": lambda: language("Gemma"),
    "Mixtral (transformers)": lambda: language("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "DeepSeek (transformers)": deepseek,
    "GPT-OSS (transformers)": lambda: language("GptOss", num_local_experts=4, num_experts_per_tok=2),
    "Swin (transformers)": lambda: stages("Swinv2", {"window_size": 4, "patch_size": 2}),
    "ConvNeXt (transformers)": lambda: stages("ConvNextV2", {}),
    "ResNet, Bottleneck (torchvision)": resnet_torchvision,
    "LSTM language model": lambda: (LSTMLanguageModel, IDS),
    "nn.Transformer": lambda: (Seq2Seq, IDS),
    "LoRA on a frozen Llama (PEFT)": lora,
}
