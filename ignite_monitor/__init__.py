"""Training-health handlers for PyTorch-Ignite."""

from ignite_monitor.capture.record import record
from ignite_monitor.events import MonitorEvents
from ignite_monitor.functional.robust import RobustThreshold
from ignite_monitor.functional.thresholds import MeanStdThreshold, StaticThreshold, ThresholdRule
from ignite_monitor.handlers.activations import ActivationHandler
from ignite_monitor.handlers.grad_monitor import GradMonitor
from ignite_monitor.handlers.metric import Metric
from ignite_monitor.handlers.rcc import RCCHandler
from ignite_monitor.handlers.weight_update import ParameterDiagnostics, WeightUpdateHandler

__all__ = [
    "ActivationHandler",
    "GradMonitor",
    "MeanStdThreshold",
    "Metric",
    "MonitorEvents",
    "ParameterDiagnostics",
    "RCCHandler",
    "RobustThreshold",
    "StaticThreshold",
    "ThresholdRule",
    "WeightUpdateHandler",
    "record",
]
