"""Training-health handlers for PyTorch-Ignite."""

import importlib
import typing

if typing.TYPE_CHECKING:
    from ignite_monitor.capture.record import record
    from ignite_monitor.events import MonitorEvents
    from ignite_monitor.functional.robust import RobustThreshold
    from ignite_monitor.functional.thresholds import MeanStdThreshold, StaticThreshold, ThresholdRule
    from ignite_monitor.handlers.activations import ActivationHandler
    from ignite_monitor.handlers.attach_monitors import attach_monitors
    from ignite_monitor.handlers.grad_monitor import GradMonitor
    from ignite_monitor.handlers.metric import Metric
    from ignite_monitor.handlers.rcc import RCCHandler
    from ignite_monitor.handlers.spectral_norm import SpectralNormHandler
    from ignite_monitor.handlers.step_stats import StepStatsHandler
    from ignite_monitor.handlers.weight_update import ParameterDiagnostics, WeightUpdateHandler
    from ignite_monitor.hdf5.logger import HDF5Logger
    from ignite_monitor.hdf5.reader import read_hdf5
    from ignite_monitor.tensorboard import tensorboard_layout

__all__ = [
    "ActivationHandler",
    "GradMonitor",
    "HDF5Logger",
    "MeanStdThreshold",
    "Metric",
    "MonitorEvents",
    "ParameterDiagnostics",
    "RCCHandler",
    "RobustThreshold",
    "SpectralNormHandler",
    "StaticThreshold",
    "StepStatsHandler",
    "ThresholdRule",
    "WeightUpdateHandler",
    "attach_monitors",
    "read_hdf5",
    "record",
    "tensorboard_layout",
]

_PLACES = {
    "capture.record": ("record",),
    "events": ("MonitorEvents",),
    "functional.robust": ("RobustThreshold",),
    "functional.thresholds": ("MeanStdThreshold", "StaticThreshold", "ThresholdRule"),
    "handlers.activations": ("ActivationHandler",),
    "handlers.attach_monitors": ("attach_monitors",),
    "handlers.grad_monitor": ("GradMonitor",),
    "handlers.metric": ("Metric",),
    "handlers.rcc": ("RCCHandler",),
    "handlers.spectral_norm": ("SpectralNormHandler",),
    "handlers.step_stats": ("StepStatsHandler",),
    "handlers.weight_update": ("ParameterDiagnostics", "WeightUpdateHandler"),
    "hdf5.logger": ("HDF5Logger",),
    "hdf5.reader": ("read_hdf5",),
    "tensorboard": ("tensorboard_layout",),
}


def __getattr__(name: str) -> typing.Any:
    # Importing torch and ignite takes seconds, and the command line needs neither to look at a file.
    for place, names in _PLACES.items():
        if name in names:
            globals()[name] = value = getattr(importlib.import_module(f"{__name__}.{place}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *(name for names in _PLACES.values() for name in names)})
