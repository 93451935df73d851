"""Training-health handlers for PyTorch-Ignite."""

from ignite_monitor.activation.handler import ActivationHandler
from ignite_monitor.activation.metric import Metric
from ignite_monitor.activation.record import record
from ignite_monitor.attach_monitors import attach_monitors
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.gradient.handler import GradMonitor
from ignite_monitor.gradient.robust import RobustThreshold
from ignite_monitor.gradient.thresholds import MeanStdThreshold, StaticThreshold, ThresholdRule
from ignite_monitor.hdf5.logger import HDF5Logger
from ignite_monitor.hdf5.reader import read_hdf5
from ignite_monitor.rcc.handler import RCCHandler
from ignite_monitor.spectral.handler import SpectralNormHandler
from ignite_monitor.step_stats.handler import StepStatsHandler
from ignite_monitor.tensorboard import tensorboard_layout
from ignite_monitor.weight_update.handler import ParameterDiagnostics, WeightUpdateHandler

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
