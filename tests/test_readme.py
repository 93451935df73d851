"""The examples are run as they stand, some shorter."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests._helpers import LONG

ROOT = Path(__file__).resolve().parent.parent


def scalars(log_dir):
    events = EventAccumulator(str(log_dir))
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def run_example(name, directory, *arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )


def accuracies(output):
    return [float(item) for item in re.findall(r"test accuracy ([\d.]+)", output)]


@pytest.mark.parametrize(("arguments", "harmless"), [((), True), pytest.param(("--ignore-spikes",), False, marks=LONG)])
def test_custom_step_example(tmp_path, arguments, harmless):
    done = run_example("spikes_custom_step.py", tmp_path, *arguments)
    output = done.stdout + done.stderr
    assert "iteration 120: spike, gradient norm" in output
    assert "tensorboard --logdir runs/spikes_custom_step" in output
    assert (accuracies(output)[-1] > 0.9) is harmless
    run = "spike_skipped" if harmless else "spike_ignored"
    written = scalars(tmp_path / "runs" / "spikes_custom_step" / run)
    assert written["grad/spike"][120] == 1.0
    assert written["grad/norm"][120] > 100 * written["grad/threshold"][120]
    assert len(written["grad/norm"]) == 220
    assert min(written["grad/threshold"]) == 21


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch without Muon")
@pytest.mark.parametrize(
    ("arguments", "norm", "update"), [((), 3.1, 0.024), pytest.param(("--muon-lr", "0.2"), 27, 0.24, marks=LONG)]
)
def test_muon_example(tmp_path, arguments, norm, update):
    output = run_example("spectral_muon.py", tmp_path, *arguments).stdout
    norms, updates = zip(*re.findall(r"muon +largest norm +([\d.]+), of an update ([\d.]+)", output), strict=True)
    assert float(norms[-1]) == pytest.approx(norm, rel=0.1)
    assert all(float(item) == pytest.approx(update, rel=0.05) for item in updates)
    assert (accuracies(output)[-1] > 0.93) is (not arguments)


@pytest.mark.parametrize(("arguments", "skipped"), [((), 6), pytest.param(("--no-skip",), 0, marks=LONG)])
def test_skipped_example(tmp_path, arguments, skipped):
    output = run_example("spikes_skipped.py", tmp_path, *arguments).stdout
    assert f"Steps skipped: {skipped} of 220" in output
    assert (accuracies(output)[-1] > 0.9) is bool(skipped)


def test_activations_example(tmp_path):
    output = run_example("activations_gpt.py", tmp_path, "--iterations", "50").stdout
    assert "iteration 50: loss" in output
    written = scalars(tmp_path / "runs" / "activations_gpt")
    assert {f"attention_entropy/blocks.2.attention/head_{i}" for i in range(4)} <= set(written)
    dead = [written[f"activation/blocks.{i}.mlp.1/dead_fraction"][50] for i in range(3)]
    assert dead[1] > max(dead[0], dead[2])


def rows_of_comes_back(output):
    """Run -> the loss before the faults, the worst and the last one, spikes and rollbacks."""
    result = re.findall(
        r"^(undisturbed|with(?:out)? handlers) +([\d.]+) +([\d.]+) +([\d.]+) +(\d+) +(\d+)$", output, re.M
    )
    return {name: tuple(map(float, numbers)) for name, *numbers in result}


def test_comes_back_example_in_small(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    example = runpy.run_path(str(ROOT / "examples" / "comes_back.py"))
    train, row, plot = (example[name] for name in ("train", "row", "plot"))
    train.__globals__.update(LENGTH=16, WIDTH=32)
    run = train(500, seed=0)
    (first, back_to), (second, again_back_to) = run.rollbacks
    assert back_to < 150 < first < 190
    assert again_back_to < 300 < second < 320
    before, worst, last, spikes, rollbacks = rows_of_comes_back(row(500, "with handlers", run))["with handlers"]
    assert last < before < worst
    assert (spikes, rollbacks) == (len(run.spikes), len(run.rollbacks))
    assert len(list((tmp_path / "runs" / "comes_back" / "spikes").iterdir())) == 20
    plot(500, dict.fromkeys(("undisturbed", "without handlers", "with handlers"), run), tmp_path / "small.png")
    assert (tmp_path / "small.png").read_bytes().startswith(b"\x89PNG")


@LONG
@pytest.mark.parametrize("seed", range(3))
def test_comes_back_example(tmp_path, seed):
    reported = rows_of_comes_back(run_example("comes_back.py", tmp_path, "--seed", str(seed)).stdout)
    before, _, undisturbed, _, _ = reported["undisturbed"]
    assert reported["without handlers"][2] > before
    assert reported["with handlers"][2] < before - 0.5 * (before - undisturbed)
    assert reported["with handlers"][4] >= 2
    assert reported["without handlers"][3:] == reported["undisturbed"][3:] == (0, 0)


@LONG
def test_learning_rate_example(tmp_path):
    """Shorter than it is meant to be: the narrow model's best rate is too large for the wide one, but under muP."""
    output = run_example("learning_rate_transfer.py", tmp_path, "--steps", "30", "--seeds", "1").stdout
    result = re.findall(r"(muP|standard) +width +(64|512) +best learning rate 2\^(-\d+)", output)
    best = {(kind, width): int(power) for kind, width, power in result}
    assert len(best) == 4
    assert best["standard", "512"] < best["standard", "64"]
    assert abs(best["muP", "512"] - best["muP", "64"]) <= 2
    assert (tmp_path / "learning_rate_transfer.png").read_bytes().startswith(b"\x89PNG")


@LONG
def test_width_sweep_example(tmp_path):
    arguments = ("--widths", "64", "128", "256", "512", "--steps", "6", "--output", "sweep.png")
    output = run_example("rcc_width_sweep.py", tmp_path, *arguments).stdout
    slopes = [float(item) for item in re.findall(r"width\^([+-][\d.]+) after one step", output)]
    assert len(slopes) == 8
    hidden, last = slopes[5:7], slopes[7]
    assert max(map(abs, hidden)) < 0.2
    assert 0.3 < last < 1.2
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
