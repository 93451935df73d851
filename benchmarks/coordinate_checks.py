"""Coordinate checks of models that people train, each parametrized as it is.

Prints a table: of every quantity the layer whose slope is furthest from 0, and how many layers are beyond what is flat.
Models of torchvision, timm and PEFT are left out, with a word, where these are not installed.

    PYTHONPATH=. python benchmarks/coordinate_checks.py [--only NAME,NAME] [--widths 32,64,128,256] [--details]
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ignite_monitor.scaling import CoordinateCheck, coordinate_check, parametrize

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
    ) -> None:
        self.make = make
        self.inputs = inputs
        self.loss = loss

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> None:
        """One update."""
        optimizer.zero_grad()
        output = model(**{key: value for key, value in batch.items() if key != "target"})
        (output.loss if self.loss is None else self.loss(output, batch)).backward()
        optimizer.step()


def tokens() -> dict[str, Tensor]:
    """Token ids that are not all alike, as both input and label."""
    ids = (torch.rand(BATCH, LENGTH).square() * VOCABULARY).long()
    return {"input_ids": ids, "labels": ids}


def pictures(size: int, key: str = "x") -> Callable[[], dict[str, Tensor]]:
    """Pictures whose class can be seen."""

    def inputs() -> dict[str, Tensor]:
        target = torch.randint(CLASSES, (BATCH,))
        mean = torch.linspace(-1, 1, CLASSES)[target].view(-1, 1, 1, 1)
        return {key: torch.randn(BATCH, 3, size, size) + mean, "target": target}

    return inputs


def cross_entropy(output: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.flatten(0, -2), batch["target"].flatten())


def transformer(kind: str, **more: Any) -> Case:
    """A language model of transformers with two layers."""
    import transformers

    name, config = {
        "llama": ("Llama", {}),
        "gemma": ("Gemma", {}),
        "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    }[kind]

    def make(n: int) -> nn.Module:
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


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    return Case(
        lambda n: GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=n, n_layer=2, n_head=n // HEAD)
        ),
        tokens,
    )


def t5() -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    return Case(
        lambda n: T5ForConditionalGeneration(
            T5Config(
                vocab_size=VOCABULARY,
                d_model=n,
                d_kv=HEAD,
                d_ff=2 * n,
                num_layers=2,
                num_heads=n // HEAD,
                decoder_start_token_id=0,
            )
        ),
        tokens,
    )


def bert() -> Case:
    from transformers import BertConfig, BertForMaskedLM

    return Case(
        lambda n: BertForMaskedLM(
            BertConfig(
                vocab_size=VOCABULARY,
                hidden_size=n,
                num_hidden_layers=2,
                num_attention_heads=n // HEAD,
                intermediate_size=2 * n,
                max_position_embeddings=LENGTH,
            )
        ),
        tokens,
    )


def vit_transformers(**more: Any) -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    options = {"num_hidden_layers": 2, "image_size": 16, "patch_size": 4, "num_labels": CLASSES} | more
    return Case(
        lambda n: ViTForImageClassification(
            ViTConfig(hidden_size=n, num_attention_heads=n // HEAD, intermediate_size=2 * n, **options)
        ),
        pictures(16, "pixel_values"),
        cross_entropy,
    )


def vit_torchvision() -> Case:
    from torchvision.models import VisionTransformer

    return Case(
        lambda n: VisionTransformer(16, 4, 2, n // HEAD, n, 2 * n, num_classes=CLASSES), pictures(16), cross_entropy
    )


def resnet_torchvision() -> Case:
    """Bottlenecks, whose inner width grows; the stream between them is as torchvision makes it."""
    from torchvision.models.resnet import Bottleneck, ResNet

    return Case(
        lambda n: ResNet(Bottleneck, [1, 1, 1, 1], num_classes=CLASSES, width_per_group=n), pictures(16), cross_entropy
    )


def timm_model(kind: str, options: Callable[[int], dict[str, Any]], size: int) -> Case:
    timm = importlib.import_module("timm.models")
    return Case(lambda n: getattr(timm, kind)(num_classes=CLASSES, **options(n)), pictures(size), cross_entropy)


def resnet_timm() -> Case:
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


def mixer() -> Case:
    return timm_model("MlpMixer", lambda n: {"img_size": 16, "patch_size": 4, "num_blocks": 2, "embed_dim": n}, 16)


def convnext() -> Case:
    return timm_model("ConvNeXt", lambda n: {"depths": (1, 1, 1, 1), "dims": (n, n, 2 * n, 2 * n)}, 32)


class LSTMLanguageModel(nn.Module):
    """An embedding, two LSTM layers and a readout."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, n)
        self.lstm = nn.LSTM(n, n, num_layers=2, batch_first=True)
        self.head = nn.Linear(n, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(ids))[0])


def lstm() -> Case:
    def inputs() -> dict[str, Tensor]:
        ids = tokens()["input_ids"]
        return {"ids": ids, "target": ids.roll(-1, 1)}

    return Case(LSTMLanguageModel, inputs, cross_entropy)


class Seq2Seq(nn.Module):
    """``nn.Transformer`` between embeddings and a readout."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, n), nn.Embedding(VOCABULARY, n)
        self.transformer = nn.Transformer(n, n // HEAD, 2, 2, 2 * n, dropout=0.0, batch_first=True)
        self.head = nn.Linear(n, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.transformer(self.source(ids), self.target(ids)))


def seq2seq() -> Case:
    def inputs() -> dict[str, Tensor]:
        ids = tokens()["input_ids"]
        return {"ids": ids, "target": ids.roll(-1, 1)}

    return Case(Seq2Seq, inputs, cross_entropy)


def lora() -> Case:
    """On a frozen Llama that is parametrized itself, as if it had been trained at this width."""
    import peft

    base = transformer("llama")

    def make(n: int) -> nn.Module:
        torch.manual_seed(n)
        model = parametrize(base.make, (8, n), sample_input=probe(base)).model
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
        return peft.get_peft_model(model, config)

    return Case(make, tokens)


CASES: dict[str, Callable[[], Case]] = {
    "Llama, GQA (transformers)": lambda: transformer("llama"),
    "Llama, MQA (transformers)": lambda: transformer("llama", num_key_value_heads=1),
    "GPT-2 (transformers)": gpt2,
    "T5 (transformers)": t5,
    "Gemma (transformers)": lambda: transformer("gemma"),
    "BERT (transformers)": bert,
    "Mixtral (transformers)": lambda: transformer("mixtral"),
    "ViT (transformers)": vit_transformers,
    "ViT (torchvision)": vit_torchvision,
    "ResNet (timm)": resnet_timm,
    "ResNet, Bottleneck (torchvision)": resnet_torchvision,
    "MLP-Mixer (timm)": mixer,
    "ConvNeXt (timm)": convnext,
    "LSTM language model": lstm,
    "nn.Transformer": seq2seq,
    "LoRA on a frozen Llama (PEFT)": lora,
}


def probe(case: Case) -> dict[str, Tensor]:
    """An input to trace with."""
    return {key: value for key, value in case.inputs().items() if key != "target"}


def check(case: Case, widths: list[int], steps: int, seeds: int, lr: float, base: int) -> CoordinateCheck:
    """The coordinate check of a case, with Adam."""

    # One batch, and few positions: with more positions than n, sums over n are not yet what they are in the limit.
    with torch.random.fork_rng():
        torch.manual_seed(0)
        batch = case.inputs()

    def make_model(n: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        made = parametrize(case.make, (base, n), sample_input=probe(case), lr_prefactor=lr)
        return made.model, torch.optim.Adam(made.param_groups)

    return coordinate_check(make_model, lambda n: dict(batch), widths, train_step=case.step, steps=steps, seeds=seeds)


def row(name: str, result: CoordinateCheck, seconds: float) -> str:
    slopes = result.slopes_at()
    cells = []
    for quantity in result.quantities:
        found = [slope for (_, each), slope in slopes.items() if each == quantity]
        worst = max((each for each in found if not each.is_explained), key=lambda each: abs(each.slope))
        cells.append(f"{worst.slope:+.2f} ({worst.layer})")
    steep = sum(slope.is_steep for slope in slopes.values())
    kinds = ("is_start", "is_unaligned", "is_drift")
    explained = [str(sum(getattr(slope, each) for slope in slopes.values())) for each in kinds]
    return f"| {name} | {len(result.layers)} | {' | '.join([*cells, *explained])} | {steep} | {seconds:.0f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description="Coordinate checks of models that people train.")
    parser.add_argument("--only", default="")
    parser.add_argument("--widths", default="32,64,128,256")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--details", action="store_true", help="every layer's slopes, and the summary")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("ignite_monitor").setLevel(logging.ERROR)
    widths = [int(each) for each in args.widths.split(",")]
    print(
        "| model | layers | output | change | by its weights | by its input | starts | alpha < 1 | drifts | steep | s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name, make in CASES.items():
        if args.only and not any(each.lower() in name.lower() for each in args.only.split(",")):
            continue
        started = time.perf_counter()
        try:
            case = make()
        except ImportError as error:
            print(f"{name}: left out, {error}", file=sys.stderr)
            continue
        result = check(case, widths, args.steps, args.seeds, args.lr, base=widths[0] // 2)
        print(row(name, result, time.perf_counter() - started), flush=True)
        if args.details:
            print(result.table(), result.summary(), sep="\n\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
