"""Figures of awkward runs."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from matplotlib import image
from matplotlib.axes import Axes

from ignite_monitor.report.plot import draw, picture
from tests.report import _runs as runs
from tests.report._runs import make_run

AWKWARD = {
    "one point": {name: (steps[:1], values[:1]) for name, (steps, values) in runs.weights().items()},
    "spikes": runs.grad(runs.with_spike([50, 90]), [50, 90]),
    "rollbacks": runs.grad(runs.calm_norms()) | runs.rollback([(80, 50, 20), (150, 120, 0)]),
    "nothing finite": {"a": runs.series([math.nan] * 3), "b": runs.series([math.inf, -math.inf])},
    "holes": runs.grad(np.where(np.arange(200) % 50 == 7, math.nan, runs.calm_norms())),
    "huge": {"a": runs.series([1e-300, 1e300]), "b": runs.series([-1.7e308, 1.7e308]), "c": runs.series([5e-324, 1])},
    "both signs": {"a": runs.series([-1e9, 1e-9, 1e9, 1, 1, 1]), "b": runs.series(-(10.0 ** np.arange(9)))},
    "flat": {"zero": runs.series([0, 0]), "one": runs.series([1, 1, 1]), "tiny": runs.series([1e-200] * 4)},
    "names": {
        name: runs.series([1, 2]) for name in ("x/_root_", r"$\bad", "a%s{}", "n\n\x1bl", "激活", "y/_z", "z" * 300)
    },
    "late": {"a": (np.array([10**12, 2 * 10**12]), np.array([1.0, 2.0]))},
    "step 0": {"a": (np.array([0]), np.array([1.0]))},
}


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_runs_are_drawn(tmp_path, name):
    draw(picture(make_run(AWKWARD[name])), tmp_path / "run.png", title=r"$\bad_name")
    pixels = image.imread(tmp_path / "run.png")
    assert pixels.shape[0] > 100
    assert len(np.unique((255 * pixels).astype(np.uint8).view(np.uint32))) > 5


def test_spikes_are_red(tmp_path):
    def red(run):
        draw(picture(make_run(run)), tmp_path / "run.png")
        pixels = image.imread(tmp_path / "run.png")[..., :3]
        return int(((pixels[..., 0] > 0.7) & (pixels[..., 1:] < 0.3).all(-1)).sum())

    assert red(runs.grad(runs.with_spike([50]), [50])) > 10
    assert red(runs.grad(runs.with_spike([50]))) == 0


def test_rollbacks_are_marked_in_every_panel(monkeypatch, tmp_path):
    marks, axvline = {}, Axes.axvline

    def note(axes, x, **kwargs):
        marks.setdefault(axes, []).append(x)
        return axvline(axes, x, **kwargs)

    monkeypatch.setattr(Axes, "axvline", note)
    shown = picture(make_run(AWKWARD["rollbacks"]))
    assert shown.rollbacks == (80, 150)
    draw(shown, tmp_path / "run.png")
    assert len(marks) == len(shown.panels)
    assert all({80, 150} <= set(steps) for steps in marks.values())


def test_one_screen_is_no_higher_than_a_screen(tmp_path):
    run = runs.healthy() | {f"activation/a/metric_{each}": runs.series(runs.noise(40, each), 5) for each in range(14)}
    draw(picture(make_run(run)), tmp_path / "run.png")
    height, width = image.imread(tmp_path / "run.png").shape[:2]
    assert height < 1100
    assert width < 1920
    draw(picture(make_run(run), every=True), tmp_path / "run.png")
    assert image.imread(tmp_path / "run.png").shape[0] > 1.5 * height


@pytest.mark.parametrize("ending", ["pdf", "svg", "PNG"])
def test_other_formats(tmp_path, ending):
    draw(picture(make_run(runs.grad(runs.calm_norms()))), tmp_path / f"run.{ending}")
    start = (tmp_path / f"run.{ending}").read_bytes()[:8]
    assert start.startswith({"pdf": b"%PDF", "svg": b"<?xml", "PNG": b"\x89PNG"}[ending])


def test_matplotlib_is_imported_only_to_draw():
    program = "import sys, ignite_monitor.cli, ignite_monitor.report.plot; print('matplotlib' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "False\n"
    )


@pytest.mark.parametrize("dark", [False, True])
def test_the_background_is_opaque_and_white_or_dark(tmp_path, dark):
    draw(picture(make_run(runs.healthy())), tmp_path / "run.png", title="run.h5", dark=dark)
    pixels = image.imread(tmp_path / "run.png")
    assert (pixels[..., 3] == 1).all()
    for colour in (*pixels[0, 0, :3], np.median(pixels[..., :3])):
        assert colour < 0.2 if dark else colour == 1
