"""The examples are run as they stand, some shorter."""

from __future__ import annotations

import logging
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ignite_monitor import cli, read_hdf5
from tests._helpers import LONG, scalars

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def run_example(tmp_path, monkeypatch, capsys):
    """Run an example as the program it is, in an empty directory, and return what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return "".join(capsys.readouterr())

    return run


@pytest.fixture
def clone(tmp_path):
    """What `make` reads of a clone."""
    for name in ("Makefile", "pyproject.toml", "setup.cfg", "constraints.txt"):
        shutil.copy(EXAMPLES.parent / name, tmp_path / name)
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    return tmp_path


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize(("command", "usage"), [("make demo", "demo.py"), ("make test", "[file_or_dir]")])
def test_the_commands_of_the_readme_run(command, usage, clone):
    """As in a clone whose environment is installed, with --help, since the demo and the tests take minutes."""
    root = EXAMPLES.parent
    typed = [line.partition("#")[0].strip() for line in (root / "README.md").read_text().splitlines()]
    assert typed.count(command) == 1
    target = command.removeprefix("make ")
    assert re.search(rf"^{target}: \$\(READY\) ## ", (root / "Makefile").read_text(), re.MULTILINE)  # which installs
    (clone / ".venv/bin").mkdir(parents=True)
    for name, module in {"python": "", "ignite-monitor": "-m ignite_monitor"}.items():
        script = clone / ".venv/bin" / name
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module} "$@" --help\n')
        script.chmod(0o755)
    (clone / ".venv/.ready").touch()
    environment = os.environ | {"PYTHONPATH": str(root)}
    printed = subprocess.run(
        command.split(), cwd=clone, env=environment, capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert re.search(f"usage: .*{re.escape(usage)}", printed)


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_leaves_a_linked_environment_alone(clone):
    (clone / "other").mkdir()
    (clone / "other" / "file").touch()
    (clone / ".venv").symlink_to("other")
    result = subprocess.run(["make", "lint"], cwd=clone, capture_output=True, text=True, timeout=60)
    assert result.returncode != 0
    assert ".venv is a symbolic link" in result.stderr
    assert [path.name for path in (clone / "other").iterdir()] == ["file"]


def test_the_readme_quotes_what_summary_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    ((source, quoted),) = re.findall(
        r"```python\n([^`]*run\.h5[^`]*)```\n\n`ignite-monitor summary run\.h5` prints[^\n]*:\n\n((?: {4}.+\n)+)", text
    )
    exec(compile(source, "README.md", "exec"), {"__name__": "__main__"})
    assert cli.main(["summary", "run.h5"]) == 0
    assert " ".join(quoted.split()) in " ".join(capsys.readouterr().out.split())


def test_continuous_integration_runs_the_command_of_the_readme():
    assert "make test || failed" in (EXAMPLES.parent / ".ci/run").read_text()


def test_demo(run_example, monkeypatch):
    logger = logging.getLogger("ignite_monitor")
    monkeypatch.setattr(logger, "handlers", [])
    output = run_example("demo.py", "--iterations", "200")
    logger.setLevel(logging.NOTSET)
    assert re.search(r"^GradMonitor \(grad\): iteration 101: gradient norm .*skipped", output, re.MULTILINE)
    assert re.search(r"^RollbackHandler \(rollback\): iteration 14\d: .*rolled back to iteration", output, re.MULTILINE)
    recording = read_hdf5("runs/demo/run.h5")
    assert recording["grad/skipped_count"].values[-1] >= 10  # which ones are spikes depends on Python's own sources
    assert recording["rollback/count"].values[-1] >= 1
    assert len(recording["train/loss"].steps) == 200
    assert list(Path("runs/demo/tensorboard").iterdir())
    commands = re.findall(r"^    \S+/ignite-monitor (.*)$", output, flags=re.MULTILINE)
    assert [cli.main(command.split()) for command in commands] == [0]


def accuracies(output):
    return [float(item) for item in re.findall(r"test accuracy ([\d.]+)", output)]


@pytest.mark.parametrize(("arguments", "harmless"), [((), True), pytest.param(("--ignore-spikes",), False, marks=LONG)])
def test_custom_step_example(run_example, arguments, harmless):
    output = run_example("spikes_custom_step.py", "--epochs", "3", *arguments)
    assert "iteration 120: spike, gradient norm" in output
    assert "tensorboard --logdir runs/spikes_custom_step" in output
    assert (accuracies(output)[-1] > 0.9) is harmless
    written = scalars(Path("runs/spikes_custom_step", "spike_skipped" if harmless else "spike_ignored"))
    norms, thresholds = (dict(written[f"grad/{name}"]) for name in ("norm", "threshold"))
    assert dict(written["grad/spike"])[120] == 1.0
    assert norms[120] > 100 * thresholds[120]
    assert len(norms) == 132
    assert min(thresholds) == 21


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch without Muon")
@pytest.mark.parametrize(
    ("arguments", "norm", "update"), [((), 1.9, 0.024), pytest.param(("--muon-lr", "0.2"), 13.5, 0.24, marks=LONG)]
)
def test_muon_example(run_example, arguments, norm, update):
    output = run_example("spectral_muon.py", "--epochs", "2", *arguments)
    norms, updates = zip(*re.findall(r"muon +largest norm +([\d.]+), of an update ([\d.]+)", output), strict=True)
    assert float(norms[-1]) == pytest.approx(norm, rel=0.1)
    assert all(float(item) == pytest.approx(update, rel=0.05) for item in updates)
    assert (accuracies(output)[-1] > 0.93) is (not arguments)


def test_activations_example(run_example):
    assert "iteration 50: loss" in run_example("activations_gpt.py", "--iterations", "50")
    written = scalars(Path("runs/activations_gpt"))
    assert {f"attention_entropy/encoder.layers.2.self_attn/head_{i}" for i in range(4)} <= set(written)
    dead = [dict(written[f"activation/encoder.layers.{i}.activation/dead_fraction"])[50] for i in range(3)]
    assert dead[1] > max(dead[0], dead[2])


def rows_of_comes_back(output):
    """Run -> the loss before the faults, the worst and the last one, spikes and rollbacks."""
    result = re.findall(
        r"^(undisturbed|with(?:out)? handlers) +([\d.]+) +([\d.]+) +([\d.]+) +(\d+) +(\d+)$", output, re.M
    )
    return {name: tuple(map(float, numbers)) for name, *numbers in result}


def test_comes_back_example_in_small(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    example = runpy.run_path(str(EXAMPLES / "comes_back.py"))
    train, row, plot = (example[name] for name in ("train", "row", "plot"))
    train.__globals__.update(LENGTH=16, WIDTH=32)
    run = train(500, seed=0)
    (first, back_to), *later = run.rollbacks
    assert back_to < 150 < first < 190
    # The text is of Python's own files, which differ by version: with half of them the second fault needs no rollback.
    assert len(later) <= 1
    assert all(again_back_to < 300 < second < 320 for second, again_back_to in later)
    before, worst, last, spikes, rollbacks = rows_of_comes_back(row(500, "with handlers", run))["with handlers"]
    without = train(500, seed=0, helped=False)
    assert last < min(without.losses[500], before) < worst
    assert (spikes, rollbacks) == (len(run.spikes), len(run.rollbacks))
    assert len(list((tmp_path / "runs" / "comes_back" / "spikes").iterdir())) == 20
    plot(500, dict.fromkeys(("undisturbed", "without handlers", "with handlers"), run), tmp_path / "small.png")
    assert (tmp_path / "small.png").read_bytes().startswith(b"\x89PNG")


@LONG
@pytest.mark.parametrize("seed", range(3))
def test_comes_back_example(run_example, seed):
    reported = rows_of_comes_back(run_example("comes_back.py", "--seed", str(seed)))
    before, _, undisturbed, _, _ = reported["undisturbed"]
    assert reported["without handlers"][2] > before
    assert reported["with handlers"][2] < before - 0.5 * (before - undisturbed)
    assert reported["with handlers"][4] >= 1
    assert reported["without handlers"][3:] == reported["undisturbed"][3:] == (0, 0)


def test_width_sweep_example(run_example):
    arguments = ("--widths", "64", "128", "256", "512", "--steps", "2", "--output", "sweep.png")
    output = run_example("rcc_width_sweep.py", *arguments)
    first, hidden, second, last = (float(item) for item in re.findall(r"width\^([+-][\d.]+) after one step", output))
    assert first < -0.5
    assert max(abs(hidden), abs(second)) < 0.2
    assert 0.3 < last < 1.2
    assert Path("sweep.png").read_bytes().startswith(b"\x89PNG")
