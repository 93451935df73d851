"""Training-health handlers for PyTorch-Ignite."""

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
