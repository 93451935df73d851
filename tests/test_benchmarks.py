"""The scripts of benchmarks/ run, and say what they measured with."""

from __future__ import annotations

import importlib
import logging
import re
import runpy
import sys
from pathlib import Path

import pytest

from ignite_monitor.rollback import limits

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
MEASURED = re.compile(
    r"^Measured with Python 3\.[.\d]+, torch \S+, Ignite \S+, .*\d+ threads, commit [^:]+: (\S+\.py[^,\n]*)",
    re.MULTILINE,
)


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a script as the program it is, and return what it prints."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in [path.stem for path in BENCHMARKS.glob("*.py")]:
        monkeypatch.delitem(sys.modules, name, raising=False)

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
        return capsys.readouterr().out

    yield run
    logging.disable(logging.NOTSET)  # as scripts leave it
    logging.getLogger("ignite_monitor").setLevel(logging.NOTSET)


def rows(output):
    """Cells of the tables that a script has printed, without their heads."""
    lines = [line.strip("|").split("|") for line in output.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines if not set("".join(line)) <= {"-", " "}][1:]


@pytest.mark.parametrize(
    ("command", "count", "number"),
    [
        ("recovery.py --quick --draw picture.png", 1, r"^\+0\.\d{3}"),
        ("recovery.py --regimes --quick", 1, r"^\d\.\d{4}"),
        ("recovery.py --constants --quick", 2, r"^\d+(; forty bad batches [+-]0\.\d{3})?$|^the same$"),
        ("learning_rate_transfer.py --quick --draw picture.png", 1, r"^\d\.\d{2}$"),
        ("thresholds.py --quick", 8, r"^\d\.\d{2}"),
        ("bench_cost.py --quick", 6, r"^-?\d+\.\d+ ± "),
    ],
)
def test_script_prints_a_table_and_its_provenance(run, command, count, number, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    output = run(*command.split())
    assert MEASURED.findall(output) == [command]
    assert re.search(rf"{command}, seeds \d+( \d+)*(, on .*)?$", output, re.MULTILINE)
    table = rows(output)
    assert len(table) == count
    for line in table:
        assert any(re.search(number, cell) for cell in line[1:]), line
    assert all(file.stat().st_size > 10_000 for file in tmp_path.iterdir())
    assert len([*tmp_path.iterdir()]) == ("--draw" in command)


def test_every_constant_of_the_policy_has_a_reason(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    reasons = runpy.run_path(str(BENCHMARKS / "recovery.py"))["REASONS"]
    assert [*reasons] == [name for name in vars(limits) if name.isupper()]


def test_costs_within_their_noise_are_no_ratios(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    cost = runpy.run_path(str(BENCHMARKS / "bench_cost.py"))["Cost"]
    quiet, noisy = cost.of([0.99, 1.0, 1.01]), cost.of([0.5, 1.0, 1.5])
    assert (quiet.text(1.0), noisy.text(1.0)) == ("1.00 ± 0.01", "1.00 ± 0.54")
    assert (quiet.over(quiet), quiet.over(cost(4.0, 0.1), "{:.1%}")) == ("1.00 x", "25.0%")
    assert (noisy.over(quiet), quiet.over(noisy)) == ("noise", "noise")
    assert cost(1.0, 0.2).over(cost(1.0, 0.1)) == "1.00 x"
    assert cost(1.0, 0.2).over(cost(1.0, 0.2)) == "noise"  # an error of 0.28
    assert cost(-1.0, 0.1).over(quiet) == "noise"


def test_diagnosis_plants_faults_and_counts_the_causes_that_are_found(run):
    output = run("diagnosis.py", "--quick")
    assert MEASURED.findall(output) == ["diagnosis.py --quick"]
    assert "diagnosis.py --quick, seeds 10\n" in output
    assert len(re.findall(r"^- .*, seed [0-9]+: 1 of 1 right\.$", output, re.MULTILINE)) == 3
    assert "| a layer in no optimizer | mlp | problem `not_in_optimizer`: SetupCheck" in output


def test_diagnosis_has_faults_of_all_kinds_of_training_which_are_symptoms_of_troubleshooting(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent / "docs" / "_ext"))
    script = runpy.run_path(str(BENCHMARKS / "diagnosis.py"))
    faults, healthy, new = (script[name] for name in ("FAULTS", "HEALTHY", "NEW"))
    assert len(faults) >= 50
    assert len({fault.kinds for fault in faults}) >= 30
    assert len(new) == 10
    assert sum(len(fault.trainings.split()) for fault in healthy) >= 20
    trainings = {training for fault in faults for training in fault.trainings.split()}
    assert trainings == {"mlp", "cnn", "gpt", "lstm", "gan", "rl"}
    symptoms = importlib.import_module("troubleshooting").SYMPTOMS
    listed = {kind for causes in symptoms.values() for kind, *_ in causes}
    assert {kind for fault in (*faults, *new) for kind in fault.kinds.split()} <= listed


def test_pages_hold_the_tables_that_were_recorded(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    tables = runpy.run_path(str(BENCHMARKS / "tables.py"))
    names = []
    for path in tables["DOCS"].rglob("*.md"):
        page = path.read_text()
        assert page == tables["with_tables"](page), f"{path}: run `python benchmarks/tables.py --pages`"
        names += re.findall(r"<!-- results/(\S+)\.md -->", page)
    assert sorted(names) == sorted(path.stem for path in tables["RESULTS"].glob("*.md"))
    assert {*names} <= {*tables["TABLES"]}
    commands = {name: MEASURED.findall((tables["RESULTS"] / f"{name}.md").read_text())[0] for name in names}
    made = {name: " ".join(map(str, tables["TABLES"][name])).replace(f"{BENCHMARKS.parent}/", "") for name in names}
    other = {name for name in names if commands[name] != made[name]}
    assert other <= {"bench_cost"}  # measured with fewer rounds
    assert tables["with_tables"]("<!-- results/regimes.md -->\nold\n<!-- end -->").count("| TD, ") == 1


def test_tables_of_one_run_have_one_commit(run, monkeypatch, tmp_path):
    """The first result that is written leaves uncommitted changes, which are none of the code that measures."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    trainings, tables = importlib.import_module("trainings"), importlib.import_module("tables")
    commits = iter(["0123abcde", "0123abcde-dirty"])
    made = []
    monkeypatch.setattr(tables, "commit", lambda: next(commits))
    monkeypatch.setattr(tables, "measure", lambda name: made.append(trainings.commit()))
    monkeypatch.setattr(tables, "DOCS", tmp_path)
    monkeypatch.setenv(trainings.COMMIT, "")
    monkeypatch.setattr(sys, "argv", ["tables.py", "--only", "recovery", "regimes"])
    tables.main()
    assert made == ["0123abcde"] * 2
