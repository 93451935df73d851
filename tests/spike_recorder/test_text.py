"""ignite-monitor spike."""

from __future__ import annotations

import math
import re

import pytest
import torch

from ignite_monitor.cli import main
from ignite_monitor.spike_recorder.random_state import RandomState, saved
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
        "ids": [f"image-{i}" for i in range(64)],
        "batch": {"x": torch.zeros(64, 1, 28, 28), "y": torch.zeros(64, dtype=torch.int64), "id": ["a"] * 64},
        "losses": torch.arange(64.0),
        "random_state": saved(RandomState().now()),
    }
    path = folder / f"grad-{iteration:08d}-rank{rank}.spike.pt"
    write(path, written | values)
    return path


def shown(capsys, *arguments):
    assert main(["spike", *map(str, arguments)]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    return text


def test_a_directory_is_shown_in_order(tmp_path, capsys):
    source = {
        "name": "blocks.3.attention",
        "kind": "forward",
        "text": "It comes from blocks.3.attention: its inputs are finite, and its output is not",
    }
    put(tmp_path, 1000, rank=1, source=source, norm=math.nan, culprits={}, lr=None, ids=None, batch=None, losses=None)
    put(tmp_path)
    assert shown(capsys, tmp_path) == (
        """\
iteration 340, epoch 3: grad/norm 15.1, 14 x its threshold 1.08
  culprits  transformer.blocks.11.attention.a_projection_with_a_long_name.weight
            96%; head.bias 4%
  lr        0.001, 0.0005
  losses    row 63 (image-63) 63; row 62 (image-62) 62; row 61 (image-61) 61;
            median 31 of 64
  ids       ['image-0', 'image-1', 'image-2', 'image-3', 'image-4', 'image-5',
            'image-6', 'image-7', 'image-8', 'image-9', 'image-10', ...
  batch     x: float32 64x1x28x28, y: int64 64, id: 64 of str
  file      grad-00000340-rank0.spike.pt

iteration 1000, epoch 3, rank 1: grad/norm nan, threshold 1.08
  source    It comes from blocks.3.attention: its inputs are finite, and its
            output is not
  file      grad-00001000-rank1.spike.pt

2 records
"""
    )


def test_one_file_is_shown(tmp_path, capsys):
    put(tmp_path)
    path = put(tmp_path, 341, threshold=math.inf)
    text = shown(capsys, path)
    assert text.startswith("iteration 341, epoch 3: grad/norm 15.1\n")
    assert text.endswith("\n1 record\n")


def test_damaged_files_are_said_to_be_so(tmp_path, capsys):
    put(tmp_path)
    (tmp_path / "b.spike.pt").write_bytes(b"nothing")
    assert main(["spike", str(tmp_path)]) == 0
    text = "".join(capsys.readouterr().out.split())  # a long path may be broken anywhere
    assert re.search(r"1record\S+b\.spike\.ptisnorecord", text)


@pytest.mark.parametrize("path", ["none", "empty", "other"])
def test_bad_input_is_one_line(tmp_path, path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").write_text("text")
    assert main(["spike", str(tmp_path / path)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.splitlines()) == 1
    assert str(tmp_path / path) in output.err


def test_ids_that_are_not_the_rows(tmp_path, capsys):
    for place, ids in enumerate((7, "text", torch.arange(64), [1, 2], {"a": 1}, "\x1b[31m\n")):
        put(tmp_path, place, ids=ids)
    text = shown(capsys, tmp_path)
    assert text.count("row 63 (63) 63") == 1
    assert text.count("row 63 63") == 5
    assert "\x1b" not in text
