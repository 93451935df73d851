"""The table of what was checked, printed at the end; docs/compatibility.md is written where everything has passed."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.compatibility._cases import CASES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
COLUMNS = {
    "norms": ("grad",),
    "losses": ("loss", "loss_record"),
    "updates": ("monitor",),
    "optimizer": ("optimizer",),
    "noise": ("noise_scale",),
    "activations": ("activation", "activation_difference", "gradient", "parameter", "parameter_difference"),
    "attention": ("attention_entropy", "attention_logit_max"),
    "RCC": ("rcc",),
    "spectral": ("spectral",),
    "alignment": ("alignment",),
    "curvature": ("curvature",),
    "others": ("step", "replicas", "rollback"),
    "absent": ("absent",),
}
ABOUT = """# Real models and train steps

`make compatibility` trains {models} models of torchvision, timm and transformers with tiny configurations for four
iterations of two micro-batches each, with every monitor of the package on one engine, and once more without. It
asserts that

- weights, buffers, gradients, optimizer state, losses and random state are the same to the last bit;
- every number that is published is what float64 arithmetic says of recorded tensors: {numbers:,} of them here;
- entropy and largest logit of each attention head are those of the products that the model's eager implementation takes
  its softmax of, in float64.

What is compared with what: Adam's moments with its recurrences; the noise scale with the product of the two
micro-batches' gradients, and its interval, to 10 %, with Student's distribution; the curvature, in one iteration, with
float64 products, to 2 %, and SciPy's eigenvalues, to their error and 1 %. On one process
ReplicaCheckHandler can only say that all agree; ranks have tests of their own. RollbackHandler takes snapshots and has
nothing to go back for. SpikeRecorder writes the spikes of the loss, of which the number of files is compared, as is
that of HistogramHandler's histograms of weights.

Left out are clocks, memory, error bounds, and what is named by size ("topk"). MaxPScheduler is not attached, since it
changes the training. "absent" counts values of RCCHandler, AlignmentHandler, GradientNoiseScaleHandler and
CurvatureHandler that could be computed and were not published: an interval wider than a factor of ten, an eigenvalue
with too large an error. A model with attention and none in the table computes it by hand, or in a way that can't be
seen; one without curvature has an operation that can't be differentiated twice.

Train steps as others write them are checked likewise, with the norm and the largest update ratio of each iteration:

{steps}

With {versions}.

"""


LIBRARIES: list[torch.library.Library] = []  # whose operators are there as long as they are


@pytest.fixture(autouse=True, scope="session")
def _importable():
    """torchvision, without its operators where it is built for another torch (timm, transformers need it to import)."""
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        pass
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise
        LIBRARIES.append(torch.library.Library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            LIBRARIES[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")


def pytest_terminal_summary(terminalreporter, exitstatus) -> None:
    reports = terminalreporter.getreports("passed")
    rows = [dict(report.user_properties)["zoo"] for report in reports if "zoo" in dict(report.user_properties)]
    steps = [dict(report.user_properties)["step"] for report in reports if "step" in dict(report.user_properties)]
    if not rows:
        return
    rows.sort(key=lambda row: list(CASES).index(row["name"]))
    table = [f"| model | {' | '.join(['parameters', *COLUMNS])} |", f"|---|{'---:|' * (len(COLUMNS) + 1)}"]
    total: Counter[str] = Counter()
    for row in rows:
        counts = {title: sum(row.get(family, 0) for family in families) for title, families in COLUMNS.items()}
        total.update(counts)
        table.append(f"| {row['name']} | {row['parameters']:,} | {' | '.join(f'{n:,}' for n in counts.values())} |")
    table.append(f"| all | | {' | '.join(f'{total[title]:,}' for title in COLUMNS)} |")
    text = "\n".join(table)
    terminalreporter.write_line(text)
    skipped = len(terminalreporter.getreports("skipped"))
    if exitstatus == 0 and len(rows) + skipped == len(CASES) and steps:
        names = ("torch", "torchvision", "timm", "transformers", "monai", "accelerate", "pytorch-ignite")
        versions = ", ".join(f"{name} {importlib.metadata.version(name).partition('+')[0]}" for name in names)
        numbers = sum(total.values()) - total["absent"]
        about = ABOUT.format(
            models=len(rows), numbers=numbers, steps="\n".join(f"- {each}" for each in sorted(steps)), versions=versions
        )
        PAGE.write_text(about + text + "\n", encoding="utf-8")
        terminalreporter.write_line(f"{PAGE.name} is written.")
