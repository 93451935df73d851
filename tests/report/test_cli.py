"""The command line: what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import h5py
import numpy as np
import pytest
import torch
from ignite.engine import Engine, Events

from ignite_monitor import GradMonitor, HDF5Logger, read_hdf5
from ignite_monitor.cli import main
from ignite_monitor.hdf5.layout import Name
from tests.report import _runs as runs

ROOT = Path(__file__).resolve().parents[2]


def write(path, run):
    """A file with a run's series, written as a training run writes it."""
    last = max(int(steps[-1]) for steps, _ in run.values())
    points = {name: dict(zip(steps.tolist(), values.tolist(), strict=True)) for name, (steps, values) in run.items()}
    trainer = Engine(lambda engine, batch: None)

    @trainer.on(Events.ITERATION_COMPLETED)
    def publish(engine):
        step = engine.state.iteration
        engine.state.metrics = {name: values[step] for name, values in points.items() if step in values}

    recorded = runs.Recording(run)
    origin = lambda self, name: Name(name, *recorded.monitor(name))  # noqa: E731
    attributed = patch("ignite_monitor.hdf5.logger.OutputHandler._describe", origin)
    with HDF5Logger(path) as logger, attributed:
        logger.attach_output_handler(trainer, Events.ITERATION_COMPLETED, tag=None, metric_names="all")
        trainer.run([0], epoch_length=last)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("files")
    healthy = runs.healthy(60)
    write(directory / "healthy.h5", healthy)
    hurt = healthy | runs.grad(runs.with_spike([50], count=60), [50])
    hurt["train/loss"] = runs.series(np.where(np.arange(60) < 55, hurt["train/loss"][1], np.nan))
    hurt["[bold]not markup[/] :smile:"] = runs.series([1, np.inf])
    write(directory / "hurt.h5", hurt)
    HDF5Logger(directory / "empty.h5").close()
    (directory / "foreign.h5").write_text("This is a letter.\n")
    (directory / "nothing.h5").write_bytes(b"")
    whole = (directory / "healthy.h5").read_bytes()
    (directory / "cut.h5").write_bytes(whole[: len(whole) // 2])
    with h5py.File(directory / "other.h5", "w") as other:
        other["x"] = [1, 2]
    return directory


def run(*arguments, program=("-m", "ignite_monitor"), **options):
    options = {"stdout": subprocess.PIPE, "stdin": subprocess.DEVNULL} | options
    settings = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "", "TERM": "xterm-256color", "COLUMNS": "40"}
    command = [sys.executable, *program, *map(str, arguments)]
    return subprocess.run(command, env=os.environ | settings, stderr=subprocess.PIPE, text=True, timeout=600, **options)


def end(arguments):
    """The exit code of the command."""
    try:
        return main(arguments)
    except SystemExit as left:  # argparse
        return left.code


# Summary


def test_summary_of_a_run_with_a_spike(files, capsys):
    assert main(["summary", str(files / "hurt.h5")]) == 0
    output = capsys.readouterr().out
    assert "Needs attention: 1 problem and 2 warnings." in output
    assert output.index("iteration 50. The largest, in iteration 50, was 60") < output.index(
        "train/loss is NaN from iteration 56 to the end"
    )
    assert "[bold]not markup[/] :smile:" in output


def test_summary_of_a_run_that_failed_in_its_first_iteration(tmp_path, capsys):
    model = torch.nn.Linear(2, 1)
    monitor = GradMonitor(model, torch.optim.SGD(model.parameters()))

    def train_step(engine, batch):
        model(batch).sum().backward()
        raise MemoryError

    trainer = Engine(train_step)
    with HDF5Logger(path := str(tmp_path / "run.h5"), mode="w") as logger, monitor.attach(trainer):
        monitor.log_to(logger, trainer)
        with pytest.raises(MemoryError):
            trainer.run([torch.full((1, 2), np.nan)])
    assert main(["summary", path]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{path}: 0 metrics\n")
    assert "The model's inputs are not finite" in text


def test_piped_output_is_plain_and_not_cut(files):
    done = run("summary", files / "hurt.h5", "--all")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    values = read_hdf5(files / "hurt.h5")
    for name in values:
        (row,) = [line for line in done.stdout.splitlines() if line.startswith(f"{name} ")]
        first, last = row[len(name) :].split()[:2]
        assert float(first) == pytest.approx(values[name].values[0], rel=1e-3, nan_ok=True)
        assert float(last) == pytest.approx(values[name].values[-1], rel=1e-3, nan_ok=True)


def test_a_terminal_has_colours_and_whole_numbers(files):
    """Forty columns are enough."""
    program = "import pty, sys; pty.spawn([sys.executable, '-m', 'ignite_monitor', 'summary', sys.argv[1]])"
    output = run(files / "hurt.h5", program=("-c", program)).stdout
    assert "\x1b[" in output
    assert re.search(r"\b3\.7\d+\b|\b4\.\d{3}\b", output)
    assert "…" not in output


def test_summary_for_machines(files, capsys):
    assert main(["summary", str(files / "hurt.h5"), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert set(summary) == {
        *("version", "file", "iterations", "healthy", "assessment", "failed", "measured", "findings", "metrics")
    }
    assert summary["iterations"] == {"first": 1, "last": 60}
    assert summary["healthy"] is False
    assert [finding["kind"] for finding in summary["findings"][:3]] == [
        *("nonfinite_metric", "bad_batches", "nonfinite_metric")
    ]
    assert set(summary["findings"][0]) == {"kind", "severity", "text", "evidence"}
    assert summary["findings"][1]["evidence"]["iterations"] == [50]
    assert summary["metrics"]["train/loss"]["last"] is None
    assert summary["metrics"]["grad/norm"]["max"] == 60
    assert set(summary["metrics"]["grad/norm"]) == {
        *("first", "last", "min", "max", "values", "nonfinite", "first_step", "last_step")
    }


def test_a_reader_that_closes_the_pipe(files):
    reading, writing = os.pipe()
    os.close(reading)
    done = run("summary", files / "healthy.h5", stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full is Linux's")
@pytest.mark.parametrize("arguments", [(), ("summary", "hurt.h5")])  # less than a buffer, and more
def test_output_that_can_not_be_written(files, arguments):
    with open("/dev/full", "w") as full:
        done = run(*arguments, stdout=full, cwd=files)
    assert (done.returncode, done.stderr) == (2, "ignite-monitor: error: the output: No space left on device\n")


# Compare


def test_compare(files, capsys):
    assert main(["compare", str(files / "healthy.h5"), str(files / "hurt.h5")]) == 0
    output = capsys.readouterr().out
    assert output.index("A ") < output.index("nothing unusual" if "nothing unusual" in output else "note")
    assert "1 gradient spike (grad/norm): iteration 50" in output
    assert "Only in B (1): [bold]not markup[/] :smile:" in output
    assert main(["compare", str(files / "healthy.h5"), str(files / "healthy.h5")]) == 0
    assert re.search(r"^0 of \d+ metrics that are in both differ", capsys.readouterr().out, flags=re.MULTILINE)


def test_compare_for_machines(files, capsys):
    assert main(["compare", str(files / "healthy.h5"), str(files / "hurt.h5"), "--json"]) == 0
    comparison = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert set(comparison) == {"version", "compared_until", "runs", "metrics"}
    assert [item["last_iteration"] for item in comparison["runs"]] == [60, 60]
    assert comparison["runs"][1]["only_here"] == ["[bold]not markup[/] :smile:"]
    assert comparison["metrics"]["train/loss"]["b"] is None
    assert comparison["metrics"]["train/loss"]["matters"] is True
    assert comparison["metrics"]["val/accuracy"]["matters"] is False


# Plot


def test_plot(files, tmp_path, capsys):
    output = tmp_path / "norms.png"
    assert main(["plot", str(files / "hurt.h5"), "-o", str(output), "--metrics", "^grad/"]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")
    assert "3 panels" in capsys.readouterr().out


def test_report_replaces_a_page(files, tmp_path):
    output = tmp_path / "run.html"
    output.write_text("old")
    assert main(["report", str(files / "hurt.h5"), "-o", str(output)]) == 0
    text = output.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert "[bold]not markup[/] :smile:" in text


# Bad input


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["summary", "missing.h5"], "missing.h5"),
        (["summary", "."], "no regular file"),
        (["summary", "two\nlines"], "two\\nlines: No such file"),
        (["summary", "foreign.h5"], "foreign.h5"),
        (["summary", "nothing.h5"], "nothing.h5"),
        (["summary", "cut.h5"], "cut.h5"),
        (["summary", "other.h5"], "HDF5Logger"),
        (["summary", "empty.h5"], "holds no metrics"),
        (["summary", "empty.h5", "--json"], "holds no metrics"),
        (["compare", "healthy.h5", "missing.h5"], "missing.h5"),
        (["compare", "foreign.h5", "healthy.h5"], "foreign.h5"),
        (["plot", "missing.h5", "-o", "x.png"], "missing.h5"),
        (["plot", "healthy.h5", "-o", "x.png", "--metrics", "("], "regular expression"),
        (["plot", "healthy.h5", "-o", "x.png", "--metrics", "no such"], "matches 'no such'"),
        (["plot", "healthy.h5", "-o", "no/such/x.png", "--metrics", "^grad"], "no/such/x.png"),
        (["plot", "healthy.h5", "-o", "x.docx"], "x.docx"),
        (["plot", "healthy.h5", "-o", ".", "--metrics", "^grad"], "."),
        (["report", "cut.h5", "-o", "x.html"], "cut.h5"),
        (["report", "empty.h5", "-o", "x.html"], "holds no metrics"),
        (["report", "healthy.h5", "-o", "healthy.h5"], "is the run itself"),
        (["report", "healthy.h5", "-o", "no/such/x.html"], "no/such/x.html"),
    ],
)
def test_bad_input_is_reported_in_one_line(files, monkeypatch, capsys, arguments, reported):
    monkeypatch.chdir(files)
    before = sorted(files.iterdir())
    assert end(arguments) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.count("\n") == 1
    assert re.match(r"ignite-monitor( \w+)?: error: ", error)
    assert reported in error
    assert sorted(files.iterdir()) == before


ODD = "a\x1b[31m\n\u202e"
ESCAPED = r"a\x1b[31m\n\u202e"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["summary", f"no{ODD}"], 2),
        (["summary", f"letter{ODD}"], 2),
        (["compare", f"{ODD}.h5", f"no{ODD}"], 2),
        (["plot", f"{ODD}.h5", "--metrics", "^grad"], 0),
        (["plot", f"{ODD}.h5", "--metrics", "^grad", "-o", f"{ODD}.docx"], 2),
        (["plot", f"{ODD}.h5", "--metrics", "^grad", "-o", f"{ODD}/x.png"], 2),
        (["plot", f"{ODD}.h5", "-o", f"{ODD}.h5"], 2),
        (["plot", f"{ODD}.h5", "--metrics", f"no{ODD.replace('[', '')}"], 2),
    ],
)
def test_file_names_are_printed_without_control_characters(files, tmp_path, monkeypatch, capsys, arguments, code):
    monkeypatch.chdir(tmp_path)
    Path(f"{ODD}.h5").write_bytes((files / "healthy.h5").read_bytes())
    Path(f"letter{ODD}").write_text("This is a letter.")
    assert end(arguments) == code
    printed = "".join(capsys.readouterr())
    assert printed.count("\n") == 1
    assert printed.rstrip("\n").isprintable()
    assert ESCAPED in printed or ESCAPED.replace("[", "") in printed


@pytest.mark.parametrize("module", ["h5py", "rich", "matplotlib"])
def test_without_what_it_needs_the_extra_is_named(files, monkeypatch, capsys, module):
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "ignite_monitor.report.text", raising=False)
    command = ["plot", "-o", str(files / "x.png")] if module == "matplotlib" else ["summary"]
    assert main([*command, str(files / "healthy.h5")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(r"pip install 'ignite-monitor\[(cli|hdf5)\]'", error)


# Help

COMMANDS = ("summary", "plot", "report", "compare", "spike")


@pytest.mark.parametrize("arguments", [["sumary", "x"], ["summary"], ["summary", "a", "b"], ["plot", "x", "--colour"]])
def test_wrong_arguments_print_the_usage(capsys, arguments):
    assert end(arguments) == 2
    assert re.match(r"usage: ignite-monitor", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "commands:"),
        (["--help"], "commands:"),
        (["--version"], "ignite-monitor "),
        *(([command, "--help"], f"ignite-monitor {command}") for command in COMMANDS),
    ],
)
def test_help(capsys, arguments, words):
    assert end(arguments) == 0
    assert words in capsys.readouterr().out
