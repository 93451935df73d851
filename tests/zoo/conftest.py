"""The table of what was checked, printed at the end; docs/zoo.md is written where everything has passed."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from pathlib import Path

from tests.zoo._cases import CASES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "zoo.md"
COLUMNS = {
    "norms": ("grad",),
    "updates": ("monitor",),
    "activations": ("activation", "activation_difference", "gradient", "parameter", "parameter_difference"),
    "heads": ("attention_entropy",),
    "RCC": ("rcc",),
    "spectral": ("spectral",),
    "steps": ("step",),
    "alignment": ("alignment",),
    "absent": ("absent",),
}
ABOUT = """# Real models and train steps

`make zoo` trains {models} models of torchvision, timm and transformers with tiny configurations for four iterations,
with GradMonitor, WeightUpdateHandler, ActivationHandler, RCCHandler, SpectralNormHandler, StepStatsHandler and
AlignmentHandler on one engine, and once more without. It asserts that

- weights, buffers, gradients, optimizer state, losses and random state are the same to the last bit;
- every number that is published is what float64 arithmetic says of recorded tensors: {numbers:,} of them here;
- the entropy of each attention head is that of the probabilities of the model's eager implementation in float64.

Left out are clocks, memory, error bounds, the largest logits of attention, the statistics of what it is computed from,
and the monitors that are not named above. "absent" counts values of RCCHandler and AlignmentHandler that could be
computed and were not published. A model with attention and no heads in the table computes it by hand, or in a way that
can't be seen.

Train steps as others write them are checked likewise, with the norm and the largest update ratio of each iteration:

{steps}

With {versions}.

"""


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
