"""Values returned by the HTTP API of a running TensorBoard server."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest
import torch
from ignite.engine import Events, create_supervised_trainer
from ignite.handlers.tensorboard_logger import TensorboardLogger

from ignite_monitor import GradMonitor, SpikeMonitor, StaticThreshold, WeightUpdateHandler, attach_monitors
from ignite_monitor.tensorboard import tensorboard_layout

PATIENCE = 600


def train(directory, tag):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = create_supervised_trainer(model, optimizer, torch.nn.functional.mse_loss)
    monitors = [GradMonitor(model, optimizer, threshold=StaticThreshold(100.0)), WeightUpdateHandler(model, optimizer)]
    logger = TensorboardLogger(log_dir=str(directory))
    for monitor in monitors:
        monitor.attach(trainer)
        monitor.log_to(logger, trainer, tag=tag)
    logger.attach_output_handler(
        trainer, Events.ITERATION_COMPLETED, tag="train", output_transform=lambda loss: {"loss": loss}
    )
    logger.add_custom_scalars(tensorboard_layout(*monitors))
    trainer.run([(torch.randn(4, 3), torch.randn(4, 1))] * 8)
    logger.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    train(directory / "plain", tag=None)
    train(directory / "tagged", tag="train")
    command = ["-m", "tensorboard.main", "--logdir", str(directory), "--port", "0", "--host", "127.0.0.1"]
    output = tmp_path_factory.mktemp("log") / "output"
    with output.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *command, "--load_fast=false", "--reload_interval=1"], stdout=log, stderr=log
        )
    try:
        yield wait_for(lambda: address(process, output))
    finally:
        process.terminate()
        process.wait()


def address(process, output):
    assert process.poll() is None, output.read_text()
    result = re.search(r"http://127\.0\.0\.1:\d+", output.read_text())
    return result[0] if result else None


def wait_for(question):
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            if answer := question():
                return answer
        time.sleep(0.2)
    raise TimeoutError(f"No answer in {PATIENCE} seconds")


def ask(server, path, **query):
    url = f"{server}/data/plugin/{path}?{urllib.parse.urlencode(query)}"
    return json.load(urllib.request.urlopen(url, timeout=PATIENCE))


def tags(server):
    """run -> its tags, once all have been read."""

    def read():
        result = ask(server, "scalars/tags")
        full = {"plain", "tagged"} <= set(result) and all("train/loss" in result[run] for run in result)
        return full and {run: set(result[run]) for run in result}

    return wait_for(read)


@pytest.mark.parametrize("run", ["plain", "tagged"])
def test_a_chart_holds_norm_and_threshold(server, run):
    tags(server)
    layout = wait_for(lambda: ask(server, "custom_scalars/layout").get("category"))
    charts = {
        (category["title"], chart["title"]): chart["multiline"]["tag"]
        for category in layout
        for chart in category["chart"]
    }
    (pattern,) = charts["grad", "norm against its threshold"]
    answer = ask(server, "custom_scalars/scalars", run=run, tag=pattern)
    assert answer["regex_valid"]
    start = "train/" if run == "tagged" else ""
    assert set(answer["tag_to_events"]) == {f"{start}grad/norm", f"{start}grad/threshold"}
    points = answer["tag_to_events"][f"{start}grad/threshold"]
    assert [(step, value) for _, step, value in points] == [(step, 100.0) for step in range(1, 9)]


def test_every_chart_finds_something_but_those_of_what_did_not_happen(server):
    tags(server)
    layout = wait_for(lambda: ask(server, "custom_scalars/layout").get("category"))
    empty = [
        chart["title"]
        for category in layout
        for chart in category["chart"]
        if not ask(server, "custom_scalars/scalars", run="plain", tag=chart["multiline"]["tag"][0])["tag_to_events"]
    ]
    assert set(empty) == {"updates lost to rounding"}


def test_layouts_are_by_prefix():
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    layout = tensorboard_layout(GradMonitor(model, prefix="a.b"), GradMonitor(model, optimizer, prefix="c"))
    assert list(layout) == ["a.b", "c"]
    (pattern,) = layout["a.b"]["norm against its threshold"][1]
    assert re.match(pattern, "x/a.b/norm")
    assert not re.match(pattern, "aXb/norm")
    assert not re.match(pattern, "a.b/norm_else")
    assert tensorboard_layout() == {}


def test_layouts_of_handles_are_those_of_their_monitors():
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = create_supervised_trainer(model, optimizer, torch.nn.functional.mse_loss)
    attached = attach_monitors(trainer, model, optimizer, prefix="a")
    own = SpikeMonitor(lambda engine: 1.0)
    handle = own.attach(trainer)
    assert tensorboard_layout(attached, handle) == tensorboard_layout(*attached.monitors.values(), own)
    assert list(tensorboard_layout(handle)) == ["spike"]


def test_what_is_no_monitor_is_refused():
    with pytest.raises(TypeError, match="Argument monitors should be"):
        tensorboard_layout("grad")
