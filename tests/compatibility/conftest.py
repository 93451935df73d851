"""The table of what was checked, printed at the end; docs/compatibility.md is written where everything has passed."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import torch

from tests.compatibility._cases import CASES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
COLUMNS = ("parameters", "published", "compared", "heads")
ABOUT = """# Real models and train steps

`make compatibility` trains {models} models of torchvision, timm and transformers with tiny configurations for four
iterations of two micro-batches each, with every monitor of the package on one engine, and once more without. It
asserts that

- weights, buffers, gradients, optimizer state, losses and random state are the same to the last bit;
- every monitor publishes values;
- norms of gradients, updates and weights, the loss and the learning rate are what float64 arithmetic says of recorded
  tensors.

Every other number is compared with float64 arithmetic in the unit tests. On one process ReplicaCheckHandler can only
say that all agree; ranks have tests of their own. RollbackHandler takes snapshots and has no reason to roll back.
MaxPScheduler is not attached, since it changes the training. The table counts values over all four iterations, and
attention heads; a model with attention and no heads in the table computes it by hand, or in a way that can't be seen.

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
    rows = [dict(report.user_properties)["model"] for report in reports if "model" in dict(report.user_properties)]
    steps = [dict(report.user_properties)["step"] for report in reports if "step" in dict(report.user_properties)]
    if not rows:
        return
    rows.sort(key=lambda row: list(CASES).index(row["name"]))
    table = [f"| model | {' | '.join(COLUMNS)} |", f"|---|{'---:|' * len(COLUMNS)}"]
    table += [f"| {row['name']} | {' | '.join(f'{row[item]:,}' for item in COLUMNS)} |" for row in rows]
    text = "\n".join(table)
    terminalreporter.write_line(text)
    skipped = len(terminalreporter.getreports("skipped"))
    if exitstatus == 0 and len(rows) + skipped == len(CASES) and steps:
        names = ("torch", "torchvision", "timm", "transformers", "monai", "accelerate", "pytorch-ignite")
        versions = ", ".join(f"{name} {importlib.metadata.version(name).partition('+')[0]}" for name in names)
        about = ABOUT.format(
            models=len(rows), steps="\n".join(f"- {item}" for item in sorted(steps)), versions=versions
        )
        PAGE.write_text(about + text + "\n", encoding="utf-8")
        terminalreporter.write_line(f"{PAGE.name} is written.")
