"""Settings of a run, recorded as reports: versions and seed, and the arguments of each monitor."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch
from ignite.engine import Engine

from ignite_monitor.events.source import EventSource
from ignite_monitor.hdf5.layout import SETTINGS
from ignite_monitor.monitor.reports import Report

PACKAGES = ("ignite-monitor", "torch", "pytorch-ignite", "numpy")


def settings_of(engine: Engine) -> list[Report]:
    """Describe an engine whose run starts; empty if no monitor is attached to it."""
    source = EventSource.on(engine)
    if source is None or not source.monitors:
        return []
    versions = [f"Python {platform.python_version()}", *map(_with_version, PACKAGES)]
    texts = [("run", f"{', '.join(versions)}; seed {torch.initial_seed()} of torch")]
    texts += [(monitor._title, monitor.given_arguments) for monitor in source.monitors]
    return [Report(engine.state.iteration, name, SETTINGS, "note", text) for name, text in texts]


def _with_version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} (not installed)"
