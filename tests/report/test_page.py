"""Pages of HTML: what they hold, and what they must not."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser

from ignite_monitor.hdf5.layout import SETTINGS, RecordedReport
from ignite_monitor.report.page import page
from ignite_monitor.report.summary import summarise
from tests.report import _runs as runs

EVIL = 'train/<script>alert(1)</script>"onload="x'


class Parsed(HTMLParser):
    """Tags with their attributes, and the text outside of the style."""

    def __init__(self, source):
        super().__init__()
        self.tags, self.words, self.open = [], "", []
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "source"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data if "style" not in self.open else ""


def parsed(series):
    run = runs.make_run(series)
    source = page(summarise("run.h5", run), run, "ignite-monitor 1")
    shown = Parsed(source)
    assert shown.open == []
    return shown, summarise("run.h5", run), source


def hurt():
    run = runs.grad(runs.with_spike(range(20, 200, 20)), range(20, 200, 20))
    return run | {EVIL: runs.series([1.0, 2.0, 3.0])}


def test_each_finding_is_there_and_the_figures_are_in_the_page():
    shown, summary, source = parsed(hurt())
    alarms = [finding for finding in summary.findings if finding.severity != "note"]
    assert alarms
    assert all(finding.text in shown.words for finding in summary.findings)
    assert sum(attrs.get("class") == "finding problem drawn" for _, attrs in shown.tags) + sum(
        attrs.get("class") == "finding warning drawn" for _, attrs in shown.tags
    ) == len(alarms)
    figures = [attrs.get("src") or attrs["srcset"] for tag, attrs in shown.tags if tag in ("img", "source")]
    assert all(b"<svg" in base64.b64decode(figure.partition(",")[2]) for figure in figures)
    assert "prefers-color-scheme: dark" in source


def test_nothing_is_loaded_or_run():
    shown, _, source = parsed(hurt())
    assert not {"script", "link", "iframe", "object", "a"} & {tag for tag, _ in shown.tags}
    links = [value for _, attrs in shown.tags for key, value in attrs.items() if key in ("src", "srcset", "href")]
    assert links
    assert all(link.startswith("data:image/svg+xml;base64,") for link in links)
    assert not re.search(r"https?:|url\(|@import", source)


def test_untrusted_names_are_text():
    shown, _, _ = parsed(hurt())
    assert EVIL in shown.words
    assert not any(key.startswith("on") for _, attrs in shown.tags for key in attrs)
    assert "\u202e" not in parsed({"a\u202e/loss": runs.series([1, 2])})[2]


def test_a_run_without_findings_and_metrics_without_a_finite_value():
    assert "Healthy" in parsed(runs.healthy())[0].words
    assert "Metrics" in parsed({"x": runs.series([float("nan")] * 3)})[0].words


def test_the_settings_of_the_latest_run_are_shown():
    run = runs.make_run(hurt())
    settings = [("run", "torch 1; seed 3", 0), ("run", "torch 2; seed 7", 1), ("M (m)", "every=<5", 1)]
    run.settings = [
        RecordedReport(0, monitor, SETTINGS, "note", text, (), number) for monitor, text, number in settings
    ]
    words = Parsed(page(summarise("run.h5", run), run, "ignite-monitor 1")).words
    assert "torch 2; seed 7" in words
    assert "every=<5" in words
    assert "torch 1" not in words
