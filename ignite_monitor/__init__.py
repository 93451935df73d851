"""Training-health handlers for PyTorch-Ignite."""

from ignite_monitor.events import MonitorEvents
from ignite_monitor.functional.robust import RobustThreshold
from ignite_monitor.functional.thresholds import MeanStdThreshold, StaticThreshold, ThresholdRule
from ignite_monitor.handlers.grad_monitor import GradMonitor
from ignite_monitor.handlers.weight_update import ParameterDiagnostics, WeightUpdateHandler
from ignite_monitor.hdf5.logger import HDF5Logger
from ignite_monitor.hdf5.reader import read_hdf5
from ignite_monitor.tensorboard import tensorboard_layout

__all__ = [
    "GradMonitor",
    "HDF5Logger",
    "MeanStdThreshold",
    "MonitorEvents",
    "ParameterDiagnostics",
    "RobustThreshold",
    "StaticThreshold",
    "ThresholdRule",
    "WeightUpdateHandler",
    "read_hdf5",
    "tensorboard_layout",
]
