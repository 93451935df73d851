"""Tiny models of families that people train, at any width, with batches for them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ignite_monitor.scaling import parametrize

VOCABULARY, LENGTH, BATCH, CLASSES = 64, 8, 2, 10
HEAD = 8  # the dimension of a head, the same at all widths


class Case:
    """A model at any width, and batches for it.

    Args:
        make: makes the model at a width.
        inputs: makes keyword arguments for it, with the labels of a loss of its own if it has one.
        loss: of the model's output and the batch; None for ``output.loss``.
    """

    def __init__(
        self,
        make: Callable[[int], nn.Module],
        inputs: Callable[[], dict[str, Tensor]],
        loss: Callable[[Any, dict[str, Tensor]], Tensor] | None = None,
    ):
        self.make = make
        self.inputs = inputs
        self.loss = loss

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]):
        """One update."""
        optimizer.zero_grad()
        output = model(**{key: value for key, value in batch.items() if key != "target"})
        (output.loss if self.loss is None else self.loss(output, batch)).backward()
        optimizer.step()


def tokens():
    """Token ids that are not all alike, as both input and label."""
    ids = (torch.rand(BATCH, LENGTH).square() * VOCABULARY).long()
    return {"input_ids": ids, "labels": ids}


def pictures(size: int, key: str = "x"):
    """Pictures whose class can be seen."""

    def inputs():
        target = torch.randint(CLASSES, (BATCH,))
        mean = torch.linspace(-1, 1, CLASSES)[target].view(-1, 1, 1, 1)
        return {key: torch.randn(BATCH, 3, size, size) + mean, "target": target}

    return inputs


def cross_entropy(output: Any, batch: dict[str, Tensor]):
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.flatten(0, -2), batch["target"].flatten())


def transformer(kind: str, **more: Any):
    """A language model of transformers with two layers."""
    import transformers

    name, config = {
        "llama": ("Llama", {}),
        "gemma": ("Gemma", {}),
        "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    }[kind]

    def make(n: int):
        options = {
            "vocab_size": VOCABULARY,
            "hidden_size": n,
            "intermediate_size": 2 * n,
            "num_hidden_layers": 2,
            "num_attention_heads": n // HEAD,
            "num_key_value_heads": max(n // HEAD // 2, 1),
            "head_dim": HEAD,
            "pad_token_id": None,
        }
        options |= config | {key: value(n) if callable(value) else value for key, value in more.items()}
        return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**options))

    return Case(make, tokens)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return Case(
        lambda n: GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=n, n_layer=1, n_head=n // HEAD)
        ),
        tokens,
    )


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    return Case(
        lambda n: T5ForConditionalGeneration(
            T5Config(
                vocab_size=VOCABULARY,
                d_model=n,
                d_kv=HEAD,
                d_ff=2 * n,
                num_layers=1,
                num_heads=n // HEAD,
                decoder_start_token_id=0,
            )
        ),
        tokens,
    )


def bert():
    from transformers import BertConfig, BertForMaskedLM

    return Case(
        lambda n: BertForMaskedLM(
            BertConfig(
                vocab_size=VOCABULARY,
                hidden_size=n,
                num_hidden_layers=1,
                num_attention_heads=n // HEAD,
                intermediate_size=2 * n,
                max_position_embeddings=LENGTH,
            )
        ),
        tokens,
    )


def vit_transformers(**more: Any):
    from transformers import ViTConfig, ViTForImageClassification

    options = {"num_hidden_layers": 2, "image_size": 16, "patch_size": 4, "num_labels": CLASSES} | more
    return Case(
        lambda n: ViTForImageClassification(
            ViTConfig(hidden_size=n, num_attention_heads=n // HEAD, intermediate_size=2 * n, **options)
        ),
        pictures(16, "pixel_values"),
        cross_entropy,
    )


def vit_torchvision():
    from torchvision.models import VisionTransformer

    return Case(
        lambda n: VisionTransformer(16, 4, 2, n // HEAD, n, 2 * n, num_classes=CLASSES), pictures(16), cross_entropy
    )


def resnet_torchvision():
    """Bottlenecks, whose inner width grows; the stream between them is as torchvision makes it."""
    from torchvision.models.resnet import Bottleneck, ResNet

    return Case(
        lambda n: ResNet(Bottleneck, [1, 1, 1, 1], num_classes=CLASSES, width_per_group=n), pictures(16), cross_entropy
    )


def timm_model(kind: str, options: Callable[[int], dict[str, Any]], size: int):
    timm = importlib.import_module("timm.models")
    return Case(lambda n: getattr(timm, kind)(num_classes=CLASSES, **options(n)), pictures(size), cross_entropy)


def resnet_timm():
    from timm.models.resnet import BasicBlock

    return timm_model(
        "ResNet",
        lambda n: {
            "block": BasicBlock,
            "layers": [1, 1, 1, 1],
            "channels": [n, n, 2 * n, 2 * n],
            "stem_width": n // 2,
            "stem_type": "deep",
        },
        16,
    )


def mixer():
    return timm_model("MlpMixer", lambda n: {"img_size": 16, "patch_size": 4, "num_blocks": 2, "embed_dim": n}, 16)


def convnext():
    return timm_model("ConvNeXt", lambda n: {"depths": (1, 1, 1, 1), "dims": (n, n, 2 * n, 2 * n)}, 32)


class LSTMLanguageModel(nn.Module):
    """An embedding, two LSTM layers and a readout."""

    def __init__(self, n: int):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, n)
        self.lstm = nn.LSTM(n, n, num_layers=2, batch_first=True)
        self.head = nn.Linear(n, VOCABULARY)

    def forward(self, ids: Tensor):
        return self.head(self.lstm(self.embedding(ids))[0])


def lstm():
    def inputs():
        ids = tokens()["input_ids"]
        return {"ids": ids, "target": ids.roll(-1, 1)}

    return Case(LSTMLanguageModel, inputs, cross_entropy)


class Seq2Seq(nn.Module):
    """``nn.Transformer`` between embeddings and a readout."""

    def __init__(self, n: int):
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, n), nn.Embedding(VOCABULARY, n)
        self.transformer = nn.Transformer(n, n // HEAD, 1, 1, 2 * n, dropout=0.0, batch_first=True)
        self.head = nn.Linear(n, VOCABULARY)

    def forward(self, ids: Tensor):
        return self.head(self.transformer(self.source(ids), self.target(ids)))


def seq2seq():
    def inputs():
        ids = tokens()["input_ids"]
        return {"ids": ids, "target": ids.roll(-1, 1)}

    return Case(Seq2Seq, inputs, cross_entropy)


def lora():
    """On a frozen Llama that is parametrized itself, as if it had been trained at this width."""
    import peft

    base = transformer("llama")

    def make(n: int):
        torch.manual_seed(n)
        model = parametrize(base.make, (8, n), sample_input=probe(base)).model
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
        return peft.get_peft_model(model, config)

    return Case(make, tokens)


CASES: dict[str, Callable[[], Case]] = {
    "Llama, GQA (transformers)": lambda: transformer("llama", num_hidden_layers=1),
    "Llama, MQA (transformers)": lambda: transformer("llama", num_key_value_heads=1, num_hidden_layers=1),
    "GPT-2 (transformers)": gpt2,
    "T5 (transformers)": t5,
    "Gemma (transformers)": lambda: transformer("gemma", num_hidden_layers=1),
    "BERT (transformers)": bert,
    "Mixtral (transformers)": lambda: transformer("mixtral", num_hidden_layers=1),
    "ViT (transformers)": lambda: vit_transformers(num_hidden_layers=1),
    "ViT (torchvision)": vit_torchvision,
    "ResNet (timm)": resnet_timm,
    "ResNet, Bottleneck (torchvision)": resnet_torchvision,
    "MLP-Mixer (timm)": mixer,
    "ConvNeXt (timm)": convnext,
    "LSTM language model": lstm,
    "nn.Transformer": seq2seq,
    "LoRA on a frozen Llama (PEFT)": lora,
}


def probe(case: Case):
    """An input to trace with."""
    return {key: value for key, value in case.inputs().items() if key != "target"}
