"""Print a table of the models; write docs/compatibility.md if everything has passed."""

from __future__ import annotations

import datetime
import importlib.metadata
from pathlib import Path

from tests.compatibility._cases import CASES, MIXTURES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
COLUMNS = ("parameters", "published", "compared", "heads")
ABOUT = """# Real models and train steps

`make compatibility` trains {models} models of torchvision, timm, transformers, diffusers, peft and
torch_geometric with tiny configurations, for four iterations of two micro-batches each. Each is trained with the
monitors of this table on one engine, and once more without.
Weights, buffers, gradients, optimizer state, losses and RNG state are bitwise the same on all models.

| monitor | also asserted on all models |
|---|---|
| GradMonitor | gradient norm equals float64 arithmetic; no spike; an optimizer step in every iteration |
| SpikeMonitor, SpikeRecorder | the loss is reported |
| DriftMonitor | no drift |
| SetupCheck | no findings |
| HealthyCheckpoint | the last checkpoint has the final weights and optimizer state |
| RollbackHandler | takes snapshots and does not roll back |
| ReplayCheckHandler | `replay/reproducible` is 1 in every iteration |
| ReplicaCheckHandler | `replicas/in_sync` is 1, on one process |
| WeightUpdateHandler | norms and ratios of all updates equal float64 arithmetic |
| GradientNoiseScaleHandler | batch size |
| StepStatsHandler | weight norm equals float64 arithmetic; learning rate |
| RoutingHandler | load equals the number of tokens that each expert is called with, on {mixtures} mixtures of experts |
| OptimizerStateHandler, ActivationHandler, RCCHandler, SpectralNormHandler, HistogramHandler | values are published |
| CurvatureHandler, AlignmentHandler | training is unchanged |

All other numbers are compared with float64 arithmetic in the unit tests, which also test several processes.
MaxPScheduler is not attached, since it changes the training; RCCHandler and AlignmentHandler are not attached to models
of torch_geometric, whose linear layers are not torch's.

Train steps of other packages are tested in the same way, with attach_monitors. Gradient norm
and largest update ratio of every optimizer step equal float64 arithmetic, and SetupCheck has no findings:

{steps}

A skipped step leaves no trace in {optimizers} optimizers of pytorch_optimizer, bitsandbytes, timm and schedulefree:
weights, `state_dict()` and attributes are bitwise those of a run without the skipped batches,
for one batch and for five.

Written on {date} with {versions}.

The columns are the numbers of parameters, of published values in all four iterations, of values compared with float64
arithmetic, and of reported attention heads. A model with attention and without heads in the table calls neither
`scaled_dot_product_attention` nor `nn.MultiheadAttention`.

"""


def pytest_terminal_summary(terminalreporter, exitstatus) -> None:
    reports = terminalreporter.getreports("passed")
    rows = [dict(report.user_properties)["model"] for report in reports if "model" in dict(report.user_properties)]
    steps = [dict(report.user_properties)["step"] for report in reports if "step" in dict(report.user_properties)]
    optimizers = sum("optimizer" in dict(report.user_properties) for report in reports)
    if not rows:
        return
    rows.sort(key=lambda row: list(CASES).index(row["name"]))
    table = [f"| model | {' | '.join(COLUMNS)} |", f"|---|{'---:|' * len(COLUMNS)}"]
    table += [f"| {row['name']} | {' | '.join(f'{row[item]:,}' for item in COLUMNS)} |" for row in rows]
    text = "\n".join(table)
    terminalreporter.write_line(text)
    skipped = len(terminalreporter.getreports("skipped"))
    if exitstatus == 0 and len(rows) + skipped == len(CASES) and steps:
        names = ("torch", "torchvision", "timm", "transformers", "diffusers", "peft", "torch_geometric", "monai")
        names += ("accelerate", "pytorch_optimizer", "bitsandbytes", "schedulefree")
        versions = ", ".join(f"{name} {importlib.metadata.version(name).partition('+')[0]}" for name in names)
        steps = "\n".join(f"- {item}" for item in sorted(steps))
        about = ABOUT.format(
            models=len(rows),
            mixtures=len(MIXTURES),
            steps=steps,
            versions=versions,
            optimizers=optimizers,
            date=datetime.date.today(),
        )
        PAGE.write_text(about + text + "\n", encoding="utf-8")
        terminalreporter.write_line(f"{PAGE.name} is written.")
