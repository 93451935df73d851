"""Cost of importing the package: a name of the root is imported, with its requirements, at its first use."""

from __future__ import annotations

import copy
import os
import pickle
import pydoc
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ignite.engine import Engine, Events

import ignite_monitor
from ignite_monitor import HDF5Logger

ROOT = Path(__file__).resolve().parent.parent

WITHOUT = """
import sys

class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "ignite"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Nowhere())
"""


def python(source, *arguments):
    """Return the output of a new interpreter without torch and Ignite."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + source, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run.h5"
    trainer = Engine(lambda engine, batch: None)

    @trainer.on(Events.ITERATION_COMPLETED)
    def publish(engine):
        engine.state.metrics = {"grad/norm": 1.0 + engine.state.iteration, "train/loss": 0.5}

    with HDF5Logger(path) as logger:
        logger.attach_output_handler(trainer, Events.ITERATION_COMPLETED, tag=None, metric_names="all")
        trainer.run([0], epoch_length=20)
    return path


def test_command_line_needs_neither_torch_nor_ignite(path):
    commands = """
from ignite_monitor.cli import main
run = sys.argv[1]
for arguments in (["summary", run], ["summary", "--json", run], ["plot", run], ["compare", run, run], ["--help"]):
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    assert not code, code
assert not {"torch", "ignite"} & set(sys.modules)
"""
    assert python(commands, path)


def test_reading_needs_neither_torch_nor_ignite(path):
    read = """
from ignite_monitor import read_hdf5
steps, values = read_hdf5(sys.argv[1])["grad/norm"]
assert not {"torch", "ignite"} & set(sys.modules)
print(steps.sum(), values.sum())
import ignite_monitor
assert "GradMonitor" in dir(ignite_monitor)
try:
    ignite_monitor.GradMonitor
except ModuleNotFoundError as error:
    assert error.name in ("torch", "ignite")
"""
    expected = np.arange(1, 21)
    assert python(read, path).split() == [str(expected.sum()), str((1.0 + expected).sum())]


def test_names_of_the_root():
    assert set(ignite_monitor.__all__) <= set(dir(ignite_monitor))
    everything: dict[str, object] = {}
    exec("from ignite_monitor import *", everything)
    assert {name for name in everything if name[0] != "_"} == set(ignite_monitor.__all__)
    for name in ignite_monitor.__all__:
        value = getattr(ignite_monitor, name)
        assert value is everything[name]
        assert callable(value)
        assert value.__module__ == ignite_monitor._MODULE_OF[name]
        assert pickle.loads(pickle.dumps(value)) is value
        assert copy.deepcopy(value) is value
    with pytest.raises(AttributeError, match="module 'ignite_monitor' has no attribute 'GradMonitr'"):
        getattr(ignite_monitor, "GradMonitr")  # noqa: B009
    with pytest.raises(ImportError, match="cannot import name 'GradMonitr' from 'ignite_monitor'"):
        from ignite_monitor import GradMonitr  # noqa: F401


def test_help_shows_the_names_of_the_root():
    text = pydoc.render_doc(ignite_monitor, renderer=pydoc.plaintext)
    assert all(name in text for name in ignite_monitor.__all__)
