"""ignite-monitor spike."""

from __future__ import annotations

import math

import pytest
import torch

from ignite_monitor.cli import main
from ignite_monitor.model.isolation import capture_rng_state
from ignite_monitor.spike_recorder.record import write

NAME = "transformer.blocks.11.attention.a_projection_with_a_long_name.weight"


def put(folder, iteration=340, rank=0, **values):
    written = {
        "iteration": iteration,
        "epoch": 3,
        "rank": rank,
        "name": "grad/norm",
        "norm": 15.1,
        "threshold": 1.08,
        "culprits": {NAME: 0.96, "head.bias": 0.04},
        "source": None,
        "lr": [1e-3, 5e-4],
        "batch": {"x": torch.zeros(64, 1, 28, 28), "y": torch.zeros(64, dtype=torch.int64), "id": ["a"] * 64},
        "losses": torch.arange(64.0),
        "random_state": capture_rng_state(),
    }
    return write(folder, f"grad-{iteration:08d}-rank{rank}", written | values)


def shown(capsys, *arguments):
    assert main(["spike", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_a_directory_is_shown_in_order(tmp_path, capsys):
    source = {
        "name": "blocks.3.attention",
        "kind": "forward",
        "text": "It comes from blocks.3.attention: its inputs are finite, and its output is not",
    }
    put(tmp_path, 1000, rank=1, source=source, norm=math.nan, culprits={}, lr=None, batch=None, losses=None)
    put(tmp_path)
    assert shown(capsys, tmp_path) == (
        f"""\
iteration 340, epoch 3: grad/norm 15.1, 14 x its threshold 1.08
  culprits  {NAME} 96%; head.bias 4%
  lr        0.001, 0.0005
  losses    row 63 63; row 62 62; row 61 61; median 31 of 64
  batch     x: float32 64x1x28x28, y: int64 64, id: 64 of str
  file      grad-00000340-rank0.spike.pt

iteration 1000, epoch 3, rank 1: grad/norm nan, threshold 1.08
  source  {source["text"]}
  file    grad-00001000-rank1.spike.pt

2 records
"""
    )


def test_one_file_is_shown(tmp_path, capsys):
    put(tmp_path)
    path = put(tmp_path, 341, threshold=math.inf)
    text = shown(capsys, path)
    assert text.startswith("iteration 341, epoch 3: grad/norm 15.1\n")
    assert text.endswith("\n1 record\n")


@pytest.mark.parametrize("path", ["none", "empty", "other"])
def test_bad_input_is_one_line(tmp_path, path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").write_text("text")
    assert main(["spike", str(tmp_path / path)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.splitlines()) == 1
    assert str(tmp_path / path) in output.err


def test_a_damaged_file_does_not_hide_the_others(tmp_path, capsys):
    put(tmp_path)
    (tmp_path / "b.spike.pt").write_bytes(b"")
    text = shown(capsys, tmp_path)
    assert text.startswith("iteration 340")
    assert text.endswith("1 record\n")
    assert str(tmp_path / "b.spike.pt") in text


def test_control_characters_are_escaped(tmp_path, capsys):
    put(tmp_path, culprits={"\x1b[31m\n": 1.0}, name="\x1b[31m")
    assert "\x1b" not in shown(capsys, tmp_path)
