"""Figures: their panels, and the files."""

from __future__ import annotations

import math
import re
import subprocess
import sys

import numpy as np
import pytest
from matplotlib import image
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ignite_monitor.hdf5.reader import RecordedReport
from ignite_monitor.keys import SCHEMAS
from ignite_monitor.report.plot import ONE_SCREEN, draw, picture
from tests.report import _runs as runs
from tests.report._runs import make_run


def panels(run, pattern=None, every=True):
    shown = picture(make_run(run), re.compile(pattern) if pattern else None, every)
    return {panel.title: panel for panel in shown.panels}


def test_every_metric_of_a_run_is_in_a_panel():
    run = runs.healthy()
    shown = {line.label for panel in panels(run).values() for line in panel.lines}
    for words in ("norm", "threshold", "update_ratio_median", "frozen_count", "blocks.2.mlp", "train/loss", "norm_max"):
        assert words in shown
    assert {"grad: norm", "rcc: weight_update", "step/time_ms"} <= set(panels(run))


def test_spikes_are_marked_at_their_norms():
    run = runs.grad(runs.with_spike([50]), [50])
    assert picture(make_run(run)).spikes == (50,)
    marked = panels(run)["grad: norm"].marked
    assert (marked.iterations.tolist(), marked.values.tolist()) == ([50], [60])
    assert any(title.startswith("grad: counts") for title in panels(run))


def test_the_value_of_a_spike_monitor_is_shown_with_its_threshold():
    names = {"value": [1, 1, 9, 1], "threshold": [2, 2, 2, 2], "spike": [0, 0, 1, 0]}
    panel = panels({f"update/{name}": runs.series(values) for name, values in names.items()}, "value|threshold|spike$")
    chart = panel["update: value"]
    assert {line.label: line.style for line in chart.lines} == {"value": "solid", "threshold": "dashed"}
    assert chart.marked.iterations.tolist() == [3]


def test_a_selection_shows_what_matches_and_nothing_else():
    (panel,) = panels(runs.healthy(), "^grad/norm$").values()
    assert (panel.title, [line.label for line in panel.lines]) == ("grad: norm", ["norm"])
    assert list(panels(runs.healthy(), r"blocks\.1.*dead")) == ["activation: dead_fraction"]
    assert panels(runs.healthy(), "no such") == {}


def test_metrics_of_the_same_name_share_a_panel():
    names = ("train/loss", "val/loss", "lr/group_0", "lr/group_1", "val/accuracy")
    shown = panels({name: runs.series([1, 2]) for name in names})
    assert {title: len(panel.lines) for title, panel in shown.items()} == {"loss": 2, "lr": 2, "val/accuracy": 1}
    assert next(iter(shown)) == "loss"


# One screen


def long_run():
    """Every monitor, with 30 metrics of the activations, and a spike; frozen_count and the like are 0 throughout."""
    run = runs.healthy() | runs.grad(runs.with_spike([50]), [50])
    for metric in range(30):
        run[f"activation/a/metric_{metric}"] = runs.series(runs.noise(40, metric), 5)
    return run


def test_one_screen_shows_what_matters_and_says_what_is_omitted():
    shown = picture(make_run(long_run()))
    assert len(shown.panels) == ONE_SCREEN
    every = picture(make_run(long_run()), every=True)
    omitted = len(every.panels) - ONE_SCREEN
    assert shown.headline == f"Needs attention: 1 warning.   ({omitted} more panels with --all)"
    assert every.headline == "Needs attention: 1 warning."
    titles = [panel.title for panel in shown.panels]
    assert titles[:3] == ["grad: norm", "train/loss", "val/accuracy"]


def test_constants_are_omitted():
    run = runs.weights() | {
        "lr": runs.series([0.1] * 9),
        "momentum": runs.series([0.9] * 9),
        "loss": runs.series([2, 1]),
    }
    run |= {f"activation/{name}/std": runs.series([1.0] * 9 if name == "b" else runs.noise(9)) for name in "abc"}
    shown = panels(run, every=False)
    ratios, norms = ("monitor: update_ratio", "monitor: grad")
    assert set(shown) == {"loss", ratios, norms, "activation: std"}
    assert [line.label for line in shown["activation: std"].lines] == ["a", "c"]
    assert {"lr", "momentum", "monitor: counts"} <= set(panels(run))
    assert list(panels({"lr": runs.series([0.1] * 9)}, every=False)) == ["lr"]


def test_every_monitor_has_panels():
    """One that the figure knows nothing else of too."""
    for schema in SCHEMAS:
        steps, values = np.arange(1, 5), np.array([1.0, 2.0, 3.0, 2.0])
        names = ["/".join(filter(None, [schema.prefix, re.sub(r"{\w+}", "0", key.pattern)])) for key in schema.keys]
        assert picture(make_run(dict.fromkeys(names, (steps, values))), every=True).panels, schema.kind


# Files

AWKWARD = {
    "one point": {name: (steps[:1], values[:1]) for name, (steps, values) in runs.weights().items()},
    "spikes": runs.grad(runs.with_spike([50, 90]), [50, 90]),
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


def test_events_are_marked_in_every_panel(monkeypatch, tmp_path):
    marks, axvline = {}, Axes.axvline

    def note(axes, x, **kwargs):
        marks.setdefault(axes, []).append((x, kwargs["label"]))
        return axvline(axes, x, **kwargs)

    monkeypatch.setattr(Axes, "axvline", note)
    run = make_run(runs.grad(runs.calm_norms()))
    events = [(80, "rolled_back", "warning"), (150, "rolled_back", "warning"), (3, "too_few", "problem")]
    events.append((9, "unknown_items", "note"))
    run.reports = [RecordedReport(at, "M (m)", kind, severity, "is so", (), 1) for at, kind, severity in events]
    shown = picture(run)
    draw(shown, tmp_path / "run.png")
    assert len(marks) == len(shown.panels)
    assert all(of == [(80, "rolled_back"), (150, "_"), (3, "too_few")] for of in marks.values())


def test_legends_cover_no_data(monkeypatch, tmp_path):
    figures, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure) or save(figure, *args, **kwargs)
    )
    draw(picture(make_run(runs.healthy())), tmp_path / "run.png")
    (figure,) = figures
    legends = [axes for axes in figure.axes if axes.get_legend()]
    assert legends
    for axes in legends:
        box = axes.get_legend().get_window_extent()
        assert axes.bbox.y1 <= box.y0 < box.y1 <= axes.title.get_window_extent().y1
        assert box.x1 <= figure.bbox.x1


def test_one_screen_is_no_higher_than_a_screen(tmp_path):
    run = runs.healthy() | {f"activation/a/metric_{item}": runs.series(runs.noise(40, item), 5) for item in range(14)}
    draw(picture(make_run(run)), tmp_path / "run.png")
    height, width = image.imread(tmp_path / "run.png").shape[:2]
    assert height < 1100
    assert width < 1920
    draw(picture(make_run({"a": runs.series([1, 2])})), tmp_path / "run.png")
    assert image.imread(tmp_path / "run.png").shape[0] < height / 1.5


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
    draw(picture(make_run(runs.grad(runs.calm_norms()))), tmp_path / "run.png", title="run.h5", dark=dark)
    pixels = image.imread(tmp_path / "run.png")
    assert (pixels[..., 3] == 1).all()
    for colour in (*pixels[0, 0, :3], np.median(pixels[..., :3])):
        assert colour < 0.2 if dark else colour == 1
