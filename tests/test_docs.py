"""Run every snippet of the README and the site by itself, and the notebooks; compare what they print."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import importlib.util
import inspect
import io
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from unittest import mock

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
import torch
import torch.distributed as dist
from ignite.handlers.base_logger import BaseLogger

import ignite_monitor
from ignite_monitor import MonitorEvents, keys, scaling
from ignite_monitor.report import finding
from ignite_monitor.schema import Schema

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs" / "_ext"))  # where conf.py finds them too
METRICS = importlib.import_module("metrics")
GENERATED = importlib.import_module("generated")
TROUBLESHOOTING = importlib.import_module("troubleshooting")
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if path.exists()
}
FENCE = re.compile(r"^(?:<!-- needs: (\w+) -->\n)?```([\w{}-]*)[^\n]*\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
SNIPPETS = [
    pytest.param(source, needs, id=f"{page}:{text[: result.start()].count(chr(10)) + 1}")
    for page, text in PAGES.items()
    for result in FENCE.finditer(text)
    for needs, language, source in [result.groups()]
    if language == "python"
]
SERVICES = {"clearml", "mlflow", "wandb"}  # these start threads and processes, which a test process must not inherit
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory and a free port for a process group; global state is cleaned up."""
    monkeypatch.chdir(tmp_path)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("WANDB_SILENT", "true")
    mpl.use("agg")
    with mock.patch.dict(os.environ):  # torch names the rank there
        yield tmp_path
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.compiler.reset()
    plt.close("all")


def run(source, name):
    """Run a script and return what it prints."""
    namespace = {"__name__": "__main__"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, name, "exec"), namespace)
    return printed.getvalue()


def promised(source):
    """Return the comments after the print calls of a script: its expected output."""
    lines = source.splitlines()
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr)]
    prints = [node for node in statements if ast.unparse(node).startswith("print(")]
    return [match[1] for node in prints if (match := re.search(r"\)  # (.+)$", lines[node.end_lineno - 1]))]


@pytest.mark.parametrize(("source", "needs"), SNIPPETS)
def test_snippets(source, needs, folder):
    if "fully_shard(" in source and not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("this torch shards on accelerators alone")
    if needs is not None and importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    if needs in SERVICES:
        script = [sys.executable, "-W", "ignore", "-c", source]
        printed = subprocess.run(script, capture_output=True, text=True, timeout=300, check=True).stdout
    else:
        with warnings.catch_warnings():
            if needs is not None:
                warnings.simplefilter("ignore")  # they are its own
            printed = run(source, "snippet")
    for line in promised(source):
        assert line in printed.splitlines()


def docstrings():
    """Public name -> docstring, of classes, their methods, and functions."""
    for package in (ignite_monitor, scaling):
        for name in package.__all__:
            value = getattr(package, name)
            yield name, inspect.getdoc(value)
            if inspect.isclass(value):
                yield from (
                    (f"{name}.{attribute}", inspect.getdoc(method))
                    for attribute, method in inspect.getmembers(value, inspect.isfunction)
                    if attribute[0] != "_" and method.__module__.startswith("ignite_monitor.")
                )


EXAMPLES = {
    textwrap.dedent(result[1]): name
    for name, text in docstrings()
    for result in re.finditer(r"\.\. code-block:: python\n\n(.*?)(?=\n\S|\Z)", text or "", flags=re.DOTALL)
}


@functools.cache
def setup():
    """The namespace of the API page's setup up to the model, which takes longest, and the code of the rest."""
    (source,) = re.findall(r"^```python\n(.*?)^```", PAGES["docs/api.md"], flags=re.DOTALL | re.MULTILINE)
    beginning, model, rest = source.partition("model = parametrization.model\n")
    namespace = {"__name__": "__main__"}
    exec(compile(beginning, "docs/api.md", "exec"), namespace)
    return namespace, compile(model + rest, "docs/api.md", "exec")


ELSEWHERE = {"load_spike"}  # needs a run with a spike, which the page of SpikeRecorder has


@pytest.mark.parametrize(
    "source", [pytest.param(source, id=name) for source, name in EXAMPLES.items() if name not in ELSEWHERE]
)
def test_examples_of_docstrings(source, folder, capsys):
    beginning, rest = setup()
    namespace = beginning | {"parametrization": copy.deepcopy(beginning["parametrization"])}
    exec(rest, namespace)
    exec(compile(source, "example", "exec"), namespace)
    for value in namespace.values():
        if isinstance(value, BaseLogger):
            value.close()


def test_readme_is_one_page():
    assert len(PAGES["README.md"].splitlines()) <= 110


def test_links_lead_somewhere():
    """Sphinx checks the links of the site, but not those of the README."""
    for target in re.findall(r"\]\(([^)#\s]+)", PAGES["README.md"]):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_github_shows_no_directive():
    for page, text in PAGES.items():
        assert not re.search(r"^```\{", re.sub(r"<!-- sphinx\n.*?-->", "", text, flags=re.DOTALL), re.MULTILINE), page


def test_github_shows_formulas():
    """Between dollars it takes the backslash of ``\\,`` or ``\\_`` for Markdown's; it knows no ``operatorname``."""
    text = "".join(
        re.sub(r"^```.*?^```|`[^`\n]*`", "", page, flags=re.DOTALL | re.MULTILINE) for page in PAGES.values()
    )
    formulas = re.findall(r"\$([^$]+)\$", text)
    assert formulas
    assert [item for item in formulas if re.search(r"\\[^a-zA-Z ]", item)] == []
    assert "$$" not in text
    assert not any("operatorname" in page for page in PAGES.values())


def test_files_that_are_named_are_there():
    named = {item for text in PAGES.values() for item in re.findall(r"`((?:[a-z_0-9]+/)+[\w.]*)`", text)}
    places = (ROOT, ROOT / "ignite_monitor")
    roots = {path.name for place in places for path in place.iterdir() if path.is_dir()}
    files = {item for item in named if item.partition("/")[0] in roots and (item.endswith("/") or ".py" in item)}
    assert files
    assert [item for item in sorted(files) if not any((place / item).exists() for place in places)] == []


def test_every_public_name_is_documented():
    listed = set(re.findall(r"^(?:   |\.\. py:data:: )(\w+)$", PAGES["docs/api.md"], flags=re.MULTILINE))
    assert listed == {*ignite_monitor.__all__, *scaling.__all__}
    events = set(re.findall(r"`([A-Z_]+)`", PAGES["docs/monitors/index.md"]))
    assert {event.name for event in MonitorEvents} <= events


def test_generated_parts_are_up_to_date():
    old = [page for page, text in PAGES.items() if GENERATED.written(text) != text]
    assert not old, "run `python docs/_ext/generated.py`"


def test_every_schema_has_its_table():
    schemas = {name: value for name, value in vars(keys).items() if isinstance(value, Schema)}
    assert set(re.findall(r"<!-- keys (\w+) -->", "".join(PAGES.values()))) == set(schemas)
    reference = "\n".join(METRICS.reference())  # raises LookupError for a key without a range
    for schema in schemas.values():
        for key in schema.keys:
            assert f"`{schema.prefix}/{key.pattern}`".replace("`/", "`") in reference


def test_every_finding_is_in_troubleshooting():
    kinds = [kind for group in TROUBLESHOOTING.SYMPTOMS.values() for kind, *_ in group]
    assert sorted(kinds) == sorted(finding.KINDS)
    page = PAGES["docs/troubleshooting.md"]
    assert all(f"(`{name}`)" in page and kind.advice in page for name, kind in finding.KINDS.items())


SECTIONS = ["Example", "Formula", "Arguments", "Metrics", "Plot", "Notes"]


@pytest.mark.parametrize("page", sorted({page for _, page in METRICS.PAGES.values()}))
def test_pages_of_monitors_follow_one_template(page):
    text = re.sub(r"^```.*?^```", "", PAGES[f"docs/monitors/{page}.md"], flags=re.DOTALL | re.MULTILINE)
    sections = re.findall(r"^## (.+)", text, flags=re.MULTILINE)
    assert sections == [section for section in SECTIONS if section in sections]
    assert {"Example", "Arguments", "Metrics", "Notes"} <= set(sections)


def test_every_monitor_has_the_list_of_its_arguments():
    listed = set(re.findall(r"<!-- arguments (\w+) -->", "".join(PAGES.values())))
    without = {"LossRecorder"}  # attach_monitors makes it
    assert {monitor for monitor, _ in METRICS.PAGES.values()} - without <= listed


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks(path, folder):
    """Run the cells from top to bottom, as a script."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    source = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    run(source, path.name)


def test_pre_commit_runs_the_linters_of_make_lint():
    (recipe,) = re.findall(r"^lint:.*\n((?:\t.+\n)+)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    commands = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()]
    assert re.findall(r"entry: ([^,]+),", (ROOT / ".pre-commit-config.yaml").read_text()) == commands
